//! The generator, which sends numbered packets as fast as the planes take them.

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple::spread::FlowKey;
use fourtuple_syscalls::datagram::{Batch, Outgoing};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{option, resource, schedule};

use crate::lab::Watch;

/// Packets per send call.
const BURST: u64 = 64;
/// Maximum number of packets in flight, below net.core.netdev_max_backlog (1000), so that no device drops packets.
const WINDOW: u64 = 512;

/// The processor of the generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// The last processor, which has the fewest planes.
    Apart,
    /// The first processor, shared with all planes, which have lower priority: the generator fills their queues, then they
    /// empty them.
    Between,
}

impl Placement {
    /// Returns the processor, among the processors that this thread may use.
    pub(super) fn processor(self) -> io::Result<Option<usize>> {
        let allowed = schedule::allowed_cpus()?;
        Ok(match self {
            Placement::Apart => allowed.last().copied(),
            Placement::Between => allowed.first().copied(),
        })
    }

    /// Returns the sleep between two checks for space in the window.
    fn pause(self) -> Duration {
        match self {
            Placement::Apart => Duration::from_micros(20),
            Placement::Between => Duration::from_micros(200),
        }
    }
}

/// A packet counts as lost if no packet arrives for this long.
const LOST_AFTER_NS: u64 = 250_000_000;

/// Minimum number of inner flows: they divide evenly among up to 6, 8, 10 or 12 planes.
const INNER_FLOWS: u32 = 120;

/// Returns the number of inner flows of all 4-tuples together: the same number for each 4-tuple.
pub(super) fn inner_flows(tuples: u32) -> u32 {
    tuples * INNER_FLOWS.div_ceil(tuples)
}

/// Returns the number of packets of `bytes` bytes that may be in flight with a receive queue of `queue` bytes as the kernel
/// counts them (`truesize`: the buffer's size, a power of 2, and its metadata). A quarter of the queue stays free, since
/// the kernel releases memory late.
pub(super) fn window(bytes: u32, queue: i32) -> u64 {
    let each = u64::from((bytes + 400).next_power_of_two()) + 256;
    (queue.max(0) as u64 * 3 / 4 / each).clamp(16, WINDOW)
}

/// The packet generator, with one socket per 4-tuple.
pub(super) struct Generator {
    sockets: Vec<OwnedFd>,
    bytes: u32,
}

/// The counts and times of one pass of the generator.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SendCounts {
    pub(super) packets: u64,
    /// Time of the first packet sent, CLOCK_MONOTONIC.
    pub(super) begun_ns: u64,
    /// Time spent waiting while the window of packets in flight was full.
    pub(super) waited_ns: u64,
    /// Time between the first and the last packet sent.
    pub(super) sending_ns: u64,
    pub(super) cpu: Duration,
    /// Whether the pass was told to stop.
    pub(super) cut: bool,
}

impl Generator {
    pub(super) fn open(to: SocketAddr, tuples: u32, bytes: u32) -> io::Result<Generator> {
        let open = |_| {
            let socket = socket::open(Transport::Udp, to, true)?;
            socket::connect(socket.as_fd(), to)?;
            Ok(socket)
        };
        Ok(Generator { sockets: (0..tuples).map(open).collect::<io::Result<_>>()?, bytes })
    }

    /// Sends `packets` packets, at most `window` of them in flight, and waits for the last to arrive.
    pub(super) fn run(
        &self,
        packets: u64,
        window: u64,
        place: Placement,
        arrivals: &Arrivals,
        watch: &Watch<'_>,
    ) -> io::Result<SendCounts> {
        let _ = schedule::sleep_precisely();
        // On one processor, packets do not overtake each other before they reach a plane.
        if let Some(processor) = place.processor()? {
            schedule::pin_to(processor)?;
        }
        let tuples = self.sockets.len() as u64;
        let each = u64::from(inner_flows(tuples as u32)) / tuples;
        let mut made = vec![0_u64; self.sockets.len()];
        let mut batch = Batch::new(BURST as usize, self.bytes as usize);
        let mut outgoing = Outgoing::new();
        let mut in_flight = InFlight::new(arrivals, place.pause());
        let mut sent = SendCounts { begun_ns: resource::monotonic_ns(), ..SendCounts::default() };
        let mut turn = 0;
        while sent.packets < packets {
            if watch.stopped() {
                sent.cut = true;
                break;
            }
            let free = window.saturating_sub(in_flight.in_flight(sent.packets));
            let burst = (packets - sent.packets).min(BURST);
            if free < burst.min(window) {
                sent.waited_ns += in_flight.wait(sent.packets);
                // With planes on the same processor, the generator refills their queues once they are empty, not sooner.
                while place == Placement::Between && in_flight.in_flight(sent.packets) > 0 && !watch.stopped()
                {
                    sent.waited_ns += in_flight.wait(sent.packets);
                }
                continue;
            }
            watch.progress.at(sent.packets);
            let tuple = turn % tuples;
            turn += 1;
            outgoing.clear();
            for index in 0..burst.min(window) as usize {
                // The flows of a 4-tuple take turns; no flow belongs to two 4-tuples.
                let number = made[tuple as usize] + index as u64;
                let flow = tuple + tuples * (number % each);
                write(batch.room_mut(index), flow as u32, number / each);
                outgoing.message(None, None);
                outgoing.part(index, 0..self.bytes as usize);
            }
            let mut first = 0;
            while first < outgoing.len() {
                match outgoing.send(self.sockets[tuple as usize].as_fd(), &batch, first) {
                    Ok(number) => first += number,
                    // The device queue is full for the moment.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::yield_now(),
                    Err(error) => return Err(error),
                }
            }
            made[tuple as usize] += first as u64;
            sent.packets += first as u64;
        }
        sent.sending_ns = resource::monotonic_ns() - sent.begun_ns;
        while !sent.cut && in_flight.in_flight(sent.packets) > 0 && !watch.stopped() {
            in_flight.wait(sent.packets);
        }
        sent.cpu = resource::thread_cpu_time();
        Ok(sent)
    }
}

/// The progress of the packets in flight: arrivals that were seen, and packets given up as lost.
struct InFlight<'a> {
    arrivals: &'a Arrivals,
    pause: Duration,
    /// Packets that did not arrive in time.
    lost: u64,
    seen: u64,
    seen_ns: u64,
}

impl<'a> InFlight<'a> {
    fn new(arrivals: &'a Arrivals, pause: Duration) -> InFlight<'a> {
        InFlight { arrivals, pause, lost: 0, seen: 0, seen_ns: resource::monotonic_ns() }
    }

    fn in_flight(&self, sent: u64) -> u64 {
        sent.saturating_sub(self.lost + self.arrivals.packets.load(Ordering::Acquire))
    }

    /// Sleeps once and gives up lost packets; returns the time slept.
    fn wait(&mut self, sent: u64) -> u64 {
        let begun = resource::monotonic_ns();
        thread::sleep(self.pause);
        let now = resource::monotonic_ns();
        let arrived = self.arrivals.packets.load(Ordering::Acquire);
        if arrived != self.seen {
            (self.seen, self.seen_ns) = (arrived, now);
        } else if now - self.seen_ns > LOST_AFTER_NS {
            self.lost = sent.saturating_sub(arrived);
            self.seen_ns = now;
        }
        now - begun
    }
}

const FLOW: Range<usize> = 0..4;

const NUMBER: Range<usize> = 4..12;

/// Length of the shortest packet with both numbers, in bytes.
pub(super) const MIN_BYTES: u32 = 16;

/// Returns the position of the flow in the payload, for selectors by key.
pub(super) fn key() -> FlowKey {
    FlowKey::whole(FLOW.start as u16, FLOW.len() as u8)
}

/// Writes both numbers; leaves a packet that is too short unchanged.
pub(super) fn write(packet: &mut [u8], flow: u32, number: u64) {
    if let Some(bytes) = packet.get_mut(FLOW) {
        bytes.copy_from_slice(&flow.to_be_bytes());
    }
    if let Some(bytes) = packet.get_mut(NUMBER) {
        bytes.copy_from_slice(&number.to_be_bytes());
    }
}

/// Returns flow and sequence number; `None` if the packet is too short.
pub(super) fn read(packet: &[u8]) -> Option<(u32, u64)> {
    let flow = u32::from_be_bytes(packet.get(FLOW)?.try_into().ok()?);
    Some((flow, u64::from_be_bytes(packet.get(NUMBER)?.try_into().ok()?)))
}

/// Checks the sequence numbers of arriving packets.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The next expected sequence number of each flow.
    next: Vec<u64>,
    /// Packets that arrived after a later packet of their flow.
    pub(super) reordered: u64,
}

impl Order {
    pub(super) fn new(flows: u32) -> Order {
        Order { next: vec![0; flows as usize], reordered: 0 }
    }

    /// Records a packet; returns whether the generator sent it.
    fn saw(&mut self, packet: &[u8]) -> bool {
        let Some((flow, number)) = read(packet) else { return false };
        let Some(next) = self.next.get_mut(flow as usize) else { return false };
        if number < *next {
            self.reordered += 1;
        } else {
            *next = number + 1;
        }
        true
    }
}

/// Requested size of the receive queue in bytes; the kernel limits it to net.core.rmem_max.
pub(super) const QUEUE: i32 = 4 << 20;

/// Messages per receive call, and the buffer size for each: UDP_GRO joins packets up to 64 KiB.
const BATCH: usize = 64;
const BUFFER: usize = 1025 * 64;

/// Polling interval of the sink. The sink does not block for packets: its wakeups would cost the planes CPU time.
const PAUSE: Duration = Duration::from_micros(30);

/// The sink's progress, as other threads read it.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
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
        let mut batch = Batch::new(BATCH, BUFFER);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tuple_has_as_many_inner_flows() {
        for tuples in [1, 2, 7, 64, 120, 121, 1024] {
            assert_eq!(inner_flows(tuples) % tuples, 0, "{tuples}");
            assert!(inner_flows(tuples) >= INNER_FLOWS);
        }
        assert_eq!(inner_flows(1), 120);
    }

    #[test]
    fn the_window_fits_into_the_queue() {
        // The queue size that the kernel permits with net.core.rmem_max at its default.
        assert_eq!(window(64, 425_984), 416);
        assert_eq!(window(1400, 425_984), 138);
        assert_eq!(window(9000, 425_984), 19);
        assert_eq!(window(64, 8 << 20), WINDOW);
    }

    #[test]
    fn flow_and_number_survive_writing_and_reading() {
        let mut packet = [0xff; MIN_BYTES as usize];
        write(&mut packet, 7, 1 << 40);
        assert_eq!(read(&packet), Some((7, 1 << 40)));
        assert_eq!(key().of(&packet), Some(7));
        assert_eq!(read(&packet[..11]), None);
    }

    #[test]
    fn order_is_that_of_the_flow() {
        let mut order = Order::new(2);
        let mut packet = [0; 16];
        for (flow, number) in [(0, 0), (1, 5), (0, 2), (0, 1), (1, 6), (0, 3), (1, 4)] {
            write(&mut packet, flow, number);
            assert!(order.saw(&packet));
        }
        assert_eq!(order.reordered, 2);
        write(&mut packet, 2, 0);
        assert!(!order.saw(&packet), "there is no such flow");
    }
}
