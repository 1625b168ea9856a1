//! The parts that all planes share: receive, send from the receive buffers, and the handling of errors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::Duration;

use fourtuple_syscalls::datagram::{Batch, Messages, Outgoing};
use fourtuple_syscalls::{Errno, errno_name};

use crate::counters::{Counters, Drop};
use crate::path::Path;
use crate::plane::Plane;
use crate::target::Target;

/// The pause after a failed receive call. The socket stays readable: without a pause a lasting lack of memory would keep a CPU busy.
const BACK_OFF: Duration = Duration::from_millis(1);

/// Receives a batch from a listening socket. Returns false when no packet was received.
///
/// # Errors
///
/// The errors of [`not_received`].
pub(super) fn receive(batch: &mut Batch, listener: BorrowedFd<'_>, counters: &Counters) -> io::Result<bool> {
    match batch.receive(listener) {
        Ok(_) => Ok(true),
        Err(error) => not_received("recvmmsg()", error, counters).map(|()| false),
    }
}

/// Counts a failed receive call of a listening socket, and pauses. An unconnected socket reports no ICMP errors, so that no packet is lost.
///
/// # Errors
///
/// Every further call would fail too: the plane must end.
pub(super) fn not_received(call: &'static str, error: io::Error, counters: &Counters) -> io::Result<()> {
    if matches!(Errno::of(&error), Some(Errno::EAGAIN | Errno::EINTR)) {
        return Ok(());
    }
    if is_lasting(&error) {
        return Err(refused(call)(error));
    }
    counters.failed_receive();
    thread::sleep(BACK_OFF);
    Ok(())
}

/// Adds the name of the failed call to an error.
pub(super) fn refused(call: &'static str) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{call}: {} ({error})", errno_name(&error)))
}

/// Returns whether every further receive call would fail too: a filter forbids the call, or the descriptor is not a socket. None of these
/// errors reports an ICMP message (`icmp_err_convert`, `icmpv6_err_convert`).
fn is_lasting(error: &io::Error) -> bool {
    matches!(
        Errno::of(error),
        Some(Errno::EPERM | Errno::EBADF | Errno::EFAULT | Errno::EINVAL | Errno::ENOSYS | Errno::ENOTSOCK)
    )
}

/// Sends the output that [`Path::take`] has added to each target.
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
        target.disable_segmentation(tick);
        counters.unsegmented();
        send_unsegmented(target, from, refused, counters);
        first = refused + 1;
    }
}

/// Sends the messages from `first` on, and counts drops by reason. Stops at a message that the kernel refuses to segment, and returns
/// its index.
fn send_until_refused(
    socket: BorrowedFd<'_>,
    outgoing: &mut Outgoing,
    from: &impl Messages,
    mut first: usize,
    counters: &Counters,
) -> Option<usize> {
    // A connected socket reports an ICMP error for an earlier packet once, instead of sending the current packet.
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
                if is_segmentation_refused(&error) && outgoing.segment(first).is_some() {
                    return Some(first);
                }
                counters.dropped(Drop::of(&error), outgoing.size(first).0);
                first += 1;
            }
        }
    }
    None
}

/// Returns whether the first of two errors was for an earlier packet. Two equal errors may both be for the current packet, except port
/// unreachable, which is always for an earlier packet.
fn was_earlier(before: &io::Error, now: &io::Error) -> bool {
    before.raw_os_error() != now.raw_os_error() || Drop::of(before) == Drop::Refused
}

/// Returns whether an ICMP message can cause this error on a connected socket (`icmp_err_convert`, `icmpv6_err_convert`,
/// `__udp4_lib_err`): port unreachable, a filter on the path, a packet too big for the path. Other errors are for the current packet.
fn may_be_earlier(error: &io::Error) -> bool {
    match Drop::of(error) {
        Drop::Refused | Drop::Unreachable | Drop::TooLong => true,
        Drop::Other => !is_segmentation_refused(error),
        _ => false,
    }
}

/// Returns whether the kernel refused UDP_SEGMENT. EINVAL: the datagrams are longer than the path MTU, or the kernel lacks UDP_SEGMENT;
/// EIO: the device cannot compute checksums.
fn is_segmentation_refused(error: &io::Error) -> bool {
    matches!(Errno::of(error), Some(Errno::EIO | Errno::EINVAL | Errno::EMSGSIZE))
}

/// Sends the datagrams of one message as single messages.
fn send_unsegmented(target: &Target, from: &impl Messages, message: usize, counters: &Counters) {
    let Some(segment) = target.outgoing.segment(message).map(usize::from) else { return };
    let mut alone = Outgoing::new();
    for (index, range) in target.outgoing.parts(message) {
        for start in range.clone().step_by(segment.max(1)) {
            alone.message(None, None);
            alone.part(index, start..range.end.min(start + segment));
        }
    }
    // Without UDP_SEGMENT no message is refused for it, so that the call sends all messages.
    let _ = send_until_refused(target.socket.as_fd(), &mut alone, from, 0, counters);
}

/// Returns replies from the next hop of one target to its client, from the address that the client has sent to.
pub(super) fn give_back(
    batch: &mut Batch,
    back: &mut Outgoing,
    listener: BorrowedFd<'_>,
    index: usize,
    path: &mut Path,
) -> io::Result<()> {
    let tick = path.tick;
    let Some(target) = path.targets.get(index) else { return Ok(()) };
    let (Some(client), from) = (target.key.0, target.key.2) else { return Ok(()) };
    // The error is for a packet sent to the next hop. The receive call clears it, so that the socket does not stay ready.
    if let Err(error) = batch.receive(target.socket.as_fd()) {
        return match Errno::of(&error) {
            Some(Errno::EAGAIN | Errno::EINTR | Errno::ENOBUFS | Errno::ENOMEM) => {
                not_received("recvmmsg()", error, &path.counters)
            }
            _ if is_lasting(&error) => Err(refused("recvmmsg()")(error)),
            _ => {
                path.counters.failed_later(Drop::of(&error));
                Ok(())
            }
        };
    }
    target.was_answered(tick);
    back.clear();
    for (message, datagram) in batch.iter().enumerate() {
        if datagram.truncated {
            path.counters.dropped_reply(Drop::Truncated);
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
                path.counters.dropped_reply(Drop::of(&error));
                first += 1;
            }
        }
    }
    Ok(())
}

/// Maximum number of packets of one call.
const BATCH: usize = 64;

/// Bytes for each packet: a jumbo frame. The odd number of cache lines places the beginnings of packets, which is all of a short packet,
/// in different cache sets.
const ROOM: usize = 145 * 64;

/// Moves up to 64 packets with each system call.
pub(super) struct Batched {
    batch: Batch,
    back: Outgoing,
}

impl Batched {
    pub(super) fn new() -> Batched {
        Batched::with_room(ROOM)
    }

    pub(super) fn with_room(room: usize) -> Batched {
        Batched { batch: Batch::new(BATCH, room), back: Outgoing::new() }
    }
}

impl Plane for Batched {
    fn forward(&mut self, _: usize, listener: BorrowedFd<'_>, path: &mut Path) -> io::Result<usize> {
        if !receive(&mut self.batch, listener, &path.counters)? {
            return Ok(0);
        }
        path.is_behind = self.batch.len() == BATCH;
        for (index, datagram) in self.batch.iter().enumerate() {
            path.take(index, &datagram);
        }
        send_all(path, &self.batch);
        Ok(self.batch.len())
    }

    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path) -> io::Result<()> {
        give_back(&mut self.batch, &mut self.back, listener, index, path)
    }
}

/// Maximum size of a datagram.
const ONE_PACKET: usize = 65_536;

/// Moves one packet with each system call.
pub(super) struct OneByOne {
    batch: Batch,
    back: Outgoing,
}

impl OneByOne {
    pub(super) fn new() -> OneByOne {
        OneByOne { batch: Batch::new(1, ONE_PACKET), back: Outgoing::new() }
    }
}

impl Plane for OneByOne {
    fn forward(&mut self, _: usize, listener: BorrowedFd<'_>, path: &mut Path) -> io::Result<usize> {
        if !receive(&mut self.batch, listener, &path.counters)? {
            return Ok(0);
        }
        let Some(datagram) = self.batch.get(0) else { return Ok(0) };
        path.take(0, &datagram);
        send_all(path, &self.batch);
        Ok(1)
    }

    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path) -> io::Result<()> {
        give_back(&mut self.batch, &mut self.back, listener.as_fd(), index, path)
    }
}
