//! Sends numbered packets, as fast as the planes take them.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use fourtuple_syscalls::datagram::{Batch, Outgoing};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{resource, schedule};

use super::packet;
use super::sink::Arrivals;
use crate::Watch;

/// Packets with one call.
const BURST: u64 = 64;
/// The most packets that may be under way. Below net.core.netdev_max_backlog (1000), so that no device drops them.
const WINDOW: u64 = 512;

/// Where it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// On the last processor, where the fewest planes are.
    Apart,
    /// On the first, where in this case all planes are, which give way to it: it fills their queues, then they empty them.
    Between,
}

impl Place {
    /// The processor, of those that this thread may use.
    pub(super) fn processor(self) -> io::Result<Option<usize>> {
        let allowed = schedule::allowed_cpus()?;
        Ok(match self {
            Place::Apart => allowed.last().copied(),
            Place::Between => allowed.first().copied(),
        })
    }

    /// How long it waits before it looks again whether there is room for more.
    fn pause(self) -> Duration {
        match self {
            Place::Apart => Duration::from_micros(20),
            Place::Between => Duration::from_micros(200),
        }
    }
}

/// Packets that have not arrived after this long without any other are lost.
const LOST_AFTER_NS: u64 = 250_000_000;

/// Inner flows that there are at least: divisible among up to 6, 8, 10, 12 planes.
const INNER_FLOWS: u32 = 120;

/// How many inner flows so many 4-tuples have together: the same number each.
pub(super) fn inner_flows(tuples: u32) -> u32 {
    tuples * INNER_FLOWS.div_ceil(tuples)
}

/// How many packets of so many bytes may be under way, when a queue holds so many bytes as the kernel counts them (`truesize`:
/// the buffer's own size, a power of 2, and what describes it). A quarter is left: the kernel gives room back late.
pub(super) fn window(bytes: u32, queue: i32) -> u64 {
    let each = u64::from((bytes + 400).next_power_of_two()) + 256;
    (queue.max(0) as u64 * 3 / 4 / each).clamp(16, WINDOW)
}

/// One socket per 4-tuple.
pub(super) struct Generator {
    sockets: Vec<OwnedFd>,
    bytes: u32,
}

/// What it did.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sent {
    pub(super) packets: u64,
    /// When the first was sent, CLOCK_MONOTONIC.
    pub(super) begun_ns: u64,
    /// How long it waited because as many as may be were under way.
    pub(super) waited_ns: u64,
    /// From the first to the last that was sent.
    pub(super) sending_ns: u64,
    pub(super) cpu: Duration,
    /// It was told to stop.
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

    /// Sends so many packets, never more than `window` of them under way, and waits for the last to arrive.
    pub(super) fn run(
        &self,
        packets: u64,
        window: u64,
        place: Place,
        arrivals: &Arrivals,
        watch: &Watch<'_>,
    ) -> io::Result<Sent> {
        let _ = schedule::sleep_precisely();
        // On one processor, packets of it do not overtake each other before they reach a plane.
        if let Some(processor) = place.processor()? {
            schedule::pin_to(processor)?;
        }
        let tuples = self.sockets.len() as u64;
        let each = u64::from(inner_flows(tuples as u32)) / tuples;
        let mut made = vec![0_u64; self.sockets.len()];
        let mut batch = Batch::new(BURST as usize, self.bytes as usize);
        let mut outgoing = Outgoing::new();
        let mut pace = Pace::new(arrivals, place.pause());
        let mut sent = Sent { begun_ns: resource::monotonic_ns(), ..Sent::default() };
        let mut turn = 0;
        while sent.packets < packets {
            if watch.stopped() {
                sent.cut = true;
                break;
            }
            let room = window.saturating_sub(pace.under_way(sent.packets));
            let burst = (packets - sent.packets).min(BURST);
            if room < burst.min(window) {
                sent.waited_ns += pace.wait(sent.packets);
                // Between planes it fills their queues again when they are empty, and not a little sooner.
                while place == Place::Between && pace.under_way(sent.packets) > 0 && !watch.stopped() {
                    sent.waited_ns += pace.wait(sent.packets);
                }
                continue;
            }
            watch.progress.at(sent.packets);
            let tuple = turn % tuples;
            turn += 1;
            outgoing.clear();
            for index in 0..burst.min(window) as usize {
                // The flows of a 4-tuple take turns; all 4-tuples have different ones.
                let number = made[tuple as usize] + index as u64;
                let flow = tuple + tuples * (number % each);
                packet::write(batch.room_mut(index), flow as u32, number / each);
                outgoing.message(None, None);
                outgoing.part(index, 0..self.bytes as usize);
            }
            let mut first = 0;
            while first < outgoing.len() {
                match outgoing.send(self.sockets[tuple as usize].as_fd(), &batch, first) {
                    Ok(number) => first += number,
                    // The device has no room for a moment.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::yield_now(),
                    Err(error) => return Err(error),
                }
            }
            made[tuple as usize] += first as u64;
            sent.packets += first as u64;
        }
        sent.sending_ns = resource::monotonic_ns() - sent.begun_ns;
        while !sent.cut && pace.under_way(sent.packets) > 0 && !watch.stopped() {
            pace.wait(sent.packets);
        }
        sent.cpu = resource::thread_cpu_time();
        Ok(sent)
    }
}

/// What is known of packets that were sent.
struct Pace<'a> {
    arrivals: &'a Arrivals,
    pause: Duration,
    /// What was waited for too long.
    lost: u64,
    seen: u64,
    seen_ns: u64,
}

impl<'a> Pace<'a> {
    fn new(arrivals: &'a Arrivals, pause: Duration) -> Pace<'a> {
        Pace { arrivals, pause, lost: 0, seen: 0, seen_ns: resource::monotonic_ns() }
    }

    fn under_way(&self, sent: u64) -> u64 {
        sent.saturating_sub(self.lost + self.arrivals.packets.load(Ordering::Acquire))
    }

    /// Sleeps for a moment and gives up what must be lost; how long that took.
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
        // What the kernel gives with net.core.rmem_max at its default.
        assert_eq!(window(64, 425_984), 416);
        assert_eq!(window(1400, 425_984), 138);
        assert_eq!(window(9000, 425_984), 19);
        assert_eq!(window(64, 8 << 20), WINDOW);
    }
}
