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
        send_to(target, from, &path.counters, path.tick);
        target.clear();
    }
}

fn send_to(target: &mut Target, from: &impl Messages, counters: &Counters, tick: u64) {
    let mut first = 0;
    while let Some(refused) =
        send_until_refused(target.socket.as_fd(), &mut target.outgoing, from, first, counters)
    {
        target.leave_uncut(tick);
        counters.unsegmented();
        send_uncut(target, from, refused, counters);
        first = refused + 1;
    }
}

/// Sends the messages from `first` on, or counts why not, up to one that the kernel will not cut: that one's number.
fn send_until_refused(
    socket: BorrowedFd<'_>,
    outgoing: &mut Outgoing,
    from: &impl Messages,
    mut first: usize,
    counters: &Counters,
) -> Option<usize> {
    // The error of a connected socket may be that of an earlier packet (ICMP): it is given once, and this one was not tried.
    let mut earlier: Option<io::Error> = None;
    while first < outgoing.len() {
        match outgoing.send(socket, from, first) {
            Ok(sent) => {
                if let Some(error) = earlier.take() {
                    counters.failed_later(Drop::of(&error));
                }
                for message in first..first + sent {
                    let (datagrams, bytes) = outgoing.size(message);
                    counters.sent(datagrams, bytes);
                }
                first += sent;
            }
            Err(error) if earlier.is_none() && may_be_earlier(&error) => earlier = Some(error),
            Err(error) => {
                if let Some(before) = earlier.take().filter(|before| was_earlier(before, &error)) {
                    counters.failed_later(Drop::of(&before));
                }
                if will_not_cut(&error) && outgoing.segment(first).is_some() {
                    return Some(first);
                }
                counters.dropped(Drop::of(&error), outgoing.size(first).0);
                first += 1;
            }
        }
    }
    None
}

/// Whether the error before this one was that of an earlier packet: one that comes again may be this packet's both times, but
/// for port unreachable, which is always an answer.
fn was_earlier(before: &io::Error, now: &io::Error) -> bool {
    before.raw_os_error() != now.raw_os_error() || Drop::of(before) == Drop::Refused
}

/// Whether an ICMP error gives it to a connected socket (`icmp_err_convert`, `icmpv6_err_convert`, `__udp4_lib_err`): port
/// unreachable, a filter on the way, a packet that was too big there. The others say why this packet was not sent.
fn may_be_earlier(error: &io::Error) -> bool {
    match Drop::of(error) {
        Drop::Refused | Drop::Unreachable | Drop::TooLong => true,
        Drop::Other => !will_not_cut(error),
        _ => false,
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
    // None of them is to be cut, so that none is left.
    let _ = send_until_refused(target.socket.as_fd(), &mut alone, from, 0, counters);
}

/// Replies of one target's next hop, to its client, from the address that it has sent to.
pub(super) fn give_back(
    batch: &mut Batch,
    back: &mut Outgoing,
    listener: BorrowedFd<'_>,
    index: usize,
    path: &mut Path,
) {
    let tick = path.tick;
    let Some(target) = path.targets.get(index) else { return };
    let (Some(client), from) = (target.key.0, target.key.2) else { return };
    target.used_at = tick;
    // An error is that of a packet that was sent to the next hop: taken, so that it is not ready for ever.
    if let Err(error) = batch.receive(target.socket.as_fd()) {
        match Drop::of(&error) {
            Drop::QueueFull => {}
            reason => path.counters.failed_later(reason),
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
        if let Some(from) = from {
            back.from_last(from, client);
        }
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
