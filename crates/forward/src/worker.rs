//! The thread of one plane: its event loop (epoll), its sockets and its counters.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::EventFd;
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{option, resource};

use crate::counters::{Counters, Drop};
use crate::path::Path;
use crate::plane::Plane;

const STOP: u64 = u64::MAX;
/// The interval at which idle clients are closed and the drop counter of the kernel is read.
const TICK: Duration = Duration::from_secs(1);
/// The number of empty receive calls after which a draining plane ends. Packets on their way over loopback arrive in between.
const LAST_LOOKS: usize = 2;

/// Minimum memory of a message in a receive queue in bytes (`skb->truesize`: `struct sk_buff`, `skb_shared_info` and data).
const MIN_MEMORY: usize = 512;
/// Maximum number of messages that a plane holds outside of the receive queue: the buffers of a ring.
const HELD: usize = 64;

/// A command to a plane: continue.
const CONTINUE: u8 = 0;
/// A command to a plane: forward the packets in the receive queues, then end.
pub(crate) const DRAIN: u8 = 1;
/// A command to a plane: end now. Packets in the receive queues stay there for the next owner of the socket.
pub(crate) const END: u8 = 2;

/// A listening socket of one link with the state of its clients. One plane owns a port at any time. A port moves to another plane as
/// a whole, with its clients, so that their replies move too.
pub(crate) struct Port {
    pub(crate) link: usize,
    /// The index of the socket in the link's group.
    pub(crate) seat: usize,
    pub(crate) listener: OwnedFd,
    pub(crate) path: Path,
    /// The value of `sk_drops` that is already counted.
    pub(crate) overflowed: u32,
}

/// A request to a plane.
pub(crate) enum Request {
    /// Serve these ports too.
    Take(Vec<Port>),
    /// Give away the ports of one seat, if the plane has more than one.
    Give(Sender<Vec<Port>>),
}

/// The requests from other threads to a plane.
pub(crate) struct RequestQueue {
    command: AtomicU8,
    /// Read only after a wakeup, never for each packet.
    queue: Mutex<Vec<Request>>,
    waker: EventFd,
}

impl std::fmt::Debug for RequestQueue {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RequestQueue").field("command", &self.command()).finish_non_exhaustive()
    }
}

impl RequestQueue {
    pub(crate) fn new() -> io::Result<RequestQueue> {
        Ok(RequestQueue { command: AtomicU8::new(CONTINUE), queue: Mutex::default(), waker: EventFd::new()? })
    }

    /// Sets the command and wakes the plane.
    pub(crate) fn command_to(&self, what: u8) {
        self.command.store(what, Ordering::Release);
        self.waker.signal();
    }

    /// Queues a request and wakes the plane.
    pub(crate) fn request(&self, request: Request) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        self.waker.signal();
    }

    fn command(&self) -> u8 {
        self.command.load(Ordering::Acquire)
    }

    fn take_all(&self) -> Vec<Request> {
        std::mem::take(&mut *self.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The state of one plane.
pub(crate) struct Worker {
    pub(crate) plane: Box<dyn Plane>,
    pub(crate) requests: Arc<RequestQueue>,
    /// One set of counters for each link.
    pub(crate) counters: Vec<Arc<Counters>>,
    /// Ports by the number in their epoll tokens.
    ports: Vec<Option<Port>>,
    /// CPU time of earlier threads with these counters.
    cpu_before: Duration,
    /// Packets with a wrong checksum before the drops of the last tick.
    checksum_errors: u64,
}

impl Worker {
    pub(crate) fn new(
        plane: Box<dyn Plane>,
        requests: Arc<RequestQueue>,
        counters: Vec<Arc<Counters>>,
    ) -> Worker {
        let cpu_before = counters.first().map_or(Duration::ZERO, |counters| counters.cpu_so_far());
        Worker {
            plane,
            requests,
            counters,
            ports: Vec::new(),
            cpu_before,
            checksum_errors: checksum_errors(),
        }
    }

    /// Forwards until a command to end, and returns the ports.
    pub(crate) fn run(mut self, ports: Vec<Port>) -> io::Result<Vec<Port>> {
        let epoll = Arc::new(Epoll::new()?);
        epoll.add(self.requests.waker.as_fd(), STOP, Interest::READ)?;
        self.take(&epoll, ports)?;
        let mut events = [Ready::NONE; 64];
        let mut ticked = Instant::now();
        while self.requests.command() == CONTINUE {
            let mut has_requests = false;
            for ready in epoll.wait(&mut events, Some(TICK.saturating_sub(ticked.elapsed())))? {
                if ready.token() == STOP {
                    has_requests = self.requests.waker.clear();
                } else {
                    self.serve(ready.token())?;
                }
            }
            if has_requests {
                self.handle_requests(&epoll)?;
            }
            if ticked.elapsed() >= TICK {
                ticked = Instant::now();
                self.tick();
            }
        }
        // A request that was queued before the command to end may carry ports, which must not be closed.
        self.handle_requests(&epoll)?;
        if self.requests.command() == DRAIN {
            self.drain()?;
        }
        self.tick();
        for number in 0..self.ports.len() {
            self.release(number);
        }
        Ok(self.ports.into_iter().flatten().collect())
    }

    fn serve(&mut self, token: u64) -> io::Result<()> {
        let (number, target) = read_token(token);
        let Some(Some(port)) = self.ports.get_mut(number) else { return Ok(()) };
        let listener = port.listener.as_fd();
        match target {
            None => self.plane.forward(number, listener, &mut port.path).map(drop),
            Some(target) => self.plane.give_back(listener, target, &mut port.path),
        }
    }

    fn handle_requests(&mut self, epoll: &Arc<Epoll>) -> io::Result<()> {
        for request in self.requests.take_all() {
            match request {
                Request::Take(ports) => self.take(epoll, ports)?,
                Request::Give(to) => {
                    let ports = self.give(epoll)?;
                    if let Err(refused) = to.send(ports) {
                        // The thread that requested the ports has gone: the plane keeps them.
                        self.take(epoll, refused.0)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, epoll: &Arc<Epoll>, ports: Vec<Port>) -> io::Result<()> {
        for mut port in ports {
            if let Some(counters) = self.counters.get(port.link) {
                port.path.count_with(counters);
            }
            let number = self.ports.iter().position(Option::is_none).unwrap_or(self.ports.len());
            if number == self.ports.len() {
                self.ports.push(None);
            }
            let watched = self.plane.watch(number, port.listener.as_fd())?;
            epoll.add(watched, token_of_listener(number), Interest::READ)?;
            port.path.wait_here(Replies::new(Arc::clone(epoll), number));
            self.ports[number] = Some(port);
        }
        Ok(())
    }

    /// Removes and returns the ports of the last seat, unless it is the only seat.
    fn give(&mut self, epoll: &Arc<Epoll>) -> io::Result<Vec<Port>> {
        let seats = || self.ports.iter().flatten().map(|port| port.seat);
        let (Some(first), Some(last)) = (seats().min(), seats().max()) else { return Ok(Vec::new()) };
        let mut given = Vec::new();
        if first == last {
            return Ok(given);
        }
        for number in 0..self.ports.len() {
            if self.ports[number].as_ref().is_none_or(|port| port.seat != last) {
                continue;
            }
            if let Some(port) = &mut self.ports[number] {
                epoll.remove(self.plane.watch(number, port.listener.as_fd())?)?;
                if port.path.waits.take().is_some() {
                    for target in port.path.targets.numbers().collect::<Vec<_>>() {
                        if let Some(target) = port.path.targets.get(target) {
                            epoll.remove(target.socket.as_fd())?;
                        }
                    }
                }
            }
            // The release comes last: it may open targets, and the next plane of the port adds all targets to its epoll.
            self.release(number);
            let Some(port) = self.ports[number].take() else { continue };
            given.push(port);
        }
        Ok(given)
    }

    /// Forwards the packets of a port that the plane has received and still holds.
    fn release(&mut self, number: usize) {
        if let Some(Some(port)) = self.ports.get_mut(number) {
            port.path.waits = None;
            self.plane.release(number, port.listener.as_fd(), &mut port.path);
        }
    }

    /// Forwards the packets that are in the receive queues now. Later packets are forwarded too until the plane has caught up, but no more
    /// than the number of messages that the queue can hold at its present size: with a faster sender, a queue is never empty.
    fn drain(&mut self) -> io::Result<()> {
        for (number, port) in self.ports.iter_mut().enumerate() {
            let Some(port) = port else { continue };
            // Without the size there is no bound.
            let queued = option::queued(port.listener.as_fd()).unwrap_or(u32::MAX) as usize;
            let mut left = queued / MIN_MEMORY + HELD;
            let mut empty = 0;
            while empty < LAST_LOOKS && left > 0 {
                let messages = self.plane.forward(number, port.listener.as_fd(), &mut port.path)?;
                left = left.saturating_sub(messages);
                empty = if messages > 0 { 0 } else { empty + 1 };
            }
        }
        Ok(())
    }

    fn tick(&mut self) {
        // The drops of the sockets contain packets with a wrong checksum if the socket has a filter (`udp_queue_rcv_one_skb`). Those that come
        // while the sockets are read count for this tick and for the next: it is not known which drops contain them.
        let before = checksum_errors();
        let drops: Vec<u32> = self.ports.iter_mut().flatten().map(Port::tick).collect();
        let wrong = checksum_errors().saturating_sub(self.checksum_errors);
        self.checksum_errors = before;
        for (port, [of_checksum, of_queue]) in self.ports.iter().flatten().zip(told_apart(&drops, wrong)) {
            port.path.counters.dropped(Drop::Checksum, of_checksum);
            port.path.counters.dropped(Drop::Overflow, of_queue);
        }
        let cpu = self.cpu_before + resource::thread_cpu_time();
        self.counters.iter().for_each(|counters| counters.cpu(cpu));
    }
}

impl Port {
    pub(crate) fn new(link: usize, seat: usize, listener: OwnedFd, path: Path) -> Port {
        // Drops before this moment belong to another process. A kernel without the counter starts at 0.
        let overflowed = option::dropped(listener.as_fd()).unwrap_or(0);
        Port { link, seat, listener, path, overflowed }
    }

    /// Returns the packets that the kernel has dropped at the socket since the last tick.
    fn tick(&mut self) -> u32 {
        self.path.tick += 1;
        self.path.forget_idle();
        self.path.targets.reenable_segmentation(self.path.tick);
        let Ok(dropped) = option::dropped(self.listener.as_fd()) else { return 0 };
        let before = std::mem::replace(&mut self.overflowed, dropped);
        dropped.wrapping_sub(before)
    }
}

/// Divides the drops of each socket into packets with a wrong checksum, of which there were `wrong`, and packets that met a full queue.
fn told_apart(drops: &[u32], mut wrong: u64) -> impl Iterator<Item = [usize; 2]> {
    drops.iter().map(move |drops| {
        let of_checksum = wrong.min((*drops).into());
        wrong -= of_checksum;
        [of_checksum as usize, *drops as usize - of_checksum as usize]
    })
}

/// Returns the UDP packets with a wrong checksum of this network namespace, of all sockets (InCsumErrors of snmp and snmp6). `sk_drops` of a
/// socket contains them. 0 if they cannot be read.
fn checksum_errors() -> u64 {
    let read = |name: &str| fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap_or_default();
    let v4 = read("snmp");
    let mut rows = v4.lines().filter_map(|line| line.strip_prefix("Udp: ")).map(|row| row.split(' '));
    let v4 = rows.next().zip(rows.next()).and_then(|(names, values)| {
        names.zip(values).find(|(name, _)| *name == "InCsumErrors").and_then(|(_, value)| value.parse().ok())
    });
    let v6 = read("snmp6");
    let v6 = v6.lines().find_map(|line| line.strip_prefix("Udp6InCsumErrors")?.trim().parse::<u64>().ok());
    v4.unwrap_or(0u64) + v6.unwrap_or(0)
}

/// Returns the token of the listening socket of port `port`.
fn token_of_listener(port: usize) -> u64 {
    (port as u64) << 32
}

/// Returns the port and the target of a token; `None` stands for the listening socket.
fn read_token(token: u64) -> (usize, Option<usize>) {
    ((token >> 32) as usize, (token as u32 as usize).checked_sub(1))
}

/// The epoll of the plane that owns a port.
#[derive(Debug)]
pub(crate) struct Replies {
    epoll: Arc<Epoll>,
    port: usize,
}

impl Replies {
    pub(crate) fn new(epoll: Arc<Epoll>, port: usize) -> Replies {
        Replies { epoll, port }
    }

    /// Watches the socket of target `target`.
    ///
    /// # Errors
    ///
    /// ENOSPC: the user has as many watches as `fs.epoll.max_user_watches` allows. ENOMEM.
    pub(crate) fn watch(&self, target: usize, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.epoll.add(socket, token_of_listener(self.port) | (target as u64 + 1), Interest::READ)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_checksum_is_not_a_full_queue() {
        let told = |drops: &[u32], wrong| told_apart(drops, wrong).collect::<Vec<_>>();
        assert_eq!(told(&[7, 0, 5], 0), [[0, 7], [0, 0], [0, 5]]);
        assert_eq!(told(&[7, 0, 5], 9), [[7, 0], [0, 0], [2, 3]]);
        // Errors of other sockets.
        assert_eq!(told(&[1], 100), [[1, 0]]);
    }
}
