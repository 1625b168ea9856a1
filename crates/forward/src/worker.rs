//! One plane: a thread with an epoll, its sockets and its counters.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use fourtuple_syscalls::bell::Bell;
use fourtuple_syscalls::datagram::Datagram;
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{option, resource};

use crate::counters::{Counters, Drop};
use crate::plane::Plane;
use crate::route::{Routes, View};
use crate::target::Targets;

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
/// End now.
pub(crate) const END: u8 = 2;

/// From where one link's packets come to where they go, for one plane.
pub(crate) struct Path {
    pub(crate) view: View,
    pub(crate) targets: Targets,
    pub(crate) counters: Arc<Counters>,
    /// Ticks so far.
    pub(crate) tick: u64,
    pub(crate) replies: bool,
    pub(crate) segments: bool,
    pub(crate) work: Duration,
    /// Ticks without a packet after which a client goes.
    pub(crate) idle: u64,
    /// Targets whose sockets nobody waits for yet.
    new: Vec<usize>,
}

impl Path {
    pub(crate) fn new(
        view: View,
        counters: Arc<Counters>,
        link: &crate::Link,
        segments: bool,
        work: Duration,
    ) -> Path {
        // One way there are as many targets as next hops, which are few.
        let most = if link.replies { link.clients } else { usize::MAX };
        Path {
            view,
            targets: Targets::new(most),
            counters,
            tick: 0,
            replies: link.replies,
            segments,
            work,
            idle: link.idle.as_secs().max(1),
            new: Vec::new(),
        }
    }

    /// Puts message `index` of a batch behind its target, or counts why not.
    pub(crate) fn take(&mut self, index: usize, datagram: &Datagram<'_>) {
        let segment = datagram.segment.map_or(datagram.bytes.len(), usize::from).max(1);
        let packets = datagram.bytes.len().div_ceil(segment).max(1);
        self.counters.received(packets, datagram.bytes.len());
        work(self.work, packets);
        if datagram.truncated {
            self.counters.dropped(Drop::Truncated, packets);
            return;
        }
        let routes = Arc::clone(self.view.routes());
        let client = if self.replies { datagram.from() } else { None };
        if packets > 1 && (routes.are_by_key() || !self.segments) {
            for start in (0..datagram.bytes.len()).step_by(segment) {
                let range = start..datagram.bytes.len().min(start + segment);
                match self.target(&routes, &datagram.bytes[range.clone()], datagram, client) {
                    Ok(target) => {
                        if let Some(target) = self.targets.touch(target) {
                            target.push(index, range);
                        }
                    }
                    Err(reason) => self.counters.dropped(reason, 1),
                }
            }
            return;
        }
        match self.target(&routes, datagram.bytes, datagram, client) {
            Ok(target) => {
                let Some(target) = self.targets.touch(target) else { return };
                match datagram.segment {
                    Some(segment) if packets > 1 && target.segments => {
                        target.push_cut(index, 0..datagram.bytes.len(), segment);
                    }
                    _ if packets > 1 => {
                        for start in (0..datagram.bytes.len()).step_by(segment) {
                            target.push(index, start..datagram.bytes.len().min(start + segment));
                        }
                    }
                    _ => target.push(index, 0..datagram.bytes.len()),
                }
            }
            Err(reason) => self.counters.dropped(reason, packets),
        }
    }

    fn target(
        &mut self,
        routes: &Routes,
        payload: &[u8],
        datagram: &Datagram<'_>,
        client: Option<SocketAddr>,
    ) -> Result<usize, Drop> {
        let hop = routes.find(payload, datagram.arrived_at).ok_or(Drop::NoRoute)?;
        let key = (client, hop);
        let index = match self.targets.find(key) {
            Some(index) => index,
            None => self.open(key)?,
        };
        if let Some(target) = self.targets.get(index) {
            target.used_at = self.tick;
        }
        Ok(index)
    }

    fn open(&mut self, key: (Option<SocketAddr>, SocketAddr)) -> Result<usize, Drop> {
        let index = match self.targets.open(key, self.segments) {
            Ok(Some(index)) => index,
            Ok(None) => return Err(Drop::NoClient),
            Err(error) => {
                return Err(match Drop::of(&error) {
                    Drop::Unreachable => Drop::Unreachable,
                    _ => Drop::NoClient,
                });
            }
        };
        if self.replies {
            self.new.push(index);
        }
        self.counters.clients(self.targets.len());
        Ok(index)
    }

    fn forget_idle(&mut self) {
        let (tick, idle) = (self.tick, self.idle);
        if self.replies {
            self.targets.retain(|target| target.used_at + idle >= tick);
            self.counters.clients(self.targets.len());
        }
    }
}

/// Keeps the processor busy as long as these packets would.
fn work(each: Duration, packets: usize) {
    if each.is_zero() {
        return;
    }
    let end = Instant::now() + each * packets as u32;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// One link, as one plane has it.
pub(crate) struct Port {
    pub(crate) listener: OwnedFd,
    pub(crate) path: Path,
}

/// What one plane has.
pub(crate) struct Worker {
    pub(crate) ports: Vec<Port>,
    pub(crate) plane: Box<dyn Plane>,
    pub(crate) told: Arc<AtomicU8>,
    pub(crate) bell: Arc<Bell>,
}

impl Worker {
    /// Forwards until told to end.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let epoll = Epoll::new()?;
        epoll.add(self.bell.as_fd(), STOP, Interest::READ)?;
        for (number, port) in self.ports.iter().enumerate() {
            epoll.add(port.listener.as_fd(), token(number, 0), Interest::READ)?;
        }
        let mut room = [Ready::NONE; 64];
        let mut ticked = Instant::now();
        while self.told.load(Ordering::Acquire) == GO_ON {
            for ready in epoll.wait(&mut room, Some(TICK))? {
                if ready.token() == STOP {
                    self.bell.silence();
                    continue;
                }
                let (number, target) = ((ready.token() >> 32) as usize, ready.token() as u32);
                let Some(port) = self.ports.get_mut(number) else { continue };
                match target.checked_sub(1) {
                    None => {
                        self.plane.forward(port.listener.as_fd(), &mut port.path);
                        watch_new(&epoll, number, &mut port.path)?;
                    }
                    Some(target) => {
                        self.plane.give_back(port.listener.as_fd(), target as usize, &mut port.path);
                    }
                }
            }
            if ticked.elapsed() >= TICK {
                ticked = Instant::now();
                self.ports.iter_mut().for_each(Port::tick);
            }
        }
        if self.told.load(Ordering::Acquire) == DRAIN {
            self.drain();
        }
        self.ports.iter_mut().for_each(Port::tick);
        Ok(())
    }

    fn drain(&mut self) {
        for port in &mut self.ports {
            let mut empty = 0;
            while empty < LAST_LOOKS {
                let found = self.plane.forward(port.listener.as_fd(), &mut port.path);
                empty = if found { 0 } else { empty + 1 };
            }
        }
    }
}

impl Port {
    fn tick(&mut self) {
        self.path.tick += 1;
        self.path.forget_idle();
        self.path.counters.cpu(resource::thread_cpu_time());
        if let Ok(dropped) = option::dropped(self.listener.as_fd()) {
            self.path.counters.overflowed(u64::from(dropped));
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
