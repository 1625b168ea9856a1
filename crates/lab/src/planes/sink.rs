//! The sink: counts the packets that the planes have forwarded.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{option, resource, schedule};

use crate::planes::generator::Placement;
use crate::planes::packet::Order;

/// Requested size of the receive queue in bytes; the kernel limits it to net.core.rmem_max.
pub(super) const QUEUE: i32 = 4 << 20;

/// Messages per receive call, and the buffer size for each: UDP_GRO joins packets up to 64 KiB.
const BATCH: usize = 64;
const ROOM: usize = 1025 * 64;

/// Polling interval of the sink. The sink does not block for packets: its wakeups would cost the planes CPU time.
const PAUSE: Duration = Duration::from_micros(30);

/// The sink's progress, as other threads read it.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// Packets that arrived.
    pub(super) packets: AtomicU64,
    /// Time of the last arrival, CLOCK_MONOTONIC.
    pub(super) last_ns: AtomicU64,
    /// Tells the sink to end once its queue is empty.
    pub(super) over: AtomicBool,
}

/// The sink's socket and its receive buffer size.
pub(super) struct Sink {
    socket: OwnedFd,
    /// Size of the receive queue (SO_RCVBUF) in bytes, as the kernel counts it.
    pub(super) queue: i32,
}

/// The observations of the sink.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SinkCounts {
    pub(super) reordered: u64,
    /// Packets that the kernel dropped because the receive queue was full.
    pub(super) dropped: u64,
    pub(super) cpu: Duration,
}

impl Sink {
    /// Opens the sink's socket with UDP_GRO, so that messages sent with UDP_SEGMENT stay whole up to here, as on a device
    /// that segments in hardware; otherwise the planes would pay for the segmentation.
    pub(super) fn open(address: SocketAddr) -> io::Result<Sink> {
        let socket = socket::open(Transport::Udp, address, true)?;
        let queue = option::set_receive_buffer(socket.as_fd(), QUEUE)?;
        let _ = option::set_udp_gro(socket.as_fd(), true)?;
        socket::bind(socket.as_fd(), address)?;
        Ok(Sink { socket, queue })
    }

    /// Counts packets until told to end.
    pub(super) fn run(&self, flows: u32, place: Placement, arrivals: &Arrivals) -> SinkCounts {
        // Oversleeping only makes packets wait longer.
        let _ = schedule::sleep_precisely();
        let mut pause = PAUSE;
        if place == Placement::Between {
            // On one processor, each wakeup of the sink could let the scheduler run the plane instead of the generator
            // before the queue is full.
            if let Ok(Some(last)) = Placement::Apart.processor() {
                let _ = schedule::pin_to(last);
            }
            pause *= 4;
        }
        let mut order = Order::new(flows);
        let mut batch = Batch::new(BATCH, ROOM);
        loop {
            let over = arrivals.over.load(Ordering::Acquire);
            if batch.receive(self.socket.as_fd()).is_err() {
                if over {
                    break;
                }
                thread::sleep(pause);
                continue;
            }
            let mut packets = 0;
            for message in batch.iter() {
                let segment = message.segment.map_or(message.bytes.len(), usize::from).max(1);
                packets += message.bytes.chunks(segment).filter(|packet| order.saw(packet)).count() as u64;
            }
            arrivals.last_ns.store(resource::monotonic_ns(), Ordering::Relaxed);
            arrivals.packets.fetch_add(packets, Ordering::Release);
        }
        let dropped = option::dropped(self.socket.as_fd()).unwrap_or(0);
        SinkCounts { reordered: order.reordered, dropped: dropped.into(), cpu: resource::thread_cpu_time() }
    }
}
