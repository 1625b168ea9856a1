//! The connected sockets of a plane: one for each next hop, or one for each pair of client and next hop.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_syscalls::Errno;
use fourtuple_syscalls::datagram::{MAX_PAYLOAD, Outgoing, SEGMENTS};
use fourtuple_syscalls::socket::{self, Transport};

use crate::clients::Share;

/// The identity of a target: the client (only with replies), the next hop, and the local address that the client has sent to (only
/// with replies and a wildcard listener), which is the source of the replies.
pub(crate) type TargetKey = (Option<SocketAddr>, SocketAddr, Option<IpAddr>);

/// Ticks for which packets are sent singly after the kernel has refused to segment a message. After that the cause may have gone
/// (a raised MTU); if not, the retry costs one failed call.
const RETRY_SEGMENTATION: u64 = 5;

/// Ticks after which a client is closed that has sent one packet and received no reply.
const NEW: u64 = 2;

/// The evidence that a client is real. A sender of spoofed source addresses never gets beyond [`Standing::Answered`], unless it
/// guesses when a reply was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// The client has sent one packet.
    New,
    /// The client has sent several packets and received no reply.
    Repeated,
    /// A reply was sent to the client.
    Answered,
    /// The client has sent a packet after a reply. Such a client is never evicted.
    Established,
}

/// The last message of the output, which further datagrams of the same length can extend (UDP_SEGMENT).
#[derive(Clone, Copy, Debug)]
struct Run {
    segment: usize,
    bytes: usize,
    datagrams: usize,
}

/// A connected socket with the packets to send in this turn.
pub(crate) struct Target {
    pub(crate) socket: OwnedFd,
    pub(crate) key: TargetKey,
    /// Packets to send at the end of this turn.
    pub(crate) outgoing: Outgoing,
    run: Option<Run>,
    /// Whether messages are sent with UDP_SEGMENT. False for [`RETRY_SEGMENTATION`] ticks after the kernel has refused.
    pub(crate) segments: bool,
    /// The tick at which UDP_SEGMENT is tried again.
    again_at: Option<u64>,
    /// The tick of the last packet in either direction.
    pub(crate) used_at: u64,
    standing: Standing,
    /// A number that distinguishes the target from an earlier target at the same index.
    serial: u64,
}

impl Target {
    fn open(key: TargetKey, segments: bool) -> io::Result<Target> {
        let socket = socket::open(Transport::Udp, key.1, true)?;
        socket::connect(socket.as_fd(), key.1)?;
        Ok(Target { standing: Standing::New, ..Target::new(socket, key, segments, 0) })
    }

    /// Returns a target with a connected socket of another process. The next packet of its client makes it established.
    pub(crate) fn new(socket: OwnedFd, key: TargetKey, segments: bool, used_at: u64) -> Target {
        Target {
            socket,
            key,
            outgoing: Outgoing::new(),
            run: None,
            segments,
            again_at: None,
            used_at,
            standing: Standing::Answered,
            serial: 0,
        }
    }

    /// Records that the client has sent another packet.
    pub(crate) fn has_sent(&mut self, tick: u64) {
        self.used_at = tick;
        self.standing = match self.standing {
            Standing::New | Standing::Repeated => Standing::Repeated,
            Standing::Answered | Standing::Established => Standing::Established,
        };
    }

    /// Records that a reply was sent to the client.
    pub(crate) fn was_answered(&mut self, tick: u64) {
        self.used_at = tick;
        if self.standing != Standing::Established {
            self.standing = Standing::Answered;
        }
    }

    /// Returns whether the target stays open when clients are closed after `idle` ticks.
    pub(crate) fn is_in_use(&self, tick: u64, idle: u64) -> bool {
        let idle = if self.is_new() { idle.min(NEW) } else { idle };
        self.used_at.saturating_add(idle) >= tick
    }

    /// Returns whether the client has sent one packet and received no reply.
    pub(crate) fn is_new(&self) -> bool {
        self.standing == Standing::New
    }

    /// Stops the use of UDP_SEGMENT for [`RETRY_SEGMENTATION`] ticks, after the kernel has refused.
    pub(crate) fn disable_segmentation(&mut self, tick: u64) {
        self.segments = false;
        self.again_at = Some(tick + RETRY_SEGMENTATION);
    }

    /// Appends one datagram to the output, as part of the last message if possible.
    pub(crate) fn push(&mut self, message: usize, range: Range<usize>) {
        let length = range.len();
        if let Some(run) = &mut self.run
            && (1..=run.segment).contains(&length)
            && run.datagrams < SEGMENTS
            && run.bytes + length < MAX_PAYLOAD - 20
        {
            self.outgoing.part(message, range);
            self.outgoing.set_segment_last(run.segment as u16);
            run.bytes += length;
            run.datagrams += 1;
            if length < run.segment {
                self.run = None;
            }
            return;
        }
        self.outgoing.message(None, None);
        self.outgoing.part(message, range);
        let may_grow = self.segments && (1..MAX_PAYLOAD / 2).contains(&length);
        self.run = may_grow.then_some(Run { segment: length, bytes: length, datagrams: 1 });
    }

    /// Appends a message of several datagrams, which UDP_GRO has coalesced and UDP_SEGMENT will split.
    pub(crate) fn push_segmented(&mut self, message: usize, range: Range<usize>, segment: u16) {
        self.outgoing.message(None, Some(segment));
        self.outgoing.part(message, range);
        self.run = None;
    }

    pub(crate) fn clear(&mut self) {
        self.outgoing.clear();
        self.run = None;
    }
}

/// An entry of an eviction queue.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    index: usize,
    serial: u64,
    /// [`Target::used_at`] when the entry was queued.
    used_at: u64,
}

/// The targets of one link in one plane.
pub(crate) struct Targets {
    slots: Vec<Option<Target>>,
    free: Vec<usize>,
    by_key: HashMap<TargetKey, usize>,
    /// The result of the last lookup: most packets have the target of the packet before.
    last: Option<(TargetKey, usize)>,
    /// The targets with packets to send.
    touched: Vec<usize>,
    most: usize,
    /// The count of clients; `None` without replies, where targets are as few as next hops.
    share: Option<Share>,
    /// Clients that were new when queued, oldest first. They are evicted first.
    new: VecDeque<Candidate>,
    /// Clients that were neither new nor established when queued, least recently used first.
    unproven: VecDeque<Candidate>,
    serial: u64,
    /// Clients closed to make space for new clients since the last [`Targets::take_evicted`].
    evicted: usize,
}

impl Targets {
    pub(crate) fn new(most: usize, share: Option<Share>) -> Targets {
        Targets {
            slots: Vec::new(),
            free: Vec::new(),
            by_key: HashMap::new(),
            last: None,
            touched: Vec::new(),
            most,
            share,
            new: VecDeque::new(),
            unproven: VecDeque::new(),
            serial: 0,
            evicted: 0,
        }
    }

    pub(crate) fn find(&mut self, key: TargetKey) -> Option<usize> {
        if let Some((last, index)) = self.last
            && last == key
        {
            return Some(index);
        }
        let index = *self.by_key.get(&key)?;
        self.last = Some((key, index));
        Some(index)
    }

    /// Opens a target, and evicts a client that is not established if the limit is reached. Returns `None` when all are established.
    ///
    /// # Errors
    ///
    /// The errors of socket(2) and connect(2).
    pub(crate) fn open(&mut self, key: TargetKey, segments: bool, tick: u64) -> io::Result<Option<usize>> {
        while !self.may_open() {
            if !self.evict() {
                return Ok(None);
            }
        }
        let opened = match Target::open(key, segments) {
            // No ephemeral port or descriptor is free: an eviction frees one.
            Err(error) if is_exhausted(&error) && self.evict() => Target::open(key, segments),
            opened => opened,
        };
        match opened {
            Ok(target) => Ok(Some(self.insert(Target { used_at: tick, ..target }))),
            Err(error) => {
                self.share.iter_mut().for_each(Share::give_back);
                Err(error)
            }
        }
    }

    /// Adds an open target. No other target may have its key.
    pub(crate) fn adopt(&mut self, target: Target) {
        self.share.iter_mut().for_each(Share::take_anyway);
        self.insert(target);
    }

    /// Returns whether one more target may be opened, and counts it.
    fn may_open(&mut self) -> bool {
        self.by_key.len() < self.most && self.share.as_mut().is_none_or(Share::take)
    }

    fn insert(&mut self, mut target: Target) -> usize {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.serial += 1;
        target.serial = self.serial;
        if self.share.is_some() {
            let candidate = Candidate { index, serial: target.serial, used_at: target.used_at };
            let queue = if target.is_new() { &mut self.new } else { &mut self.unproven };
            queue.push_back(candidate);
        }
        self.by_key.insert(target.key, index);
        self.slots[index] = Some(target);
        index
    }

    /// Closes the oldest new client, or else the least recently used client that is not established. Returns false when there is no
    /// such client without packets to send.
    fn evict(&mut self) -> bool {
        while let Some(candidate) = self.new.pop_front() {
            match self.candidate(candidate) {
                Some(target) if !target.is_new() => self.unproven.push_back(candidate),
                Some(target) if target.outgoing.is_empty() => return self.evict_now(candidate.index),
                Some(_) => {
                    // The clients behind this one are newer, and have packets to send too.
                    self.new.push_front(candidate);
                    break;
                }
                None => {}
            }
        }
        for _ in 0..self.unproven.len() {
            let Some(candidate) = self.unproven.pop_front() else { break };
            let Some(target) = self.candidate(candidate) else { continue };
            if target.standing == Standing::Established {
                continue;
            }
            if target.used_at == candidate.used_at && target.outgoing.is_empty() {
                return self.evict_now(candidate.index);
            }
            let used_at = target.used_at;
            self.unproven.push_back(Candidate { used_at, ..candidate });
        }
        // All candidates were used after they were queued, or have packets to send. Their times are correct now.
        self.unproven.make_contiguous().sort_by_key(|candidate| candidate.used_at);
        let has_sent_all = |candidate: &Candidate| {
            self.candidate(*candidate).is_some_and(|target| target.outgoing.is_empty())
        };
        let Some(oldest) = self.unproven.iter().position(has_sent_all) else { return false };
        self.unproven.remove(oldest).is_some_and(|candidate| self.evict_now(candidate.index))
    }

    fn evict_now(&mut self, index: usize) -> bool {
        self.evicted += 1;
        self.close(index);
        true
    }

    /// Returns the target of a queue entry, if it is still open.
    fn candidate(&self, candidate: Candidate) -> Option<&Target> {
        self.slots[candidate.index].as_ref().filter(|target| target.serial == candidate.serial)
    }

    /// Returns the number of clients evicted since the last call.
    pub(crate) fn take_evicted(&mut self) -> usize {
        std::mem::take(&mut self.evicted)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Target> {
        self.slots.iter().flatten()
    }

    pub(crate) fn get(&mut self, index: usize) -> Option<&mut Target> {
        self.slots.get_mut(index)?.as_mut()
    }

    /// Returns the indices of all open targets.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = usize> + '_ {
        self.slots.iter().enumerate().filter(|(_, target)| target.is_some()).map(|(number, _)| number)
    }

    /// Returns the target, marked as one with packets to send.
    pub(crate) fn touch(&mut self, index: usize) -> Option<&mut Target> {
        let target = self.slots.get_mut(index)?.as_mut()?;
        if target.outgoing.is_empty() {
            self.touched.push(index);
        }
        Some(target)
    }

    /// Returns the next target with packets to send, each once.
    pub(crate) fn next_touched(&mut self) -> Option<usize> {
        self.touched.pop()
    }

    /// Enables UDP_SEGMENT again for targets whose time without it is over.
    pub(crate) fn reenable_segmentation(&mut self, tick: u64) {
        for target in self.slots.iter_mut().flatten() {
            if target.again_at.take_if(|again_at| *again_at <= tick).is_some() {
                target.segments = true;
            }
        }
    }

    /// Closes the targets for which `stays` returns false.
    pub(crate) fn retain(&mut self, mut stays: impl FnMut(&Target) -> bool) {
        for index in 0..self.slots.len() {
            if self.slots[index].as_ref().is_some_and(|target| !stays(target)) {
                self.close(index);
            }
        }
        // Closed and established clients need no queue entry.
        let slots = &self.slots;
        let is_there = |candidate: &Candidate| {
            let target = slots[candidate.index].as_ref();
            target.is_some_and(|target| {
                target.serial == candidate.serial && target.standing != Standing::Established
            })
        };
        self.new.retain(is_there);
        self.unproven.retain(is_there);
    }

    pub(crate) fn close(&mut self, index: usize) {
        let Some(target) = self.slots.get_mut(index).and_then(Option::take) else { return };
        self.by_key.remove(&target.key);
        self.free.push(index);
        self.last = None;
        self.share.iter_mut().for_each(Share::give_back);
    }

    pub(crate) fn len(&self) -> usize {
        self.by_key.len()
    }
}

/// Returns whether socket(2) or connect(2) failed for lack of a resource that each client takes. connect(2) returns EAGAIN when no
/// ephemeral port is free.
fn is_exhausted(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
        || matches!(Errno::of(error), Some(Errno::ENOMEM | Errno::ENFILE | Errno::EMFILE | Errno::ENOBUFS))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::clients::Pool;

    use super::*;

    #[test]
    fn a_new_client_replaces_the_least_recently_used() {
        let mut targets = Targets::new(2, Some(Share::new(Arc::new(Pool::new(2, 1)))));
        let address = |last, port| SocketAddr::from(([127, 0, 0, last], port));
        let key = |client| (Some(address(2, client)), address(1, 9), None);
        let open = |targets: &mut Targets, client| targets.open(key(client), false, 0).unwrap();
        let clients = [1, 2].map(|client| open(&mut targets, client).unwrap());
        // Both are used after they were queued.
        for (client, tick) in clients.into_iter().zip([3, 2]) {
            targets.get(client).unwrap().has_sent(tick);
        }
        let new = open(&mut targets, 3).expect("a client that is not established makes space");
        assert!(targets.find(key(1)).is_some() && targets.find(key(2)).is_none());
        for client in [clients[0], new] {
            targets.get(client).unwrap().was_answered(3);
            targets.get(client).unwrap().has_sent(3);
        }
        assert_eq!(open(&mut targets, 4), None, "all are established");
    }
}
