//! Whoever counts what comes out behind the planes.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{option, resource, schedule};

use super::generator::Place;
use super::packet::Order;

/// Bytes that may wait; the kernel gives at most net.core.rmem_max.
pub(super) const QUEUE: i32 = 4 << 20;

/// Messages with one call, and the room for each: what UDP_GRO leaves together is up to 64 KiB.
const BATCH: usize = 64;
const ROOM: usize = 1025 * 64;

/// It looks this often. It does not wait for packets, as otherwise the planes would pay for waking it.
const PAUSE: Duration = Duration::from_micros(30);

/// What others see of it.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// Packets that arrived.
    pub(super) packets: AtomicU64,
    /// When the last did, CLOCK_MONOTONIC.
    pub(super) last_ns: AtomicU64,
    /// It is to end when nothing waits any more.
    pub(super) over: AtomicBool,
}

/// The socket and the room of the sink.
pub(super) struct Sink {
    socket: OwnedFd,
    /// Bytes that may wait, as the kernel counts them.
    pub(super) queue: i32,
}

/// What it saw.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    pub(super) reordered: u64,
    /// What its queue had no room for.
    pub(super) dropped: u64,
    pub(super) cpu: Duration,
}

impl Sink {
    /// Messages that were cut by UDP_SEGMENT stay whole until here (UDP_GRO), as on a device that cuts them itself: otherwise
    /// the planes would be charged for cutting.
    pub(super) fn open(address: SocketAddr) -> io::Result<Sink> {
        let socket = socket::open(Transport::Udp, address, true)?;
        let queue = option::set_receive_buffer(socket.as_fd(), QUEUE)?;
        let _ = option::set_udp_gro(socket.as_fd(), true)?;
        socket::bind(socket.as_fd(), address)?;
        Ok(Sink { socket, queue })
    }

    /// Counts until told that it is over.
    pub(super) fn run(&self, flows: u32, place: Place, arrivals: &Arrivals) -> Seen {
        // One that oversleeps lets packets wait longer, and no more.
        let _ = schedule::sleep_precisely();
        let mut pause = PAUSE;
        if place == Place::Between {
            // Each time that it was awake there, the scheduler might give the processor to the plane instead of back to the
            // generator, before the queue is full.
            if let Ok(Some(last)) = Place::Apart.processor() {
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
        Seen { reordered: order.reordered, dropped: dropped.into(), cpu: resource::thread_cpu_time() }
    }
}
