//! The ways to move packets: one row of [`ROWS`] for each.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use fourtuple_syscalls::datagram::{Batch, Messages, Outgoing};
use fourtuple_syscalls::datagram_ring::DatagramRing;
use fourtuple_syscalls::{Errno, errno_name};

use crate::counters::{Counters, Drop};
use crate::path::Path;
use crate::settings::ForwardError;
use crate::target::Target;

/// One way to move packets. To add a plane: a variant of [`PlaneKind`], a type and a row.
struct Row {
    kind: PlaneKind,
    /// The name on the command line and in records.
    name: &'static str,
    /// The text of the help, if the name does not suffice.
    description: &'static str,
    /// Whether the sockets use UDP_GRO and UDP_SEGMENT.
    offloads: bool,
    /// Checks that the kernel has and permits the required calls.
    probe: fn() -> Result<(), ForwardError>,
    open: fn() -> Box<dyn Plane>,
}

/// In the order of the variants of [`PlaneKind`].
const ROWS: [Row; 4] = [
    Row {
        kind: PlaneKind::OneByOne,
        name: "one-by-one",
        description: "",
        offloads: false,
        probe: || Ok(()),
        open: || Box::new(OneByOne::new()),
    },
    Row {
        kind: PlaneKind::Batched,
        name: "batched",
        description: "",
        offloads: false,
        probe: || Ok(()),
        open: || Box::new(Batched::new(BUFFER)),
    },
    Row {
        kind: PlaneKind::Offload,
        name: "offload",
        description: "UDP_GRO and UDP_SEGMENT",
        offloads: true,
        probe: || Ok(()),
        open: || Box::new(Batched::new(COALESCED_BUFFER)),
    },
    Row {
        kind: PlaneKind::Uring,
        name: "uring",
        description: "offload, with receive by io_uring",
        offloads: true,
        probe: probe_uring,
        open: || Box::new(Uring::new()),
    },
];

impl PlaneKind {
    /// All kinds, in the order of the table.
    pub const ALL: [PlaneKind; ROWS.len()] = {
        let mut all = [PlaneKind::OneByOne; ROWS.len()];
        let mut row = 0;
        while row < all.len() {
            all[row] = ROWS[row].kind;
            assert!(all[row] as usize == row, "the rows are in the order of the variants");
            row += 1;
        }
        all
    };

    fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    /// Returns the name on the command line and in records.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the names with their descriptions, for a help text.
    pub fn descriptions() -> String {
        let words = |row: &Row| match row.description {
            "" => row.name.to_owned(),
            text => format!("{} ({text})", row.name),
        };
        ROWS.iter().map(words).collect::<Vec<_>>().join(", ")
    }

    /// Checks that this kernel has and permits the calls that this kind needs. Sends no packet.
    ///
    /// # Errors
    ///
    /// [`ForwardError::NotPermitted`] and [`ForwardError::Absent`] for kinds that need io_uring; [`ForwardError::Call`].
    pub fn probe(self) -> Result<(), ForwardError> {
        (self.row().probe)()
    }

    /// Returns whether the sockets of this kind use UDP_GRO on receive and UDP_SEGMENT on send.
    pub(crate) fn offloads(self) -> bool {
        self.row().offloads
    }

    pub(crate) fn plane(self) -> Box<dyn Plane> {
        (self.row().open)()
    }
}

impl FromStr for PlaneKind {
    type Err = String;

    fn from_str(text: &str) -> Result<PlaneKind, String> {
        let found = PlaneKind::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| {
            let names: Vec<_> = PlaneKind::ALL.iter().map(|kind| kind.name()).collect();
            format!("{text:?} is not a way to move packets: expected {}", names.join(", "))
        })
    }
}

/// The ways to move packets. Their names, requirements and constructors are in one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaneKind {
    /// One system call each to wait, to receive and to send, for every packet.
    OneByOne,
    /// recvmmsg(2) and sendmmsg(2): up to 64 packets with one call.
    Batched,
    /// Like `Batched`, with UDP_GRO on receive and UDP_SEGMENT on send: the network stack handles one large buffer instead of
    /// many packets of one length.
    Offload,
    /// Like `Offload`, but io_uring receives: one multishot recvmsg request for all packets, into a ring of buffers provided to the
    /// kernel.
    Uring,
}

impl fmt::Display for PlaneKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Moves packets. One thread owns a plane and the sockets of its ports.
pub(crate) trait Plane: Send {
    /// Takes the listening socket of port `number`, and returns the descriptor that becomes readable when packets can be forwarded.
    fn watch<'a>(&'a mut self, number: usize, listener: BorrowedFd<'a>) -> io::Result<BorrowedFd<'a>> {
        let _ = number;
        Ok(listener)
    }

    /// Forwards up to one batch of the messages that wait at `listener`. Returns their number.
    ///
    /// # Errors
    ///
    /// The kernel refuses to receive and would refuse again: the plane must end.
    fn forward(&mut self, number: usize, listener: BorrowedFd<'_>, path: &mut Path) -> io::Result<usize>;

    /// Forwards the packets that the plane has received from port `number` and still holds, before another plane takes the socket.
    fn release(&mut self, number: usize, listener: BorrowedFd<'_>, path: &mut Path) {
        let _ = (number, listener, path);
    }

    /// Returns up to one batch of replies from the next hop of target `index` to its client.
    ///
    /// # Errors
    ///
    /// The same errors as [`Plane::forward`].
    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path) -> io::Result<()>;
}

/// The pause after a failed receive call. The socket stays readable: without a pause a lasting lack of memory would keep a CPU busy.
const BACK_OFF: Duration = Duration::from_millis(1);

/// Receives a batch from a listening socket. Returns false when no packet was received.
///
/// # Errors
///
/// The errors of [`not_received`].
fn receive(batch: &mut Batch, listener: BorrowedFd<'_>, counters: &Counters) -> io::Result<bool> {
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
fn not_received(call: &'static str, error: io::Error, counters: &Counters) -> io::Result<()> {
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
fn refused(call: &'static str) -> impl Fn(io::Error) -> io::Error {
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
fn send_all(path: &mut Path, from: &impl Messages) {
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
fn give_back(
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
const BUFFER: usize = 145 * 64;

/// Bytes for each message with UDP_GRO, which coalesces up to 64 KiB; also an odd number of cache lines.
const COALESCED_BUFFER: usize = 1025 * 64;

/// Moves up to 64 packets with each system call. `Offload` is this plane with larger buffers, over sockets with UDP_GRO and UDP_SEGMENT.
struct Batched {
    batch: Batch,
    back: Outgoing,
}

impl Batched {
    fn new(buffer: usize) -> Batched {
        Batched { batch: Batch::new(BATCH, buffer), back: Outgoing::new() }
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
struct OneByOne {
    batch: Batch,
    back: Outgoing,
}

impl OneByOne {
    fn new() -> OneByOne {
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

/// The buffers of the ring of a port, and the most messages of a turn.
const BUFFERS: u16 = 64;

/// Checks that the kernel has and permits the required io_uring calls.
fn probe_uring() -> Result<(), ForwardError> {
    let kind = PlaneKind::Uring;
    // The check runs in its own thread: a closed ring interrupts the thread that has created it a little later (`io_ring_exit_work`),
    // which could interrupt a system call of the caller.
    let tried = thread::Builder::new().spawn(DatagramRing::works);
    let tried = tried.and_then(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("a panic"))));
    match tried {
        Ok(true) => Ok(()),
        Ok(false) => Err(ForwardError::Absent {
            kind,
            what: "a request of io_uring that receives one message after the other (Linux 6.0)",
            source: io::ErrorKind::Unsupported.into(),
        }),
        Err(source) => Err(match Errno::of(&source) {
            Some(Errno::EPERM | Errno::EACCES) => ForwardError::NotPermitted {
                kind,
                call: "io_uring_setup()",
                needs: "it takes the sysctl kernel.io_uring_disabled at 0 (or 1 with the group of kernel.io_uring_group) and \
                        a seccomp profile that allows io_uring",
                source,
            },
            Some(Errno::ENOSYS) => ForwardError::Absent { kind, what: "a kernel with io_uring", source },
            Some(Errno::EINVAL) => {
                ForwardError::Absent { kind, what: "IORING_SETUP_DEFER_TASKRUN (Linux 6.1)", source }
            }
            _ => ForwardError::Call { call: "io_uring", source },
        }),
    }
}

/// Like `Offload`, with a ring for each port. Packets are sent from the buffers of the ring without a copy, and the kernel gets the buffers
/// back at the end of the turn. Replies arrive at many sockets, and are received as with `Offload`.
struct Uring {
    /// The rings by port number.
    rings: Vec<Option<DatagramRing>>,
    /// Buffers for replies, allocated at the first reply.
    back: Option<(Batch, Outgoing)>,
}

impl Uring {
    fn new() -> Uring {
        Uring { rings: Vec::new(), back: None }
    }
}

fn send_on(ring: &DatagramRing, path: &mut Path) {
    for (index, datagram) in ring.iter().enumerate() {
        path.take(index, &datagram);
    }
    send_all(path, ring);
}

impl Plane for Uring {
    fn watch<'a>(&'a mut self, number: usize, listener: BorrowedFd<'a>) -> io::Result<BorrowedFd<'a>> {
        if self.rings.len() <= number {
            self.rings.resize_with(number + 1, || None);
        }
        if self.rings[number].is_none() {
            let mut ring = DatagramRing::new(BUFFERS, COALESCED_BUFFER)?;
            ring.resume(listener)?;
            self.rings[number] = Some(ring);
        }
        self.rings[number].as_ref().map(AsFd::as_fd).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn forward(&mut self, number: usize, listener: BorrowedFd<'_>, path: &mut Path) -> io::Result<usize> {
        let Some(Some(ring)) = self.rings.get_mut(number) else { return Ok(0) };
        let count = match ring.receive() {
            Ok(count) => count,
            Err(error) => return not_received("io_uring_enter()", error, &path.counters).map(|()| 0),
        };
        if let Some(errno) = ring.take_failure() {
            not_received("recvmsg() of io_uring", errno.into(), &path.counters)?;
        }
        path.is_behind = count == usize::from(BUFFERS);
        send_on(ring, path);
        // The call fails when the kernel has no memory for one more request. The request then stays queued for the next call.
        let _ = ring.resume(listener);
        Ok(count)
    }

    /// Ends the receive request. Packets that are not in a buffer stay in the receive queue of the socket.
    fn release(&mut self, number: usize, _: BorrowedFd<'_>, path: &mut Path) {
        let Some(mut ring) = self.rings.get_mut(number).and_then(Option::take) else { return };
        while ring.stop().is_ok_and(|left| left > 0) {
            send_on(&ring, path);
        }
    }

    fn give_back(&mut self, listener: BorrowedFd<'_>, index: usize, path: &mut Path) -> io::Result<()> {
        let (batch, back) =
            self.back.get_or_insert_with(|| (Batch::new(BATCH, COALESCED_BUFFER), Outgoing::new()));
        give_back(batch, back, listener, index, path)
    }
}
