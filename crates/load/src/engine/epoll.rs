use std::collections::VecDeque;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use fourtuple::dial::Wanted;
use fourtuple_syscalls::Endpoint;
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Connect, Transport};

use super::{Engine, Event, Options, Stage};

/// Bytes that are received at a time.
const ROOM: usize = 16 * 1024;

/// Descriptors that are told of at a time.
const BATCH: usize = 64;

/// Non-blocking sockets and epoll(7): works on every kernel, and times every connect().
pub(crate) struct EpollEngine {
    epoll: Epoll,
    ready: Vec<Ready>,
    transport: Transport,
    destination: Endpoint,
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
    /// What is to be sent still.
    outgoing: Vec<u8>,
    received: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Idle,
    Connecting {
        says_something: bool,
    },
    Sending,
    Receiving,
    Watching,
}

impl EpollEngine {
    pub(crate) fn new(
        transport: Transport,
        destination: &Endpoint,
        slots: u32,
        options: Options,
    ) -> io::Result<Self> {
        Ok(EpollEngine {
            epoll: Epoll::new()?,
            ready: vec![Ready::NONE; BATCH],
            transport,
            destination: destination.clone(),
            options,
            slots: (0..slots).map(|_| Slot::default()).collect(),
            events: VecDeque::new(),
            calls: 0,
        })
    }

    fn connect(&mut self, slot: u32, wanted: Wanted, bytes: &[u8]) -> io::Result<()> {
        self.calls += 3;
        let socket = match (&self.destination, self.transport) {
            (Endpoint::Inet(address), transport) => socket::open(transport, *address, true)?,
            (unix @ Endpoint::Unix(_), _) => socket::open_stream(unix, true)?,
        };
        if self.destination.inet().is_some() {
            self.calls += prepare(socket.as_fd(), wanted, self.options, bytes)?;
        }
        let begun = Instant::now();
        let connect = socket::connect_endpoint(socket.as_fd(), &self.destination)?;
        let search_ns = begun.elapsed().as_nanos() as u64;
        // Once and for all: what happens on the socket is told when it happens, and remembered until then by trying.
        let interest = Interest::READ.and(Interest::WRITE).and(Interest::EDGE);
        self.epoll.add(socket.as_fd(), u64::from(slot), interest)?;
        let place = &mut self.slots[slot as usize];
        place.search_ns = search_ns;
        place.socket = Some(socket);
        place.outgoing.clear();
        place.outgoing.extend_from_slice(bytes);
        place.state = State::Connecting { says_something: !bytes.is_empty() };
        if connect == Connect::Done {
            self.connected(slot);
        }
        Ok(())
    }

    fn connected(&mut self, slot: u32) {
        let place = &mut self.slots[slot as usize];
        let State::Connecting { says_something } = place.state else { return };
        self.events.push_back(Event::Connected { slot, search_ns: Some(place.search_ns) });
        if says_something {
            place.state = State::Sending;
            self.send(slot);
        } else {
            place.state = State::Idle;
        }
    }

    fn send(&mut self, slot: u32) {
        let place = &mut self.slots[slot as usize];
        while !place.outgoing.is_empty() {
            let Some(socket) = &place.socket else { return };
            self.calls += 1;
            match socket::send(socket.as_fd(), &place.outgoing) {
                Ok(sent) => drop(place.outgoing.drain(..sent)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => return self.fail(slot, Stage::Talk, error),
            }
        }
        place.state = State::Receiving;
    }

    /// Receives what is there; whoever was not told that something is need not ask.
    fn receive(&mut self, slot: u32) {
        let place = &mut self.slots[slot as usize];
        let Some(socket) = &place.socket else { return };
        if place.received.is_empty() {
            place.received = vec![0; ROOM];
        }
        self.calls += 1;
        match socket::receive(socket.as_fd(), &mut place.received) {
            Ok(count) => {
                place.state = State::Idle;
                self.events.push_back(Event::Received { slot, count });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => self.fail(slot, Stage::Talk, error),
        }
    }

    fn fail(&mut self, slot: u32, stage: Stage, error: io::Error) {
        self.slots[slot as usize].state = State::Idle;
        self.events.push_back(Event::Failed { slot, stage, error });
    }

    fn handle(&mut self, ready: Ready) {
        let slot = ready.token() as u32;
        let place = &mut self.slots[slot as usize];
        match place.state {
            State::Connecting { .. } if ready.writable() || ready.failed() => {
                if ready.failed() {
                    self.calls += 1;
                    let pending = place.socket.as_ref().map(|socket| option::take_error(socket.as_fd()));
                    if let Some(Ok(Some(error)) | Err(error)) = pending {
                        return self.fail(slot, Stage::Connect, error);
                    }
                }
                self.connected(slot);
            }
            State::Sending if ready.writable() => self.send(slot),
            State::Watching if ready.readable() => {
                place.state = State::Idle;
                self.events.push_back(Event::Lost { slot });
                return;
            }
            _ => {}
        }
        if self.slots[slot as usize].state == State::Receiving && ready.readable() {
            self.receive(slot);
        }
    }
}

/// Sets what a dial wants on its socket, and says how many system calls that took.
pub(super) fn prepare(
    socket: BorrowedFd<'_>,
    wanted: Wanted,
    options: Options,
    bytes: &[u8],
) -> io::Result<u64> {
    let absent = || io::Error::from(io::ErrorKind::Unsupported);
    let mut calls = 0;
    if options.reset_on_close {
        calls += 1;
        option::set_reset_on_close(socket)?;
    }
    if options.ack_with_request && !bytes.is_empty() {
        calls += 1;
        option::set_ack_with_data(socket)?;
    }
    if let Some(window) = wanted.window {
        calls += 1;
        if option::set_local_port_range(socket, window.low(), window.high())? == Answer::Absent {
            return Err(absent());
        }
    }
    if let Some(source) = wanted.source {
        calls += 2;
        if source.port() != 0 {
            option::set_reuse_address(socket, true)?;
        } else if option::set_bind_address_no_port(socket)? == Answer::Absent {
            return Err(absent());
        }
        socket::bind(socket, source)?;
    }
    Ok(calls)
}

impl Engine for EpollEngine {
    fn open(&mut self, slot: u32, wanted: Wanted, bytes: &[u8]) -> io::Result<()> {
        if let Err(error) = self.connect(slot, wanted, bytes) {
            self.fail(slot, Stage::Connect, error);
        }
        Ok(())
    }

    fn exchange(&mut self, slot: u32, bytes: &[u8]) -> io::Result<()> {
        let place = &mut self.slots[slot as usize];
        place.outgoing.clear();
        place.outgoing.extend_from_slice(bytes);
        if bytes.is_empty() {
            place.state = State::Receiving;
            // The edge may be past.
            self.receive(slot);
        } else {
            place.state = State::Sending;
            self.send(slot);
        }
        Ok(())
    }

    fn watch(&mut self, slot: u32) -> io::Result<()> {
        let place = &mut self.slots[slot as usize];
        place.state = State::Watching;
        let Some(socket) = &place.socket else { return Ok(()) };
        self.calls += 1;
        // Setting the same again tells of an edge that is past.
        self.epoll.modify(socket.as_fd(), u64::from(slot), Interest::READ.and(Interest::EDGE))
    }

    fn close(&mut self, slot: u32) -> io::Result<()> {
        let place = &mut self.slots[slot as usize];
        place.state = State::Idle;
        if place.socket.take().is_some() {
            self.calls += 1;
        }
        Ok(())
    }

    fn cancel(&mut self, slot: u32) -> io::Result<()> {
        if self.slots[slot as usize].state != State::Idle {
            let stage = match self.slots[slot as usize].state {
                State::Connecting { .. } => Stage::Connect,
                _ => Stage::Talk,
            };
            self.fail(slot, stage, io::Error::from_raw_os_error(CANCELED));
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        let timeout = if self.events.is_empty() { timeout } else { Duration::ZERO };
        self.calls += 1;
        let mut room = mem::take(&mut self.ready);
        let count = self.epoll.wait(&mut room, Some(timeout))?.len();
        for ready in &room[..count] {
            self.handle(*ready);
        }
        self.ready = room;
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

/// ECANCELED
const CANCELED: i32 = 125;
