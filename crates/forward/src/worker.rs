//! One plane: a thread with an epoll, its sockets and its counters.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fourtuple_syscalls::bell::Bell;
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{option, resource};

use crate::counters::Counters;
use crate::path::Path;
use crate::plane::Plane;

const STOP: u64 = u64::MAX;
/// Idle clients are looked for, and the kernel is asked for what it dropped, about this often.
const TICK: Duration = Duration::from_secs(1);
/// How often a plane that is to end looks for one more packet after it found none, at most: what is on its way over loopback
/// is there by then.
const LAST_LOOKS: usize = 2;

/// What a plane is told.
pub(crate) const GO_ON: u8 = 0;
/// End when nothing waits any more.
pub(crate) const DRAIN: u8 = 1;
/// End now: what waits is another's, or lost.
pub(crate) const END: u8 = 2;

/// A socket that listens for one link, and the way of what comes to it. It is one plane's at every moment, and goes from one
/// to another as a whole: with its clients, so that their answers go with it.
pub(crate) struct Port {
    pub(crate) link: usize,
    /// Which member of the link's group.
    pub(crate) seat: usize,
    pub(crate) listener: OwnedFd,
    pub(crate) path: Path,
    /// Of `sk_drops`, what is counted already.
    pub(crate) overflowed: u32,
}

/// What a plane is asked for, beside its end.
pub(crate) enum Order {
    /// To serve these as well.
    Take(Vec<Port>),
    /// To give away what it has of one seat, if it has another one.
    Give(Sender<Vec<Port>>),
}

/// How others speak to a plane.
pub(crate) struct Desk {
    told: AtomicU8,
    /// Looked at when the bell was rung: not on the path of a packet.
    orders: Mutex<Vec<Order>>,
    bell: Bell,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Desk").field("told", &self.told()).finish_non_exhaustive()
    }
}

impl Desk {
    pub(crate) fn new() -> io::Result<Desk> {
        Ok(Desk { told: AtomicU8::new(GO_ON), orders: Mutex::default(), bell: Bell::new()? })
    }

    pub(crate) fn tell(&self, what: u8) {
        self.told.store(what, Ordering::Release);
        self.bell.ring();
    }

    pub(crate) fn order(&self, order: Order) {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        self.bell.ring();
    }

    fn told(&self) -> u8 {
        self.told.load(Ordering::Acquire)
    }

    fn orders(&self) -> Vec<Order> {
        std::mem::take(&mut *self.orders.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What one plane has.
pub(crate) struct Worker {
    pub(crate) plane: Box<dyn Plane>,
    pub(crate) desk: Arc<Desk>,
    /// One for each link.
    pub(crate) counters: Vec<Arc<Counters>>,
    /// By the number that its tokens have.
    ports: Vec<Option<Port>>,
    /// Processor time of the threads that had these counters before.
    cpu_before: Duration,
}

impl Worker {
    pub(crate) fn new(plane: Box<dyn Plane>, desk: Arc<Desk>, counters: Vec<Arc<Counters>>) -> Worker {
        let cpu_before = counters.first().map_or(Duration::ZERO, |counters| counters.cpu_so_far());
        Worker { plane, desk, counters, ports: Vec::new(), cpu_before }
    }

    /// Forwards until told to end, and gives back what it had then.
    pub(crate) fn run(mut self, ports: Vec<Port>) -> io::Result<Vec<Port>> {
        let epoll = Epoll::new()?;
        epoll.add(self.desk.bell.as_fd(), STOP, Interest::READ)?;
        self.take(&epoll, ports)?;
        let mut room = [Ready::NONE; 64];
        let mut ticked = Instant::now();
        while self.desk.told() == GO_ON {
            let mut is_asked = false;
            for ready in epoll.wait(&mut room, Some(TICK))? {
                if ready.token() == STOP {
                    is_asked = self.desk.bell.silence();
                } else {
                    self.serve(&epoll, ready.token())?;
                }
            }
            if is_asked {
                self.obey(&epoll)?;
            }
            if ticked.elapsed() >= TICK {
                ticked = Instant::now();
                self.tick();
            }
        }
        // What was asked for before the end is not to be lost with its sockets.
        self.obey(&epoll)?;
        if self.desk.told() == DRAIN {
            self.drain();
        }
        self.tick();
        for number in 0..self.ports.len() {
            self.release(number);
        }
        Ok(self.ports.into_iter().flatten().collect())
    }

    fn serve(&mut self, epoll: &Epoll, token: u64) -> io::Result<()> {
        let (number, target) = ((token >> 32) as usize, token as u32);
        let Some(Some(port)) = self.ports.get_mut(number) else { return Ok(()) };
        match target.checked_sub(1) {
            None => {
                self.plane.forward(number, port.listener.as_fd(), &mut port.path);
                watch_new(epoll, number, &mut port.path)
            }
            Some(target) => {
                self.plane.give_back(port.listener.as_fd(), target as usize, &mut port.path);
                Ok(())
            }
        }
    }

    fn obey(&mut self, epoll: &Epoll) -> io::Result<()> {
        for order in self.desk.orders() {
            match order {
                Order::Take(ports) => self.take(epoll, ports)?,
                Order::Give(to) => {
                    let ports = self.give(epoll)?;
                    if let Err(refused) = to.send(ports) {
                        // Whoever asked is gone.
                        self.take(epoll, refused.0)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, epoll: &Epoll, ports: Vec<Port>) -> io::Result<()> {
        for mut port in ports {
            if let Some(counters) = self.counters.get(port.link) {
                port.path.count_with(counters);
            }
            let number = self.ports.iter().position(Option::is_none).unwrap_or(self.ports.len());
            if number == self.ports.len() {
                self.ports.push(None);
            }
            let watched = self.plane.watch(number, port.listener.as_fd())?;
            epoll.add(watched, token(number, 0), Interest::READ)?;
            if port.path.replies {
                port.path.new = port.path.targets.numbers().collect();
                watch_new(epoll, number, &mut port.path)?;
            }
            self.ports[number] = Some(port);
        }
        Ok(())
    }

    /// All that it has of its last seat, unless that is its only one.
    fn give(&mut self, epoll: &Epoll) -> io::Result<Vec<Port>> {
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
                if port.path.replies {
                    for target in port.path.targets.numbers().collect::<Vec<_>>() {
                        if let Some(target) = port.path.targets.get(target) {
                            epoll.remove(target.socket.as_fd())?;
                        }
                    }
                }
            }
            // After that: what is sent on now may open targets, which nobody watches here any more.
            self.release(number);
            let Some(port) = self.ports[number].take() else { continue };
            given.push(port);
        }
        Ok(given)
    }

    /// What was received of it and not sent on yet goes.
    fn release(&mut self, number: usize) {
        if let Some(Some(port)) = self.ports.get_mut(number) {
            self.plane.release(number, port.listener.as_fd(), &mut port.path);
        }
    }

    fn drain(&mut self) {
        for (number, port) in self.ports.iter_mut().enumerate() {
            let Some(port) = port else { continue };
            let mut empty = 0;
            while empty < LAST_LOOKS {
                let found = self.plane.forward(number, port.listener.as_fd(), &mut port.path);
                empty = if found { 0 } else { empty + 1 };
            }
        }
    }

    fn tick(&mut self) {
        self.ports.iter_mut().flatten().for_each(Port::tick);
        let cpu = self.cpu_before + resource::thread_cpu_time();
        self.counters.iter().for_each(|counters| counters.cpu(cpu));
    }
}

impl Port {
    pub(crate) fn new(link: usize, seat: usize, listener: OwnedFd, path: Path) -> Port {
        // What another process has lost with this socket is not ours; a kernel that does not tell begins with 0.
        let overflowed = option::dropped(listener.as_fd()).unwrap_or(0);
        Port { link, seat, listener, path, overflowed }
    }

    fn tick(&mut self) {
        self.path.tick += 1;
        self.path.forget_idle();
        self.path.targets.cut_again(self.path.tick);
        if let Ok(dropped) = option::dropped(self.listener.as_fd()) {
            self.path.counters.overflowed(dropped.wrapping_sub(self.overflowed));
            self.overflowed = dropped;
        }
    }
}

fn token(port: usize, which: usize) -> u64 {
    (port as u64) << 32 | which as u64
}

fn watch_new(epoll: &Epoll, number: usize, path: &mut Path) -> io::Result<()> {
    while let Some(index) = path.new.pop() {
        if let Some(target) = path.targets.get(index) {
            epoll.add(target.socket.as_fd(), token(number, index + 1), Interest::READ)?;
        }
    }
    Ok(())
}
