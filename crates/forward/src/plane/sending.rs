//! What all planes have in common: sending from where they have received, and what to do when the kernel will not.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use fourtuple_syscalls::datagram::{Batch, Messages, Outgoing};

use crate::counters::{Counters, Drop};
use crate::path::Path;
use crate::target::Target;

/// Sends what [`Path::take`] has put behind each target.
pub(super) fn send_all(path: &mut Path, from: &impl Messages) {
    while let Some(index) = path.targets.next_touched() {
        let Some(target) = path.targets.get(index) else { continue };
        send_to(target, from, &path.counters);
        target.clear();
    }
}

fn send_to(target: &mut Target, from: &impl Messages, counters: &Counters) {
    let mut first = 0;
    // The error of a connected socket may be that of an earlier packet (ICMP): it is given once, and this one was not tried.
    let mut tried_again = false;
    while first < target.outgoing.len() {
        match target.outgoing.send(target.socket.as_fd(), from, first) {
            Ok(sent) => {
                for message in first..first + sent {
                    let (datagrams, bytes) = target.outgoing.size(message);
                    counters.sent(datagrams, bytes);
                }
                first += sent;
                tried_again = false;
            }
            Err(error) if Drop::of(&error) == Drop::Refused && !tried_again => {
                counters.refused_later();
                tried_again = true;
            }
            Err(error) if will_not_cut(&error) && target.outgoing.segment(first).is_some() => {
                target.segments = false;
                counters.unsegmented();
                send_uncut(target, from, first, counters);
                first += 1;
            }
            Err(error) => {
                counters.dropped(Drop::of(&error), target.outgoing.size(first).0);
                first += 1;
                tried_again = false;
            }
        }
    }
}

/// EINVAL: the datagrams are longer than the path's MTU, or the kernel cannot; EIO: the device cannot make checksums.
fn will_not_cut(error: &io::Error) -> bool {
    const EIO: i32 = 5;
    const EINVAL: i32 = 22;
    const EMSGSIZE: i32 = 90;
    matches!(error.raw_os_error(), Some(EIO | EINVAL | EMSGSIZE))
}

/// The datagrams of one message, each by itself.
fn send_uncut(target: &Target, from: &impl Messages, message: usize, counters: &Counters) {
    let Some(segment) = target.outgoing.segment(message).map(usize::from) else { return };
    let mut alone = Outgoing::new();
    for (index, range) in target.outgoing.parts(message) {
        for start in range.clone().step_by(segment.max(1)) {
            alone.message(None, None);
            alone.part(index, start..range.end.min(start + segment));
        }
    }
    let mut first = 0;
    while first < alone.len() {
        match alone.send(target.socket.as_fd(), from, first) {
            Ok(sent) => {
                for message in first..first + sent {
                    counters.sent(1, alone.size(message).1);
                }
                first += sent;
            }
            Err(error) => {
                counters.dropped(Drop::of(&error), 1);
                first += 1;
            }
        }
    }
}

/// Replies of one target's next hop, to its client, from where it sent to.
pub(super) fn give_back(
    batch: &mut Batch,
    back: &mut Outgoing,
    listener: BorrowedFd<'_>,
    index: usize,
    path: &mut Path,
) {
    let tick = path.tick;
    let Some(target) = path.targets.get(index) else { return };
    let Some(client) = target.key.0 else { return };
    target.used_at = tick;
    // An error is that of a packet that was sent to the next hop: taken, so that it is not ready for ever.
    if let Err(error) = batch.receive(target.socket.as_fd()) {
        if Drop::of(&error) == Drop::Refused {
            path.counters.refused_later();
        }
        return;
    }
    back.clear();
    for (message, datagram) in batch.iter().enumerate() {
        if datagram.truncated {
            path.counters.dropped(Drop::Truncated, 1);
            continue;
        }
        back.message(Some(client), None);
        back.part(message, 0..datagram.bytes.len());
    }
    let mut first = 0;
    while first < back.len() {
        match back.send(listener, batch, first) {
            Ok(sent) => {
                path.counters.returned(sent);
                first += sent;
            }
            Err(error) => {
                path.counters.dropped(Drop::of(&error), 1);
                first += 1;
            }
        }
    }
}
