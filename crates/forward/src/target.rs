//! Where a plane's packets go: a connected socket for each next hop, or for each client and next hop.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_syscalls::datagram::{LONGEST, Outgoing, SEGMENTS};
use fourtuple_syscalls::socket::{self, Transport};

/// What tells targets apart: the client, where replies are to come back to it, the next hop, and the address of this host that
/// the client has sent to, where replies are to come from that and the listener has more than one.
pub(crate) type TargetKey = (Option<SocketAddr>, SocketAddr, Option<IpAddr>);

/// For so many ticks messages to a target go one by one whose kernel would not cut one. What was in the way may be gone then
/// (an MTU that was raised); if not, one call in all this time has failed in vain.
const UNCUT: u64 = 5;

/// A message that may still grow.
#[derive(Clone, Copy, Debug)]
struct Run {
    segment: usize,
    bytes: usize,
    datagrams: usize,
}

pub(crate) struct Target {
    pub(crate) socket: OwnedFd,
    pub(crate) key: TargetKey,
    /// What is to be sent at the end of this turn.
    pub(crate) outgoing: Outgoing,
    run: Option<Run>,
    /// Whether the kernel cuts messages for this one: not for a while when it has refused.
    pub(crate) segments: bool,
    /// When it is tried again, if it has refused.
    again_at: Option<u64>,
    /// When something went through it, in ticks of the worker.
    pub(crate) used_at: u64,
}

impl Target {
    fn open(key: TargetKey, segments: bool) -> io::Result<Target> {
        let socket = socket::open(Transport::Udp, key.1, true)?;
        socket::connect(socket.as_fd(), key.1)?;
        Ok(Target::new(socket, key, segments, 0))
    }

    /// With a socket that is connected.
    pub(crate) fn new(socket: OwnedFd, key: TargetKey, segments: bool, used_at: u64) -> Target {
        Target { socket, key, outgoing: Outgoing::new(), run: None, segments, again_at: None, used_at }
    }

    /// The kernel would not cut a message: it is not asked to for a while.
    pub(crate) fn leave_uncut(&mut self, tick: u64) {
        self.segments = false;
        self.again_at = Some(tick + UNCUT);
    }

    /// Puts one datagram behind the others.
    pub(crate) fn push(&mut self, message: usize, range: Range<usize>) {
        let length = range.len();
        if let Some(run) = &mut self.run
            && (1..=run.segment).contains(&length)
            && run.datagrams < SEGMENTS
            && run.bytes + length < LONGEST - 20
        {
            self.outgoing.part(message, range);
            self.outgoing.cut_last(run.segment as u16);
            run.bytes += length;
            run.datagrams += 1;
            if length < run.segment {
                self.run = None;
            }
            return;
        }
        self.outgoing.message(None, None);
        self.outgoing.part(message, range);
        let may_grow = self.segments && (1..LONGEST / 2).contains(&length);
        self.run = may_grow.then_some(Run { segment: length, bytes: length, datagrams: 1 });
    }

    /// Puts a message of many datagrams behind the others, which the kernel has put together and cuts again.
    pub(crate) fn push_cut(&mut self, message: usize, range: Range<usize>, segment: u16) {
        self.outgoing.message(None, Some(segment));
        self.outgoing.part(message, range);
        self.run = None;
    }

    pub(crate) fn clear(&mut self) {
        self.outgoing.clear();
        self.run = None;
    }
}

/// All of a plane's and a link's.
pub(crate) struct Targets {
    slots: Vec<Option<Target>>,
    free: Vec<usize>,
    by_key: HashMap<TargetKey, usize>,
    /// Most packets go where the one before went.
    last: Option<(TargetKey, usize)>,
    /// Those with something to send.
    touched: Vec<usize>,
    most: usize,
}

impl Targets {
    pub(crate) fn new(most: usize) -> Targets {
        Targets {
            slots: Vec::new(),
            free: Vec::new(),
            by_key: HashMap::new(),
            last: None,
            touched: Vec::new(),
            most,
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

    /// One more; `None` when there are as many as may be.
    pub(crate) fn open(&mut self, key: TargetKey, segments: bool) -> io::Result<Option<usize>> {
        if self.by_key.len() >= self.most {
            return Ok(None);
        }
        Ok(Some(self.adopt(Target::open(key, segments)?)))
    }

    /// One that is open already, whose key no other one has.
    pub(crate) fn adopt(&mut self, target: Target) -> usize {
        let key = target.key;
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[index] = Some(target);
        self.by_key.insert(key, index);
        index
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Target> {
        self.slots.iter().flatten()
    }

    pub(crate) fn get(&mut self, index: usize) -> Option<&mut Target> {
        self.slots.get_mut(index)?.as_mut()
    }

    /// The numbers of all that there are.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = usize> + '_ {
        self.slots.iter().enumerate().filter(|(_, target)| target.is_some()).map(|(number, _)| number)
    }

    /// The target, which has something to send from now on.
    pub(crate) fn touch(&mut self, index: usize) -> Option<&mut Target> {
        let target = self.slots.get_mut(index)?.as_mut()?;
        if target.outgoing.is_empty() {
            self.touched.push(index);
        }
        Some(target)
    }

    /// One of those with something to send, each once.
    pub(crate) fn next_touched(&mut self) -> Option<usize> {
        self.touched.pop()
    }

    /// Has the kernel tried again that would not cut messages for a target some time ago.
    pub(crate) fn cut_again(&mut self, tick: u64) {
        for target in self.slots.iter_mut().flatten() {
            if target.again_at.take_if(|again_at| *again_at <= tick).is_some() {
                target.segments = true;
            }
        }
    }

    /// Closes those for which `stays` says no.
    pub(crate) fn retain(&mut self, mut stays: impl FnMut(&Target) -> bool) {
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let Some(target) = slot.take_if(|target| !stays(target)) else { continue };
            self.by_key.remove(&target.key);
            self.free.push(index);
            self.last = None;
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.by_key.len()
    }
}
