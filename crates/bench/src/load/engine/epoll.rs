use std::collections::VecDeque;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use fourtuple::dial::ConnectRequest;
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Connect, Transport};
use fourtuple_syscalls::{Endpoint, Errno};

use crate::load::engine::{Engine, Event, Options, Stage};

/// Size of the receive buffer of a connection, in bytes.
const BUFFER: usize = 16 * 1024;

/// Maximum number of events of one epoll_wait().
const BATCH: usize = 64;

/// An engine on non-blocking sockets and epoll(7). It works on every kernel and measures each connect().
pub(crate) struct EpollEngine {
    epoll: Epoll,
    ready: Vec<Ready>,
    transport: Transport,
    destinations: Vec<Endpoint>,
    options: Options,
    slots: Vec<Slot>,
    events: VecDeque<Event>,
    calls: u64,
}

#[derive(Default)]
struct Slot {
    socket: Option<OwnedFd>,
    state: State,
    search_ns: u64,
    /// An edge reported data, and no recv() followed yet: a response may arrive while the request is being sent.
    edge: bool,
    /// An edge reported the FIN of the peer. No further edge follows, even if the FIN came together with the last response.
    ended: bool,
    /// The request.
    outgoing: Vec<u8>,
    /// Number of bytes of the request that were sent.
    sent: usize,
    received: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Idle,
    Connecting {
        sends_something: bool,
    },
    Sending,
    Receiving,
    Watching,
}

impl Slot {
    fn say(&mut self, bytes: &[u8]) {
        self.outgoing.clear();
        self.outgoing.extend_from_slice(bytes);
        self.sent = 0;
    }
}

impl EpollEngine {
    pub(crate) fn new(
        transport: Transport,
        destinations: &[Endpoint],
        slots: u32,
        options: Options,
    ) -> io::Result<Self> {
        Ok(EpollEngine {
            epoll: Epoll::new()?,
            ready: vec![Ready::NONE; BATCH],
            transport,
            destinations: destinations.to_vec(),
            options,
            slots: (0..slots).map(|_| Slot::default()).collect(),
            events: VecDeque::new(),
            calls: 0,
        })
    }

    fn connect(
        &mut self,
        slot: u32,
        to: usize,
        request: ConnectRequest,
        bytes: &[u8],
    ) -> Result<(), (Stage, io::Error)> {
        let failed = |error| (Stage::Connect, error);
        self.calls += 3;
        let destination = &self.destinations[to];
        let Opened { socket, connect, search_ns, calls } =
            open(destination, self.transport, request, self.options, !bytes.is_empty())?;
        self.calls += calls;
        // A single registration with EPOLLET: each call is tried first, and an edge reports when to try again.
        let interest = Interest::READ.and(Interest::WRITE).and(Interest::EDGE);
        self.epoll.add(socket.as_fd(), u64::from(slot), interest).map_err(failed)?;
        let connection = &mut self.slots[slot as usize];
        connection.search_ns = search_ns;
        (connection.edge, connection.ended) = (false, false);
        connection.socket = Some(socket);
        connection.say(bytes);
        connection.state = State::Connecting { sends_something: !bytes.is_empty() };
        if connect == Connect::Done {
            self.connected(slot);
        }
        Ok(())
    }

    fn connected(&mut self, slot: u32) {
        let connection = &mut self.slots[slot as usize];
        let State::Connecting { sends_something } = connection.state else { return };
        self.events.push_back(Event::Connected { slot, search_ns: Some(connection.search_ns) });
        if sends_something {
            connection.state = State::Sending;
            self.send(slot);
        } else {
            connection.state = State::Idle;
        }
    }

    /// Calls send() once. If the kernel takes only a part, its buffer is full, and an edge reports when it has space (epoll(7)).
    fn send(&mut self, slot: u32) {
        let connection = &mut self.slots[slot as usize];
        let Some(socket) = &connection.socket else { return };
        self.calls += 1;
        match socket::send(socket.as_fd(), &connection.outgoing[connection.sent..]) {
            Ok(sent) => connection.sent += sent,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return self.fail(slot, Stage::Exchange, error),
        }
        if connection.sent == connection.outgoing.len() {
            connection.state = State::Receiving;
            if connection.edge || connection.ended {
                self.receive(slot);
            }
        }
    }

    /// Calls recv() once. The caller has seen an edge since the last EAGAIN, or does not know whether there was one.
    fn receive(&mut self, slot: u32) {
        let connection = &mut self.slots[slot as usize];
        let Some(socket) = &connection.socket else { return };
        if connection.received.is_empty() {
            connection.received = vec![0; BUFFER];
        }
        connection.edge = false;
        self.calls += 1;
        match socket::receive(socket.as_fd(), &mut connection.received) {
            Ok(count) => {
                connection.state = State::Idle;
                self.events.push_back(Event::Received { slot, count });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => self.fail(slot, Stage::Exchange, error),
        }
    }

    fn fail(&mut self, slot: u32, stage: Stage, error: io::Error) {
        self.slots[slot as usize].state = State::Idle;
        self.events.push_back(Event::Failed { slot, stage, error });
    }

    fn handle(&mut self, ready: Ready) {
        let slot = ready.token() as u32;
        let connection = &mut self.slots[slot as usize];
        connection.edge |= ready.readable();
        connection.ended |= ready.ended();
        match connection.state {
            State::Connecting { .. } if ready.writable() || ready.failed() => {
                if ready.failed() {
                    self.calls += 1;
                    let pending = connection.socket.as_ref().map(|socket| option::take_error(socket.as_fd()));
                    if let Some(Ok(Some(error)) | Err(error)) = pending {
                        return self.fail(slot, Stage::Connect, error);
                    }
                }
                self.connected(slot);
            }
            State::Sending if ready.writable() => self.send(slot),
            // Bytes alone end nothing: a server may speak first.
            State::Watching if ready.ended() => {
                connection.state = State::Idle;
                self.events.push_back(Event::Lost { slot });
                return;
            }
            _ => {}
        }
        let connection = &self.slots[slot as usize];
        if connection.state == State::Receiving && connection.edge {
            self.receive(slot);
        }
    }
}

/// A socket whose connect() was called.
pub(super) struct Opened {
    pub(super) socket: OwnedFd,
    pub(super) connect: Connect,
    /// Duration of connect().
    pub(super) search_ns: u64,
    /// Number of system calls between socket() and connect().
    pub(super) calls: u64,
}

/// Opens a non-blocking socket from its source and connects it. `speaks`: bytes follow at once.
pub(super) fn open(
    destination: &Endpoint,
    transport: Transport,
    request: ConnectRequest,
    options: Options,
    speaks: bool,
) -> Result<Opened, (Stage, io::Error)> {
    let failed = |error| (Stage::Connect, error);
    let mut calls = 0;
    let socket = match (destination, transport) {
        (Endpoint::Inet(address), transport) => socket::open(transport, *address, true),
        (unix @ Endpoint::Unix(_), _) => socket::open_stream(unix, true),
    }
    .map_err(failed)?;
    if destination.inet().is_some() {
        calls += prepare(socket.as_fd(), request, options, speaks)?;
    }
    let begun = Instant::now();
    let connect = socket::connect_endpoint(socket.as_fd(), destination).map_err(failed)?;
    Ok(Opened { socket, connect, search_ns: begun.elapsed().as_nanos() as u64, calls })
}

/// Sets the options of a connection on its socket and binds the socket to its source address. Returns the number of system
/// calls.
pub(super) fn prepare(
    socket: BorrowedFd<'_>,
    request: ConnectRequest,
    options: Options,
    speaks: bool,
) -> Result<u64, (Stage, io::Error)> {
    let failed = |error| (Stage::Connect, error);
    let absent = || failed(io::Error::from(io::ErrorKind::Unsupported));
    let mut calls = 0;
    if options.reset_on_close {
        calls += 1;
        option::set_reset_on_close(socket).map_err(failed)?;
    }
    if options.ack_with_request && speaks {
        calls += 1;
        option::set_ack_with_data(socket).map_err(failed)?;
    }
    if let Some(window) = request.window {
        calls += 1;
        let set = option::set_local_port_range(socket, window.low(), window.high()).map_err(failed)?;
        if set == Answer::Absent {
            return Err(absent());
        }
    }
    if let Some(source) = request.source {
        calls += 2;
        if source.port() != 0 {
            option::set_reuse_address(socket, true).map_err(failed)?;
        } else if option::set_bind_address_no_port(socket).map_err(failed)? == Answer::Absent {
            return Err(absent());
        }
        socket::bind(socket, source).map_err(|error| (Stage::Bind, error))?;
    }
    Ok(calls)
}

impl Engine for EpollEngine {
    fn open(&mut self, slot: u32, to: usize, request: ConnectRequest, bytes: &[u8]) -> io::Result<()> {
        if let Err((stage, error)) = self.connect(slot, to, request, bytes) {
            self.fail(slot, stage, error);
        }
        Ok(())
    }

    fn exchange(&mut self, slot: u32, bytes: &[u8]) -> io::Result<()> {
        let connection = &mut self.slots[slot as usize];
        connection.say(bytes);
        if bytes.is_empty() {
            connection.state = State::Receiving;
            // The edge may have been reported before.
            self.receive(slot);
        } else {
            connection.state = State::Sending;
            self.send(slot);
        }
        Ok(())
    }

    fn probe(&mut self, slot: u32) -> io::Result<()> {
        self.slots[slot as usize].state = State::Receiving;
        self.receive(slot);
        if self.slots[slot as usize].state == State::Receiving {
            self.fail(slot, Stage::Exchange, io::ErrorKind::WouldBlock.into());
        }
        Ok(())
    }

    fn watch(&mut self, slot: u32) -> io::Result<()> {
        let connection = &mut self.slots[slot as usize];
        connection.state = State::Watching;
        let Some(socket) = &connection.socket else { return Ok(()) };
        self.calls += 1;
        // epoll_ctl(EPOLL_CTL_MOD) reports an edge again if its condition still holds.
        self.epoll.modify(socket.as_fd(), u64::from(slot), Interest::READ.and(Interest::EDGE))
    }

    fn close(&mut self, slot: u32) -> io::Result<()> {
        let connection = &mut self.slots[slot as usize];
        connection.state = State::Idle;
        if connection.socket.take().is_some() {
            self.calls += 1;
        }
        Ok(())
    }

    fn cancel(&mut self, slot: u32) -> io::Result<()> {
        if self.slots[slot as usize].state != State::Idle {
            let stage = match self.slots[slot as usize].state {
                State::Connecting { .. } => Stage::Connect,
                _ => Stage::Exchange,
            };
            self.fail(slot, stage, Errno::ECANCELED.into());
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        let timeout = if self.events.is_empty() { timeout } else { Duration::ZERO };
        self.calls += 1;
        let mut ready = mem::take(&mut self.ready);
        let count = self.epoll.wait_precisely(&mut ready, timeout)?.len();
        for event in &ready[..count] {
            self.handle(*event);
        }
        self.ready = ready;
        Ok(())
    }

    fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn received(&self, slot: u32, count: usize) -> &[u8] {
        &self.slots[slot as usize].received[..count]
    }

    fn system_calls(&self) -> u64 {
        self.calls
    }
}
