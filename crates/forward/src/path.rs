//! The decisions of a plane for each packet between receive and send: next hop, client, drop reason.

use std::net::SocketAddr;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::datagram::Datagram;
use fourtuple_syscalls::neighbour::HOPS;

use crate::clients::{NewClientLimit, Share};
use crate::counters::{Counters, Drop};
use crate::route::View;
use crate::target::{Target, TargetKey, Targets};
use crate::watch::SessionView;
use crate::worker::Replies;

/// The routes, targets and counters of one link in one plane.
pub(crate) struct Path {
    pub(crate) view: View,
    pub(crate) targets: Targets,
    pub(crate) counters: Arc<Counters>,
    pub(crate) watch: Option<SessionView>,
    /// Ticks since the start. A tick is one second.
    pub(crate) tick: u64,
    pub(crate) replies: bool,
    pub(crate) segments: bool,
    pub(crate) work: Duration,
    /// Whether the last receive call filled the whole batch: more packets may wait in the receive queue.
    pub(crate) is_behind: bool,
    new_clients: NewClientLimit,
    /// Ticks without a packet after which a client is closed.
    pub(crate) idle: u64,
    /// The epoll that waits for replies; `None` while no plane owns the path.
    pub(crate) waits: Option<Replies>,
    /// The version of the routes that the clients were last compared with.
    compared: Option<u64>,
    /// The number of clients that this path has added to the counters.
    counted: usize,
}

impl Path {
    pub(crate) fn new(
        view: View,
        counters: Arc<Counters>,
        watch: Option<SessionView>,
        link: &crate::Link,
        share: Option<Share>,
        segments: bool,
        work: Duration,
    ) -> Path {
        let most = if share.is_some() { link.clients } else { usize::MAX };
        Path {
            view,
            targets: Targets::new(most, share),
            counters,
            watch,
            tick: 0,
            replies: link.replies,
            segments,
            work,
            is_behind: false,
            new_clients: NewClientLimit::new(),
            idle: link.idle.as_secs().max(1),
            waits: None,
            compared: None,
            counted: 0,
        }
    }

    /// Adds message `index` of a batch to the output of its target, or counts the reason to drop it.
    pub(crate) fn take(&mut self, index: usize, datagram: &Datagram<'_>) {
        let segment = datagram.segment.map_or(datagram.bytes.len(), usize::from).max(1);
        let packets = datagram.bytes.len().div_ceil(segment).max(1);
        self.view.refresh();
        if datagram.hops == Some(HOPS) && self.watch.as_ref().is_some_and(SessionView::searches_data) {
            return self.take_apart(index, datagram, segment);
        }
        self.counters.received(packets, datagram.bytes.len());
        work(self.work, packets);
        if datagram.truncated {
            self.counters.dropped(Drop::Truncated, packets);
            return;
        }
        let client = if self.replies { datagram.from() } else { None };
        if packets > 1 && (self.view.routes().are_by_key() || !self.segments) {
            for start in (0..datagram.bytes.len()).step_by(segment) {
                let range = start..datagram.bytes.len().min(start + segment);
                self.take_packet(index, range, datagram, client);
            }
            return;
        }
        match self.target(datagram.bytes, datagram, client, packets) {
            Ok(target) => {
                let Some(target) = self.targets.touch(target) else { return };
                match datagram.segment {
                    Some(segment) if packets > 1 && target.segments => {
                        target.push_segmented(index, 0..datagram.bytes.len(), segment);
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

    /// Handles a message with TTL 255, packet by packet: each may be a control packet, which goes to the session and is not counted
    /// here.
    fn take_apart(&mut self, index: usize, datagram: &Datagram<'_>, segment: usize) {
        let client = if self.replies { datagram.from() } else { None };
        let length = datagram.bytes.len();
        for start in (0..length.max(1)).step_by(segment) {
            let range = start..length.min(start + segment);
            let payload = &datagram.bytes[range.clone()];
            if self.watch.as_ref().is_some_and(|watch| watch.takes_control(payload, datagram)) {
                continue;
            }
            self.counters.received(1, payload.len());
            work(self.work, 1);
            if datagram.truncated {
                self.counters.dropped(Drop::Truncated, 1);
                continue;
            }
            self.take_packet(index, range, datagram, client);
        }
    }

    /// Adds one packet of message `index` to the output of its target, or counts the reason to drop it.
    #[inline]
    fn take_packet(
        &mut self,
        index: usize,
        range: Range<usize>,
        datagram: &Datagram<'_>,
        client: Option<SocketAddr>,
    ) {
        match self.target(&datagram.bytes[range.clone()], datagram, client, 1) {
            Ok(target) => {
                if let Some(target) = self.targets.touch(target) {
                    target.push(index, range);
                }
            }
            Err(reason) => self.counters.dropped(reason, 1),
        }
    }

    fn target(
        &mut self,
        payload: &[u8],
        datagram: &Datagram<'_>,
        client: Option<SocketAddr>,
        packets: usize,
    ) -> Result<usize, Drop> {
        let hop = self.hop(payload, datagram)?;
        // `answer_from` is known only for a wildcard listener, and matters only for replies.
        let key = (client, hop, client.and(datagram.answer_from));
        let (index, is_known) = match self.targets.find(key) {
            Some(index) => (index, true),
            None => (self.open(key)?, false),
        };
        if let Some(target) = self.targets.get(index).filter(|_| is_known || packets > 1) {
            target.has_sent(self.tick);
        }
        Ok(index)
    }

    /// Returns the next hop of the packet, or the default next hop when the link to the first is down.
    fn hop(&self, payload: &[u8], datagram: &Datagram<'_>) -> Result<SocketAddr, Drop> {
        let routes = self.view.routes();
        let hop = routes.find(payload, datagram.arrived_at).ok_or(Drop::NoRoute)?;
        let Some(watch) = self.watch.as_ref().filter(|watch| watch.is_down(hop)) else { return Ok(hop) };
        routes.default_hop().filter(|hop| !watch.is_down(*hop)).ok_or(Drop::LinkDown)
    }

    fn open(&mut self, key: TargetKey) -> Result<usize, Drop> {
        if key.0.is_some_and(|client| self.view.endpoints().include(client)) {
            return Err(Drop::Circulating);
        }
        if self.replies && !self.new_clients.take(Instant::now(), self.is_behind) {
            return Err(Drop::NoClient);
        }
        let opened = self.targets.open(key, self.segments, self.tick);
        self.counters.evicted(self.targets.take_evicted());
        let opened = match opened {
            Ok(Some(index)) if self.wait_for_replies(index) => Ok(index),
            Err(error) if Drop::of(&error) == Drop::Unreachable => Err(Drop::Unreachable),
            _ => Err(Drop::NoClient),
        };
        self.count_clients(self.targets.len());
        opened
    }

    /// Adds the socket of a target to the epoll of the plane. Returns false, with the target closed, when the kernel cannot watch one
    /// more socket (ENOSPC, ENOMEM).
    fn wait_for_replies(&mut self, index: usize) -> bool {
        let (true, Some(waits)) = (self.replies, &self.waits) else { return true };
        let watched = self.targets.get(index).map(|target| waits.watch(index, target.socket.as_fd()));
        if watched.is_some_and(|watched| watched.is_ok()) {
            return true;
        }
        self.targets.close(index);
        false
    }

    /// Adds the sockets of all targets to the epoll of a plane, and closes clients that the kernel cannot watch.
    pub(crate) fn wait_here(&mut self, waits: Replies) {
        if !self.replies {
            return;
        }
        self.waits = Some(waits);
        for index in self.targets.numbers().collect::<Vec<_>>() {
            if !self.wait_for_replies(index) {
                self.counters.evicted(1);
            }
        }
        self.count_clients(self.targets.len());
    }

    /// Adopts the sockets of another process. Each comes with the number of ticks since its last use.
    pub(crate) fn adopt(&mut self, targets: Vec<(TargetKey, u64, OwnedFd)>) {
        self.tick = targets.iter().map(|(_, age, _)| *age).max().unwrap_or_default();
        for (key, age, socket) in targets {
            // A link without replies has no clients, and a link with replies has only clients.
            if key.0.is_some() == self.replies {
                self.targets.adopt(Target::new(socket, key, self.segments, self.tick - age));
            }
        }
        self.count_clients(self.targets.len());
    }

    /// Closes clients that were idle too long, and clients whose address new routes have made a next hop or a link.
    pub(crate) fn forget_idle(&mut self) {
        if !self.replies {
            return;
        }
        self.view.refresh();
        let (tick, idle, endpoints) = (self.tick, self.idle, self.view.endpoints());
        let is_compared = self.compared.replace(self.view.version()) == Some(self.view.version());
        let mut unanswered = 0;
        self.targets.retain(|target| {
            let stays = target.is_in_use(tick, idle);
            unanswered += usize::from(!stays && target.is_new());
            stays && (is_compared || target.key.0.is_none_or(|client| !endpoints.include(client)))
        });
        self.counters.unanswered(unanswered);
        self.count_clients(self.targets.len());
    }

    /// Moves the clients of the path to the counters of its new plane, and uses these counters from now on.
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

/// Keeps the CPU busy for the additional time of these packets.
fn work(each: Duration, packets: usize) {
    if each.is_zero() {
        return;
    }
    let end = Instant::now() + each * packets as u32;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}
