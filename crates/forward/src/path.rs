//! The way of a packet through a plane, but for receiving and sending it.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::datagram::Datagram;
use fourtuple_syscalls::neighbour::HOPS;

use crate::counters::{Counters, Drop};
use crate::route::{Routes, View};
use crate::target::{Target, TargetKey, Targets};
use crate::watch::Watch;

/// From where one link's packets come to where they go, for one plane.
pub(crate) struct Path {
    pub(crate) view: View,
    pub(crate) targets: Targets,
    pub(crate) counters: Arc<Counters>,
    pub(crate) watch: Option<Watch>,
    /// Ticks so far.
    pub(crate) tick: u64,
    pub(crate) replies: bool,
    pub(crate) segments: bool,
    pub(crate) work: Duration,
    /// Ticks without a packet after which a client goes.
    pub(crate) idle: u64,
    /// Targets whose sockets nobody waits for yet.
    pub(crate) new: Vec<usize>,
    /// How many of the clients in the counters are of this path.
    counted: usize,
}

impl Path {
    pub(crate) fn new(
        view: View,
        counters: Arc<Counters>,
        watch: Option<Watch>,
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
            watch,
            tick: 0,
            replies: link.replies,
            segments,
            work,
            idle: link.idle.as_secs().max(1),
            new: Vec::new(),
            counted: 0,
        }
    }

    /// Puts message `index` of a batch behind its target, or counts why not.
    pub(crate) fn take(&mut self, index: usize, datagram: &Datagram<'_>) {
        let segment = datagram.segment.map_or(datagram.bytes.len(), usize::from).max(1);
        let packets = datagram.bytes.len().div_ceil(segment).max(1);
        if datagram.hops == Some(HOPS) && self.watch.as_ref().is_some_and(Watch::hands_over) {
            return self.take_apart(index, datagram, segment);
        }
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

    /// The same, packet by packet, for what comes from a neighbour and may be control: the session's, and not counted here.
    fn take_apart(&mut self, index: usize, datagram: &Datagram<'_>, segment: usize) {
        let routes = Arc::clone(self.view.routes());
        let client = if self.replies { datagram.from() } else { None };
        let length = datagram.bytes.len();
        for start in (0..length.max(1)).step_by(segment) {
            let range = start..length.min(start + segment);
            let payload = &datagram.bytes[range.clone()];
            if self.watch.as_ref().is_some_and(|watch| watch.takes(payload, datagram)) {
                continue;
            }
            self.counters.received(1, payload.len());
            work(self.work, 1);
            if datagram.truncated {
                self.counters.dropped(Drop::Truncated, 1);
                continue;
            }
            match self.target(&routes, payload, datagram, client) {
                Ok(target) => {
                    if let Some(target) = self.targets.touch(target) {
                        target.push(index, range);
                    }
                }
                Err(reason) => self.counters.dropped(reason, 1),
            }
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
        let hop = self.around(hop, routes)?;
        // Told only where the listener has many addresses; one way it does not matter.
        let key = (client, hop, client.and(datagram.answer_from));
        let index = match self.targets.find(key) {
            Some(index) => index,
            None => self.open(key)?,
        };
        if let Some(target) = self.targets.get(index) {
            target.used_at = self.tick;
        }
        Ok(index)
    }

    /// The hop, or the default one when the link there is down.
    fn around(&self, hop: SocketAddr, routes: &Routes) -> Result<SocketAddr, Drop> {
        let Some(watch) = &self.watch else { return Ok(hop) };
        if !watch.is_down(hop) {
            return Ok(hop);
        }
        routes.default_hop().filter(|hop| !watch.is_down(*hop)).ok_or(Drop::LinkDown)
    }

    fn open(&mut self, key: TargetKey) -> Result<usize, Drop> {
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
        self.count_clients(self.targets.len());
        Ok(index)
    }

    /// Goes on with sockets that another process had, of which it is told how many ticks ago each was used.
    pub(crate) fn adopt(&mut self, targets: Vec<(TargetKey, u64, OwnedFd)>) {
        self.tick = targets.iter().map(|(_, age, _)| *age).max().unwrap_or_default();
        for (key, age, socket) in targets {
            // One way there are no clients, and nobody else has replies.
            if key.0.is_some() == self.replies {
                self.targets.adopt(Target::new(socket, key, self.segments, self.tick - age));
            }
        }
        self.count_clients(self.targets.len());
    }

    pub(crate) fn forget_idle(&mut self) {
        let (tick, idle) = (self.tick, self.idle);
        if self.replies {
            self.targets.retain(|target| target.used_at.saturating_add(idle) >= tick);
            self.count_clients(self.targets.len());
        }
    }

    /// Counts from now on with these counters, which are those of the plane that has the path now.
    pub(crate) fn count_with(&mut self, counters: &Arc<Counters>) {
        let clients = self.counted;
        self.count_clients(0);
        self.counters = Arc::clone(counters);
        self.count_clients(clients);
    }

    fn count_clients(&mut self, number: usize) {
        if self.replies {
            self.counters.clients(self.counted, number);
            self.counted = number;
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
