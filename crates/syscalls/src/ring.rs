//! io_uring for connections: chains of socket, options, bind, connect, send and receive on direct descriptors, with one
//! system call for many connections.
//!
//! A [`Ring`] has one slot per connection, and owns all memory that the kernel reads or writes for the slots. The steps
//! of a chain are linked: a step that fails ends the chain, and its error is the next [`Event`].
//!
//! While a chain is in progress on a slot, none of the slot's memory is freed, moved or changed. `drop` cancels the chains and waits for
//! their end; memory that the kernel still uses then is leaked. Callers therefore need no `unsafe`, even if they drop a ring early.

use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use io_uring::types::{CancelBuilder, DestinationSlot, Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};

use crate::Errno;
use crate::address::{Endpoint, RawAddress};
use crate::option::IP_LOCAL_PORT_RANGE;
use crate::socket::Transport;

/// Number of steps of the longest chain: socket, four options, bind, connect, send, receive.
const MAX_STEPS: usize = 9;

/// A step of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Step {
    /// Opens a socket in the slot (socket(2)).
    Open,
    /// Sets one of the options before connect().
    Option,
    /// Binds the socket (bind(2)).
    Bind,
    /// Connects the socket (connect(2)). For an adopted socket, a second connect() returns the result of the first.
    Connect,
    /// Sends all bytes (send(2)).
    Send,
    /// Receives bytes (recv(2)).
    Receive,
    /// Closes the connection (close(2)).
    Close,
    /// Waits until the peer closes.
    Watch,
    /// Cancels the operation of the slot.
    Cancel,
    /// Waits until an adopted socket is connected.
    Adopt,
}

impl Step {
    const ALL: [Step; 10] = [
        Step::Open,
        Step::Option,
        Step::Bind,
        Step::Connect,
        Step::Send,
        Step::Receive,
        Step::Close,
        Step::Watch,
        Step::Cancel,
        Step::Adopt,
    ];

    /// Returns whether a successful step causes no event.
    fn is_silent(self) -> bool {
        matches!(
            self,
            Step::Open | Step::Option | Step::Bind | Step::Send | Step::Close | Step::Cancel | Step::Adopt
        )
    }
}

/// The options and the address of a socket before connect().
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// Number of the destination among the destinations of the ring.
    pub destination: usize,
    /// Source address to bind. With port 0, connect() chooses the port (IP_BIND_ADDRESS_NO_PORT); another port is
    /// shared with SO_REUSEADDR.
    pub source: Option<SocketAddr>,
    /// IP_LOCAL_PORT_RANGE, both bounds inclusive.
    pub window: Option<(u16, u16)>,
    /// SO_LINGER with 0 seconds: close() sends RST.
    pub reset_on_close: bool,
    /// Clears TCP_QUICKACK: the last ACK of the handshake waits for data that follows at once
    /// (`tcp_rcv_synsent_state_process`).
    pub ack_with_data: bool,
}

/// The result of a step.
#[derive(Debug)]
pub struct Event {
    /// The slot of the step.
    pub slot: u32,
    pub step: Step,
    /// The bytes of [`Step::Receive`], or the error. After an error no operation of the slot is in progress.
    pub result: io::Result<usize>,
}

/// Connections of one thread to one endpoint, or to several.
pub struct Ring {
    ring: IoUring,
    kind: libc::c_int,
    /// The family and the address of each destination. Not changed after the creation: the kernel reads them later.
    destinations: Box<[(libc::c_int, RawAddress)]>,
    slots: Vec<Slot>,
    capacity: usize,
    /// Number of completions still expected.
    awaited: usize,
    enters: u64,
    entries: usize,
}

#[derive(Default)]
struct Slot {
    source: Option<Box<RawAddress>>,
    window: Box<u32>,
    outgoing: Vec<u8>,
    received: Box<[u8]>,
    /// The steps of the current chain that are not known to be complete.
    chain: Chain,
    /// A failed step of which later steps of the chain have not completed yet.
    failed: Option<(Step, i32)>,
}

/// Constant option values, which the kernel reads later.
static ON: libc::c_int = 1;
static OFF: libc::c_int = 0;
static RESET: libc::linger = libc::linger { l_onoff: 1, l_linger: 0 };

impl Ring {
    /// Creates a ring for `slots` connections to `destinations`, each with `capacity` bytes of receive buffer.
    ///
    /// # Errors
    ///
    /// ENOSYS, EPERM: io_uring is disabled on this host. EINVAL: before Linux 6.1 (IORING_SETUP_DEFER_TASKRUN). EMFILE:
    /// more slots than RLIMIT_NOFILE.
    pub fn new(
        transport: Transport,
        destinations: &[Endpoint],
        slots: u32,
        capacity: usize,
    ) -> io::Result<Self> {
        let entries = (slots as usize * MAX_STEPS).next_power_of_two().clamp(64, 4096);
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize((entries * 4) as u32)
            .build(entries as u32)?;
        ring.submitter().register_files_sparse(slots)?;
        let raw = |endpoint: &Endpoint| Ok((endpoint.family(), endpoint.raw()?));
        let destinations = destinations.iter().map(raw).collect::<io::Result<_>>()?;
        Ok(Ring {
            ring,
            kind: match transport {
                Transport::Tcp => libc::SOCK_STREAM,
                Transport::Udp => libc::SOCK_DGRAM,
            },
            destinations,
            slots: (0..slots).map(|_| Slot::default()).collect(),
            capacity,
            awaited: 0,
            enters: 0,
            entries,
        })
    }

    /// Returns the number of system calls so far.
    pub fn enters(&self) -> u64 {
        self.enters
    }

    /// Opens a connection on `slot`, whose previous connection must be closed. If `bytes` is not empty, sends them and
    /// receives.
    ///
    /// Events: [`Step::Connect`], then [`Step::Receive`]; or the step that failed.
    pub fn open(&mut self, slot: u32, opening: &OpenOptions, bytes: &[u8]) -> io::Result<()> {
        let (family, kind) = (self.destinations[opening.destination].0, self.kind);
        self.idle(slot).source = opening.source.map(|source| Box::new(RawAddress::from(source)));
        let mut chain = Builder::new(self, slot)?;
        let target = DestinationSlot::try_from_slot_target(slot).map_err(|_| out_of_range())?;
        chain.push(Step::Open, opcode::Socket::new(family, kind, 0).file_index(Some(target)).build());
        if opening.reset_on_close {
            let value = (&raw const RESET).cast();
            chain.option(libc::SOL_SOCKET, libc::SO_LINGER, value, mem::size_of::<libc::linger>());
        }
        if opening.ack_with_data {
            let value = (&raw const OFF).cast();
            chain.option(libc::IPPROTO_TCP, libc::TCP_QUICKACK, value, mem::size_of::<libc::c_int>());
        }
        if let Some((low, high)) = opening.window {
            let window = &mut chain.ring.slots[slot as usize].window;
            **window = u32::from(low) | u32::from(high) << 16;
            let value = (&raw const **window).cast();
            chain.option(libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, value, mem::size_of::<u32>());
        }
        if let Some(source) = opening.source {
            let (level, name) = match source.port() {
                0 => (libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT),
                _ => (libc::SOL_SOCKET, libc::SO_REUSEADDR),
            };
            chain.option(level, name, (&raw const ON).cast(), mem::size_of::<libc::c_int>());
            let source = chain.ring.slots[slot as usize].source.as_ref().expect("set above");
            let bind = opcode::Bind::new(Fixed(slot), source.as_ptr(), source.length()).build();
            chain.push(Step::Bind, bind);
        }
        chain.connect(opening.destination);
        if !bytes.is_empty() {
            chain.send(bytes);
            chain.receive(0);
        }
        chain.submit()
    }

    /// Moves a socket with a connect() to `destination` in progress into `slot`, and continues like [`Ring::open`].
    pub fn adopt(&mut self, slot: u32, destination: usize, socket: OwnedFd, bytes: &[u8]) -> io::Result<()> {
        self.idle(slot);
        // Submits queued entries first, above all a close of the slot's previous connection.
        self.submit()?;
        self.ring.submitter().register_files_update(slot, &[socket.as_raw_fd()])?;
        self.enters += 1;
        drop(socket);
        let mut chain = Builder::new(self, slot)?;
        chain.push(Step::Adopt, opcode::PollAdd::new(Fixed(slot), libc::POLLOUT as u32).build());
        // A second connect() returns the result of the first (__inet_stream_connect).
        chain.connect(destination);
        if !bytes.is_empty() {
            chain.send(bytes);
            chain.receive(0);
        }
        chain.submit()
    }

    /// Sends `bytes` on an open connection, if not empty, and receives.
    pub fn exchange(&mut self, slot: u32, bytes: &[u8]) -> io::Result<()> {
        self.idle(slot);
        let mut chain = Builder::new(self, slot)?;
        if !bytes.is_empty() {
            chain.send(bytes);
        }
        chain.receive(0);
        chain.submit()
    }

    /// Receives data that has already arrived; EAGAIN if there is none.
    pub fn probe(&mut self, slot: u32) -> io::Result<()> {
        self.idle(slot);
        let mut chain = Builder::new(self, slot)?;
        chain.receive(libc::MSG_DONTWAIT);
        chain.submit()
    }

    /// Waits, without receiving, until the peer closes.
    pub fn watch(&mut self, slot: u32) -> io::Result<()> {
        self.idle(slot);
        let mut chain = Builder::new(self, slot)?;
        chain.push(Step::Watch, opcode::PollAdd::new(Fixed(slot), libc::POLLRDHUP as u32).build());
        chain.submit()
    }

    /// Closes the connection of `slot`. No event follows, and the slot can be opened again at once.
    pub fn close(&mut self, slot: u32) -> io::Result<()> {
        self.idle(slot);
        self.make_space()?;
        let entry = opcode::Close::new(Fixed(slot)).build();
        self.push(entry.flags(squeue::Flags::SKIP_SUCCESS).user_data(user_data(slot, Step::Close)));
        Ok(())
    }

    /// Cancels the operation of `slot`: the event of the step in progress follows, with ECANCELED. Between two steps of
    /// a chain no operation is in progress; if no event follows, call this again.
    pub fn cancel(&mut self, slot: u32) -> io::Result<()> {
        self.make_space()?;
        let entry = opcode::AsyncCancel2::new(CancelBuilder::fd(Fixed(slot)).all()).build();
        self.push(entry.flags(squeue::Flags::SKIP_SUCCESS).user_data(user_data(slot, Step::Cancel)));
        Ok(())
    }

    /// Submits the queued entries and waits until a completion arrives or `timeout` expires.
    ///
    /// It requests a completion even if `timeout` is zero: otherwise the kernel would not run the work that it deferred
    /// for this thread (IORING_SETUP_DEFER_TASKRUN), and nothing would ever complete.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        self.enters += 1;
        let timeout = Timespec::from(timeout);
        let arguments = SubmitArgs::new().timespec(&timeout);
        without_completion(self.ring.submitter().submit_with_args(1, &arguments))
    }

    pub fn event(&mut self) -> Option<Event> {
        loop {
            let completion = self.ring.completion().next()?;
            let (number, step) = (completion.user_data() >> 8, completion.user_data() as u8);
            let step = Step::ALL[usize::from(step)];
            // The results of close and cancel do not matter: the connection may be closed already.
            if matches!(step, Step::Close | Step::Cancel) {
                continue;
            }
            if let Some(event) = self.settle(number as u32, step, completion.result()) {
                return Some(event);
            }
        }
    }

    /// Records a completion. Returns an event, unless the chain has further completions that must come first.
    fn settle(&mut self, number: u32, step: Step, result: i32) -> Option<Event> {
        let slot = &mut self.slots[number as usize];
        let at = slot.chain.as_slice().iter().position(|waiting| *waiting == step as u8)?;
        // Earlier steps of the chain succeeded without a completion.
        slot.chain.drop_first(at + 1);
        if !step.is_silent() || slot.failed.is_some() {
            self.awaited -= 1;
        }
        if let Some((first, errno)) = slot.failed {
            return slot.chain.as_slice().is_empty().then(|| {
                slot.failed = None;
                Event { slot: number, step: first, result: Err(io::Error::from_raw_os_error(errno)) }
            });
        }
        let is_cut = step == Step::Send && result >= 0;
        // A partial send ends the chain with a completion: the peer has closed the connection in the meantime.
        let result = if is_cut { -libc::ECONNRESET } else { result };
        if result >= 0 {
            return Some(Event { slot: number, step, result: Ok(result as usize) });
        }
        let followers = slot.chain.as_slice().len();
        let loud =
            slot.chain.as_slice().iter().filter(|step| !Step::ALL[usize::from(**step)].is_silent()).count();
        if step.is_silent() || followers == 0 {
            // A failed silent step takes all later steps with it, without completions (REQ_F_SKIP_LINK_CQES).
            self.awaited -= loud;
            slot.chain = Chain::default();
            return Some(Event { slot: number, step, result: Err(io::Error::from_raw_os_error(-result)) });
        }
        // After a failure each later step has a completion, even a step that would have none on success.
        self.awaited += followers - loud;
        slot.failed = Some((step, -result));
        None
    }

    /// Returns the first `count` bytes of the last receive of `slot`.
    ///
    /// # Panics
    ///
    /// Panics if a receive is in progress on the slot.
    pub fn received(&self, slot: u32, count: usize) -> &[u8] {
        let slot = &self.slots[slot as usize];
        assert!(slot.chain.as_slice().is_empty(), "the kernel may be writing there");
        &slot.received[..count]
    }

    /// Returns whether an operation of `slot` is in progress.
    pub fn is_busy(&self, slot: u32) -> bool {
        !self.slots[slot as usize].chain.as_slice().is_empty()
    }

    fn idle(&mut self, slot: u32) -> &mut Slot {
        let slot = &mut self.slots[slot as usize];
        assert!(slot.chain.as_slice().is_empty(), "a slot does one thing after the other");
        slot
    }

    /// Ensures space for the longest chain, because a submission between two entries would cut the chain in two.
    fn make_space(&mut self) -> io::Result<()> {
        let mut queue = self.ring.submission();
        queue.sync();
        if self.entries - queue.len() < MAX_STEPS {
            drop(queue);
            self.submit()?;
        }
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        while !self.ring.submission().is_empty() {
            persist(|| {
                self.enters += 1;
                self.ring.submit()
            })?;
        }
        Ok(())
    }

    fn push(&mut self, entry: squeue::Entry) {
        // SAFETY: every pointer in an entry is to memory of this ring's slots (heap that does not move), to its
        // destinations or to a static. This memory is neither freed nor changed while the slot is busy: `idle` and
        // `received` check this, and `drop` waits.
        unsafe { self.ring.submission().push(&entry) }.expect("there is space for a chain");
    }
}

/// The pause before another io_uring_enter(2), if the kernel had no memory for a request (EAGAIN) or for a completion (EBUSY, before
/// Linux 5.19).
const PAUSE: Duration = Duration::from_millis(1);

/// Whether the error of io_uring_enter(2) may be gone a moment later.
fn is_short_of_memory(error: &io::Error) -> bool {
    matches!(Errno::of(error), Some(Errno::EAGAIN | Errno::EBUSY | Errno::ENOMEM))
}

/// Repeats a call of io_uring_enter(2) that submits, for up to a second, while the kernel is short of memory.
pub(crate) fn persist(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<()> {
    let begun = Instant::now();
    loop {
        match call() {
            Err(error) if Errno::of(&error) == Some(Errno::EINTR) => {}
            Err(error) if is_short_of_memory(&error) && begun.elapsed() < Duration::from_secs(1) => {
                thread::sleep(PAUSE);
            }
            result => return result.map(drop),
        }
    }
}

/// Returns the result of a call of io_uring_enter(2) that waits: that no completion came is not an error. The caller looks for completions
/// and waits again.
pub(crate) fn without_completion(result: io::Result<usize>) -> io::Result<()> {
    match result {
        Err(error) if is_short_of_memory(&error) => {
            thread::sleep(PAUSE);
            Ok(())
        }
        Err(error) if matches!(Errno::of(&error), Some(Errno::ETIME | Errno::EINTR)) => Ok(()),
        result => result.map(drop),
    }
}

fn user_data(slot: u32, step: Step) -> u64 {
    u64::from(slot) << 8 | step as u64
}

fn out_of_range() -> io::Error {
    io::Error::from(Errno::EINVAL)
}

impl Drop for Ring {
    fn drop(&mut self) {
        let begun = Instant::now();
        // A cancel takes effect asynchronously, and the kernel may write until the cancelled operation completes. The
        // next step of a chain starts when the step before it completes, so one cancel is not enough.
        while self.submit().is_ok() && self.awaited > 0 && begun.elapsed() < Duration::from_secs(1) {
            let _ = self.ring.submitter().register_sync_cancel(None, CancelBuilder::any());
            if self.wait(Duration::from_millis(1)).is_err() {
                break;
            }
            while self.event().is_some() {}
        }
        if self.awaited > 0 {
            // The kernel may still write to the memory, so it is leaked.
            mem::forget(mem::take(&mut self.slots));
        }
        // Unregisters the files to close the sockets at once, not later in a kernel worker.
        let _ = self.ring.submitter().unregister_files();
    }
}

/// Up to [`MAX_STEPS`] steps, oldest first.
#[derive(Clone, Copy, Default)]
struct Chain {
    steps: [u8; MAX_STEPS],
    length: u8,
}

impl Chain {
    fn push(&mut self, step: Step) {
        self.steps[usize::from(self.length)] = step as u8;
        self.length += 1;
    }

    fn as_slice(&self) -> &[u8] {
        &self.steps[..usize::from(self.length)]
    }

    /// Removes the oldest `count` steps.
    fn drop_first(&mut self, count: usize) {
        let length = usize::from(self.length);
        self.steps.copy_within(count..length, 0);
        self.length -= count as u8;
    }
}

/// A chain under construction.
struct Builder<'a> {
    ring: &'a mut Ring,
    slot: u32,
    chain: Chain,
    last: Option<(Step, squeue::Entry)>,
}

impl<'a> Builder<'a> {
    fn new(ring: &'a mut Ring, slot: u32) -> io::Result<Self> {
        ring.make_space()?;
        Ok(Builder { ring, slot, chain: Chain::default(), last: None })
    }

    fn push(&mut self, step: Step, entry: squeue::Entry) {
        if let Some((step, entry)) = self.last.replace((step, entry)) {
            self.flush(step, entry, squeue::Flags::IO_LINK);
        }
    }

    fn flush(&mut self, step: Step, entry: squeue::Entry, link: squeue::Flags) {
        let silent = if step.is_silent() { squeue::Flags::SKIP_SUCCESS } else { squeue::Flags::empty() };
        self.ring.push(entry.flags(link | silent).user_data(user_data(self.slot, step)));
        self.chain.push(step);
        self.ring.awaited += usize::from(!step.is_silent());
    }

    fn option(&mut self, level: libc::c_int, name: libc::c_int, value: *const libc::c_void, length: usize) {
        let (level, name) = (level as u32, name as u32);
        let entry = opcode::SetSockOpt::new(Fixed(self.slot), level, name, value, length as u32).build();
        self.push(Step::Option, entry);
    }

    fn connect(&mut self, destination: usize) {
        let (_, destination) = &self.ring.destinations[destination];
        let entry =
            opcode::Connect::new(Fixed(self.slot), destination.as_ptr(), destination.length()).build();
        self.push(Step::Connect, entry);
    }

    fn send(&mut self, bytes: &[u8]) {
        let outgoing = &mut self.ring.slots[self.slot as usize].outgoing;
        outgoing.clear();
        outgoing.extend_from_slice(bytes);
        let entry = opcode::Send::new(Fixed(self.slot), outgoing.as_ptr(), outgoing.len() as u32)
            .flags(libc::MSG_NOSIGNAL | libc::MSG_WAITALL)
            .build();
        self.push(Step::Send, entry);
    }

    fn receive(&mut self, flags: libc::c_int) {
        let capacity = self.ring.capacity;
        let received = &mut self.ring.slots[self.slot as usize].received;
        if received.is_empty() {
            *received = vec![0; capacity].into();
        }
        let entry = opcode::Recv::new(Fixed(self.slot), received.as_mut_ptr(), received.len() as u32)
            .flags(flags)
            .build();
        self.push(Step::Receive, entry);
    }

    fn submit(mut self) -> io::Result<()> {
        if let Some((step, entry)) = self.last.take() {
            self.flush(step, entry, squeue::Flags::empty());
        }
        self.ring.slots[self.slot as usize].chain = self.chain;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::os::fd::AsFd;

    use super::*;
    use crate::socket::Connect;

    /// Returns a ring to a listener that answers each byte with a byte, or `None` with a message that says why not.
    fn ring(slots: u32) -> Option<(Ring, TcpListener)> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Some((ring_to(listener.local_addr().unwrap(), slots)?, listener))
    }

    fn ring_to(destination: SocketAddr, slots: u32) -> Option<Ring> {
        match Ring::new(Transport::Tcp, &[Endpoint::Inet(destination)], slots, 64) {
            Ok(ring) => Some(ring),
            Err(error) => {
                eprintln!("SKIPPED io_uring: {error}");
                None
            }
        }
    }

    fn event(ring: &mut Ring) -> Event {
        for _ in 0..600 {
            if let Some(event) = ring.event() {
                return event;
            }
            ring.wait(Duration::from_millis(100)).unwrap();
        }
        panic!("no event within a minute")
    }

    fn connecting(address: SocketAddr) -> OwnedFd {
        let socket = crate::socket::open(Transport::Tcp, address, true).unwrap();
        assert_eq!(crate::socket::connect(socket.as_fd(), address).unwrap(), Connect::Pending);
        crate::socket::set_nonblocking(socket.as_fd(), false).unwrap();
        socket
    }

    fn errno(event: &Event) -> Option<i32> {
        event.result.as_ref().err()?.raw_os_error()
    }

    #[test]
    fn a_chain_connects_and_exchanges_repeatedly() {
        let Some((mut ring, listener)) = ring(2) else { return };
        // A thread that is not joined, so that a failure here does not hang the test.
        thread::spawn(move || {
            for (mut stream, _) in std::iter::repeat_with(|| listener.accept().unwrap()) {
                let mut byte = [0];
                while stream.read(&mut byte).is_ok_and(|read| read == 1) {
                    stream.write_all(&[byte[0] + 1]).unwrap();
                }
            }
        });
        {
            for round in 0..3 {
                ring.open(1, &OpenOptions { reset_on_close: round == 2, ..OpenOptions::default() }, b"a")
                    .unwrap();
                let connected = event(&mut ring);
                assert_eq!(
                    (connected.slot, connected.step, connected.result.unwrap()),
                    (1, Step::Connect, 0)
                );
                assert_eq!(event(&mut ring).result.unwrap(), 1);
                assert_eq!(ring.received(1, 1), b"b");
                ring.exchange(1, b"c").unwrap();
                assert_eq!(event(&mut ring).result.unwrap(), 1);
                assert_eq!(ring.received(1, 1), b"d");
                assert!(!ring.is_busy(1));
                ring.close(1).unwrap();
            }
            ring.wait(Duration::ZERO).unwrap();
        }
        assert_eq!(ring.awaited, 0);
    }

    #[test]
    fn a_failed_chain_reports_one_event_after_its_last_completion() {
        // A bound socket that does not listen: no other socket has its port, and the kernel refuses connections.
        let anywhere = "127.0.0.1:0".parse().unwrap();
        let bound = crate::socket::open(Transport::Tcp, anywhere, true).unwrap();
        crate::socket::bind(bound.as_fd(), anywhere).unwrap();
        let Some(mut ring) = ring_to(crate::socket::local_address(bound.as_fd()).unwrap(), 2) else { return };
        let opening = OpenOptions { source: Some("127.0.0.2:0".parse().unwrap()), ..OpenOptions::default() };
        let foreign = OpenOptions { source: Some("192.0.2.1:0".parse().unwrap()), ..OpenOptions::default() };
        // A silent step fails and ends the later steps of its chain without completions.
        ring.open(0, &foreign, b"a").unwrap();
        let failed = event(&mut ring);
        assert_eq!((failed.step, errno(&failed)), (Step::Bind, Some(libc::EADDRNOTAVAIL)));
        assert_eq!((ring.awaited, ring.is_busy(0)), (0, false));
        // A step with an event fails, and all later steps complete too.
        for _ in 0..3 {
            ring.open(0, &opening, b"a").unwrap();
            let refused = event(&mut ring);
            assert_eq!((refused.step, errno(&refused)), (Step::Connect, Some(libc::ECONNREFUSED)));
            assert_eq!((ring.awaited, ring.is_busy(0)), (0, false));
            ring.close(0).unwrap();
        }
        assert!(ring.event().is_none());
    }

    #[test]
    fn waits_can_be_cancelled_and_sockets_adopted() {
        let Some((mut ring, listener)) = ring(1) else { return };
        let address = listener.local_addr().unwrap();
        ring.adopt(0, 0, connecting(address), b"a").unwrap();
        assert_eq!(event(&mut ring).step, Step::Connect);
        let (mut accepted, _) = listener.accept().unwrap();
        accepted.read_exact(&mut [0]).unwrap();
        // Between two steps there is nothing to cancel: the next step begins during the next wait of the ring.
        ring.wait(Duration::ZERO).unwrap();
        ring.cancel(0).unwrap();
        let cancelled = event(&mut ring);
        assert_eq!((cancelled.step, errno(&cancelled)), (Step::Receive, Some(libc::ECANCELED)));
        ring.watch(0).unwrap();
        drop(accepted);
        assert_eq!(event(&mut ring).step, Step::Watch);
        ring.close(0).unwrap();
        ring.adopt(0, 0, connecting("127.0.0.1:1".parse().unwrap()), b"a").unwrap();
        let refused = event(&mut ring);
        assert_eq!((refused.step, errno(&refused)), (Step::Connect, Some(libc::ECONNREFUSED)));
        ring.close(0).unwrap();
        ring.open(0, &OpenOptions::default(), b"a").unwrap();
        // Dropped during a receive that would never complete.
        drop(ring);
        drop(listener);
    }

    /// A seccomp filter does not see the calls of a ring, so that the test gives the results of a chain to the ring itself.
    #[test]
    fn a_chain_fails_with_every_errno() {
        let Some((mut ring, _listener)) = ring(1) else { return };
        let steps = [Step::Open, Step::Option, Step::Bind, Step::Connect, Step::Send, Step::Receive];
        for (at, failing) in steps.into_iter().enumerate() {
            for errno in Errno::ALL {
                let mut chain = Chain::default();
                steps.iter().for_each(|step| chain.push(*step));
                ring.slots[0].chain = chain;
                ring.awaited = 2;
                if at > 3 {
                    let connected = ring.settle(0, Step::Connect, 0).unwrap();
                    assert_eq!((connected.step, connected.result.unwrap()), (Step::Connect, 0));
                }
                let mut found = ring.settle(0, failing, -errno.number());
                // After a failed loud step each later step completes with ECANCELED.
                for later in &steps[at + 1..] {
                    if found.is_none() {
                        found = ring.settle(0, *later, -libc::ECANCELED);
                    }
                }
                let found = found.unwrap();
                assert_eq!((found.step, super::tests::errno(&found)), (failing, Some(errno.number())));
                assert!(!ring.is_busy(0) && ring.awaited == 0, "{failing:?} {errno}");
            }
        }
    }
}
