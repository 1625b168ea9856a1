//! HTTP/2: a slot of the driver is a stream, and up to `--streams` slots share a connection. The crate h2 speaks the protocol.
//!
//! There is no task and no runtime: h2 is polled. A readable socket, or a waker that h2 calls, puts a connection or a stream on a
//! list of [`Woken`], and each turn polls what is on the lists. Where connections have several streams, a turn receives on one
//! or a few, whose streams then are in the cache until their next requests are sent, by one system call, when the next turn begins.

mod wire;

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fourtuple::dial::ConnectRequest;
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::option;
use fourtuple_syscalls::socket::{Connect, Transport};
use fourtuple_syscalls::{Endpoint, Errno};
use h2::client::{self, ResponseFuture, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use http::header::LOCATION;
use http::{Request, Response};

use self::wire::{Signals, Traffic, Wire, Woken, add};

use crate::load::engine::{Engine, Event, Options, Stage, StreamEvent, epoll};
use crate::load::settings::Load;
use crate::load::tally::Streams;
use crate::load::workload::{Failure, HttpRequest, ParseOutcome, Status, TlsSetup};

/// Maximum number of events of one epoll_wait().
const BATCH: usize = 64;

/// Number of streams with something new after which a turn handles no other connection: their next requests come first. Not with one stream
/// per connection, where a turn costs more than it saves. [`Traffic::enough`] ends the receives of a single connection.
const NEWS_PER_TURN: usize = 8;

/// The window of each stream and of each connection, in bytes, as h2load has it: the server never waits for this client.
const WINDOW: u32 = (1 << 30) - 1;

/// Maximum number of requests on a connection: the numbers of its streams are odd and below 2^31 (RFC 9113, 5.1.1).
const MAX_REQUESTS: u64 = 1 << 30;

/// What all connections of a run share.
pub(crate) struct Setup {
    /// The requests with their bodies.
    requests: Vec<(Request<()>, Bytes)>,
    tls: Option<TlsSetup>,
    /// Maximum number of concurrent streams of a connection.
    streams: u32,
    /// Number of requests after which a connection is closed.
    close_every: u64,
}

impl Setup {
    /// Returns the setup of a load with HTTP/2.
    pub(crate) fn new(load: &Load, tls: Option<TlsSetup>) -> Result<Setup, String> {
        let with_tls = tls.is_some();
        let encode =
            |request: &HttpRequest| Ok((request.for_http2(with_tls)?, Bytes::copy_from_slice(&request.body)));
        Ok(Setup {
            requests: load.http_requests().iter().map(encode).collect::<Result<_, String>>()?,
            tls,
            streams: load.streams.unwrap_or(1).max(1),
            close_every: match load.close_every {
                0 => MAX_REQUESTS,
                every => every.min(MAX_REQUESTS),
            },
        })
    }
}

impl Setup {
    fn longest_body(&self) -> usize {
        self.requests.iter().map(|(_, body)| body.len()).max().unwrap_or(0)
    }
}

pub(crate) struct Http2Engine {
    epoll: Epoll,
    /// Events that were reported, those from `next` on not handled yet.
    ready: Vec<Ready>,
    next: usize,
    reported: usize,
    destinations: Vec<Endpoint>,
    options: Options,
    setup: Setup,
    connections: Vec<Option<Connection>>,
    /// Numbers of `connections` that are `None`.
    unused: Vec<u32>,
    /// Connections that had a free stream when they came onto the list.
    with_free_streams: Vec<u32>,
    /// Number of connections whose limit of streams is not known yet.
    opening: u32,
    slots: Vec<Slot>,
    /// Slots that wait for a stream. A slot may have left, and then its state is another.
    waiting: VecDeque<u32>,
    /// Number of slots in the state [`State::Waiting`].
    waiters: u64,
    woken_connections: Woken,
    woken_slots: Woken,
    /// Empty: the list of a turn, without an allocation for each.
    woken: Vec<u32>,
    events: VecDeque<Event>,
    traffic: Rc<Traffic>,
    counts: Streams,
    /// Number of calls of `wait`.
    turn: u64,
    /// Number of connections that were opened.
    generation: u32,
}

#[derive(Default)]
struct Slot {
    state: State,
    /// The number of its request.
    request: usize,
    /// The connection that it opened last.
    opened: u32,
}

#[derive(Default)]
enum State {
    #[default]
    Idle,
    /// Its connection is being opened, and then takes its request.
    Opening(u32),
    Waiting,
    Streaming(Stream),
}

struct Connection {
    stage: Progress,
    to: usize,
    local: Option<SocketAddr>,
    signals: Rc<Signals>,
    /// Tells it from former connections of its number.
    generation: u32,
    /// Number of requests so far.
    requests: u64,
    /// Number of streams in progress.
    active: u32,
    /// Maximum number of streams: of the setup and of the server.
    limit: u32,
    /// Whether the SETTINGS of the server have come: its limit is known.
    is_settled: bool,
    /// Whether it is on the list `with_free_streams`.
    is_listed: bool,
    /// Whether requests were given to h2 since it was polled.
    has_unsent: bool,
}

enum Progress {
    Connecting {
        wire: Wire,
        opener: u32,
        search_ns: u64,
    },
    Tls {
        wire: Wire,
        opener: u32,
    },
    /// Without `sender` it takes no request any more, and ends with its last stream.
    Open {
        connection: Box<client::Connection<Wire, Bytes>>,
        sender: Option<SendRequest<Bytes>>,
    },
    /// Failed; its opener has an event and closes it.
    Dead,
}

struct Stream {
    connection: u32,
    signals: Rc<Signals>,
    upload: Option<Upload>,
    response: Incoming,
}

struct Upload {
    stream: SendStream<Bytes>,
    left: Bytes,
    since: Instant,
    /// The turn in which it began.
    turn: u64,
    /// A window did not suffice for the rest of the body.
    is_short: bool,
}

enum Incoming {
    Head(ResponseFuture),
    Body(RecvStream, Status),
    Trailers(RecvStream, Status),
    Done,
}

impl Connection {
    fn has_free_stream(&self) -> bool {
        matches!(self.stage, Progress::Open { sender: Some(_), .. }) && self.active < self.limit
    }
}

impl Http2Engine {
    pub(crate) fn new(
        destinations: &[Endpoint],
        connections: u32,
        options: Options,
        setup: Setup,
    ) -> io::Result<Self> {
        let slots = connections * setup.streams;
        // Several connections are served at different times anyway.
        let enough = if connections == 1 { (slots as usize / 4).max(1) } else { usize::MAX };
        Ok(Http2Engine {
            epoll: Epoll::new()?,
            ready: vec![Ready::NONE; BATCH],
            next: 0,
            reported: 0,
            destinations: destinations.to_vec(),
            options,
            setup,
            connections: (0..connections).map(|_| None).collect(),
            unused: (0..connections).rev().collect(),
            with_free_streams: Vec::new(),
            opening: 0,
            slots: (0..slots).map(|_| Slot::default()).collect(),
            waiting: VecDeque::new(),
            waiters: 0,
            woken_connections: Woken::new(connections),
            woken_slots: Woken::new(slots),
            woken: Vec::new(),
            events: VecDeque::new(),
            traffic: Rc::new(Traffic { enough, ..Traffic::default() }),
            counts: Streams::default(),
            turn: 0,
            generation: 0,
        })
    }

    fn count_calls(&self, more: u64) {
        add(&self.traffic.calls, more);
    }

    fn emit(&mut self, slot: u32, event: StreamEvent) {
        self.events.push_back(Event::Stream { slot, event });
    }

    fn fail(&mut self, slot: u32, stage: Stage, error: io::Error) {
        self.events.push_back(Event::Failed { slot, stage, error });
    }

    fn connect(&mut self, slot: u32, to: usize, request: ConnectRequest) -> Result<(), (Stage, io::Error)> {
        let failed = |error| (Stage::Connect, error);
        let destination = &self.destinations[to];
        let opened = epoll::open(destination, Transport::Tcp, request, self.options, true)?;
        self.count_calls(opened.calls + 3);
        if destination.inet().is_some() {
            self.count_calls(1);
            // A request must not wait for the ACK of an earlier one.
            option::set_no_delay(opened.socket.as_fd()).map_err(failed)?;
        }
        let number = *self.unused.last().ok_or_else(|| failed(Errno::EMFILE.into()))?;
        let interest = Interest::READ.and(Interest::WRITE).and(Interest::EDGE);
        self.generation = self.generation.wrapping_add(1);
        let token = u64::from(self.generation) << 32 | u64::from(number);
        self.epoll.add(opened.socket.as_fd(), token, interest).map_err(failed)?;
        let signals = Rc::new(Signals::new(Rc::clone(&self.traffic), self.woken_slots.list().clone()));
        let wire = Wire::new(opened.socket, self.setup.tls.as_ref(), Rc::clone(&signals))
            .map_err(|error| failed(io::Error::other(error)))?;
        self.unused.pop();
        self.connections[number as usize] = Some(Connection {
            stage: Progress::Connecting { wire, opener: slot, search_ns: opened.search_ns },
            to,
            local: None,
            signals,
            generation: self.generation,
            requests: 0,
            active: 0,
            limit: 0,
            is_settled: false,
            is_listed: false,
            has_unsent: false,
        });
        self.opening += 1;
        let opener = &mut self.slots[slot as usize];
        (opener.state, opener.opened) = (State::Opening(number), number);
        if opened.connect == Connect::Done {
            self.advance(number);
        }
        Ok(())
    }

    /// Continues a connection as far as it goes.
    fn advance(&mut self, number: u32) {
        let Some(mut connection) = self.connections[number as usize].take() else { return };
        connection.signals.begin_turn(self.turn);
        let goes_on = self.step(number, &mut connection);
        self.connections[number as usize] = Some(connection);
        if goes_on {
            self.list(number);
            self.dispatch();
            self.call_openers();
        } else {
            self.remove(number);
        }
    }

    /// Returns whether the connection goes on.
    fn step(&mut self, number: u32, connection: &mut Connection) -> bool {
        let waker = self.woken_connections.waker(number).clone();
        let context = &mut Context::from_waker(&waker);
        loop {
            match mem::replace(&mut connection.stage, Progress::Dead) {
                Progress::Dead => return true,
                Progress::Connecting { wire, opener, search_ns } => {
                    self.events.push_back(Event::Connected { slot: opener, search_ns: Some(search_ns) });
                    connection.stage = Progress::Tls { wire, opener };
                }
                Progress::Tls { mut wire, opener } => match wire.handshake(context) {
                    Poll::Pending => {
                        connection.stage = Progress::Tls { wire, opener };
                        return true;
                    }
                    Poll::Ready(result) => {
                        let session = wire.session();
                        let begun = result.ok().and_then(|()| begin(wire, self.setup.longest_body()));
                        let Some((sender, h2)) = begun else {
                            // The opener closes the connection.
                            let failure = connection.signals.failure.take();
                            let outcome = ParseOutcome::Failed(failure.unwrap_or_else(|| "tls".into()));
                            self.emit(opener, StreamEvent::Ended(outcome));
                            return true;
                        };
                        connection.stage = Progress::Open { connection: Box::new(h2), sender: Some(sender) };
                        // Until the SETTINGS of the server have come, nobody knows how many streams it accepts.
                        connection.limit = 1;
                        self.emit(opener, StreamEvent::Ready { session });
                        self.slots[opener as usize].state = State::Waiting;
                        self.waiting.push_front(opener);
                        self.waiters += 1;
                        // h2 wakes a connection only once it was polled, and an edge may have come before.
                        waker.wake_by_ref();
                        return true;
                    }
                },
                Progress::Open { connection: mut h2, sender } => {
                    let mut result = Poll::Pending;
                    // h2 receives before it sends.
                    let sends = mem::take(&mut connection.has_unsent);
                    if sends {
                        connection.signals.sends_only.set(true);
                        result = Pin::new(&mut *h2).poll(context);
                        connection.signals.sends_only.set(false);
                    }
                    if result.is_pending() && (!sends || connection.signals.may_receive()) {
                        result = Pin::new(&mut *h2).poll(context);
                    }
                    let sender = self.look(sender, connection);
                    connection.stage = Progress::Open { connection: h2, sender };
                    return result.is_pending();
                }
            }
        }
    }

    /// Reads the limit of the server, and returns the sender unless the server wants no more requests.
    fn look(
        &mut self,
        sender: Option<SendRequest<Bytes>>,
        connection: &mut Connection,
    ) -> Option<SendRequest<Bytes>> {
        let mut sender = sender?;
        if let Poll::Ready(Err(error)) = sender.poll_ready(&mut Context::from_waker(Waker::noop())) {
            self.counts.goaways += u64::from(error.is_go_away() && error.is_remote());
            return None;
        }
        let limit = sender.current_max_send_streams() as u64;
        // 1 is also the limit before the SETTINGS; a response is later than these.
        if limit != 1 || connection.requests > u64::from(connection.active) {
            if !mem::replace(&mut connection.is_settled, true) {
                self.opening -= 1;
            }
            if limit < u64::from(u32::MAX) {
                let least = self.counts.server_limit.map_or(limit, |least| least.min(limit));
                self.counts.server_limit = Some(least);
            }
        }
        connection.limit = limit.min(self.setup.streams.into()) as u32;
        Some(sender)
    }

    /// Puts a connection on the list of those with free streams.
    fn list(&mut self, number: u32) {
        if let Some(connection) = &mut self.connections[number as usize]
            && !connection.is_listed
            && connection.has_free_stream()
        {
            connection.is_listed = true;
            self.with_free_streams.push(number);
        }
    }

    /// Gives streams to the slots that wait for one.
    fn dispatch(&mut self) {
        while self.waiters > 0 {
            let Some(number) = self.with_free_streams.last().copied() else { break };
            match &mut self.connections[number as usize] {
                Some(connection) if connection.has_free_stream() => {}
                other => {
                    if let Some(connection) = other {
                        connection.is_listed = false;
                    }
                    self.with_free_streams.pop();
                    continue;
                }
            }
            let Some(slot) = self.waiting.pop_front() else { break };
            if matches!(self.slots[slot as usize].state, State::Waiting) {
                self.waiters -= 1;
                self.send(slot, number);
            }
        }
    }

    /// Sends the request of a slot on a connection with a free stream.
    fn send(&mut self, slot: u32, number: u32) {
        self.slots[slot as usize].state = State::Idle;
        let Some(connection) = &mut self.connections[number as usize] else { return };
        let Progress::Open { sender, .. } = &mut connection.stage else { return };
        let Some(ready) = sender else { return };
        let (head, body) = &self.setup.requests[self.slots[slot as usize].request];
        let sent = ready.send_request(head.clone(), body.is_empty());
        let (response, stream) = match sent {
            Ok(sent) => sent,
            Err(error) => {
                // The connection has ended since it was polled.
                *sender = None;
                let event = match ended(&error, &connection.signals, &mut self.counts) {
                    // It was not even sent.
                    StreamEvent::Unprocessed => StreamEvent::Again,
                    event => event,
                };
                return self.emit(slot, event);
            }
        };
        connection.requests += 1;
        connection.active += 1;
        connection.has_unsent = true;
        self.counts.most = self.counts.most.max(connection.active.into());
        if connection.requests == self.setup.close_every {
            *sender = None;
        }
        let request = connection.requests;
        let upload = (!body.is_empty()).then(|| Upload::begin(stream, body.clone(), self.turn));
        let signals = Rc::clone(&connection.signals);
        self.slots[slot as usize].state = State::Streaming(Stream {
            connection: number,
            signals,
            upload,
            response: Incoming::Head(response),
        });
        self.emit(slot, StreamEvent::Sent { request });
        // The first poll tells h2 whom to wake.
        self.receive(slot);
    }

    /// Continues the request and the response of a slot.
    fn receive(&mut self, slot: u32) {
        let State::Streaming(stream) = &mut self.slots[slot as usize].state else { return };
        let context = &mut Context::from_waker(self.woken_slots.waker(slot));
        let event = match stream.poll(context, &mut self.counts, self.turn) {
            Poll::Pending => return,
            Poll::Ready(event) => event,
        };
        if !matches!(event, StreamEvent::Answer) {
            self.leave(slot);
        }
        self.emit(slot, event);
    }

    /// Ends what a slot does. A stream that is not complete is cancelled.
    fn leave(&mut self, slot: u32) {
        match mem::take(&mut self.slots[slot as usize].state) {
            State::Idle => {}
            State::Opening(number) => self.remove(number),
            State::Waiting => self.waiters -= 1,
            State::Streaming(mut stream) => {
                if let Some(upload) = stream.upload.take() {
                    upload.end(&mut self.counts, self.turn);
                }
                let number = stream.connection;
                // The connection may have been replaced by another.
                if let Some(connection) = &mut self.connections[number as usize]
                    && Rc::ptr_eq(&connection.signals, &stream.signals)
                {
                    connection.active -= 1;
                    self.list(number);
                }
                drop(stream);
                self.dispatch();
            }
        }
    }

    /// Closes a connection, and asks for another if slots wait.
    fn remove(&mut self, number: u32) {
        let Some(connection) = self.connections[number as usize].take() else { return };
        if !connection.is_settled {
            self.opening -= 1;
        }
        self.count_calls(1);
        let has_port = self.options.reset_on_close || connection.signals.ended.get();
        if let Some(local) = connection.local.filter(|_| has_port) {
            self.events.push_back(Event::Free { to: connection.to, local });
        }
        drop(connection);
        self.unused.push(number);
        self.dispatch();
        self.call_openers();
    }

    /// Lets slots that wait open connections, if the connections that are being opened do not suffice for all of them.
    fn call_openers(&mut self) {
        let mut coming = u64::from(self.opening);
        for _ in 0..self.unused.len() {
            if self.waiters <= coming * u64::from(self.setup.streams) {
                break;
            }
            let Some(slot) = self.waiting.pop_front() else { break };
            if matches!(self.slots[slot as usize].state, State::Waiting) {
                self.waiters -= 1;
                self.slots[slot as usize].state = State::Idle;
                coming += 1;
                self.emit(slot, StreamEvent::Again);
            }
        }
    }

    /// Polls what was woken. Streams that are continued wake their connection: it sends the windows, and ends.
    fn work(&mut self) {
        let mut woken = mem::take(&mut self.woken);
        for _ in 0..2 {
            self.woken_connections.take(&mut woken);
            for number in woken.drain(..) {
                // The waker of a former connection of this number says nothing about connect().
                let connection = self.connections[number as usize].as_ref();
                if connection.is_some_and(|it| !matches!(it.stage, Progress::Connecting { .. })) {
                    self.advance(number);
                }
            }
            self.woken_slots.take(&mut woken);
            woken.drain(..).for_each(|slot| self.receive(slot));
        }
        self.woken = woken;
    }

    fn handle(&mut self, ready: Ready) {
        let (number, generation) = (ready.token() as u32, (ready.token() >> 32) as u32);
        let Some(connection) = &mut self.connections[number as usize] else { return };
        if connection.generation != generation {
            return;
        }
        connection.signals.ready(ready.readable(), ready.ended());
        if let Progress::Connecting { wire, opener, .. } = &connection.stage {
            if ready.failed() {
                add(&self.traffic.calls, 1);
                if let Ok(Some(error)) | Err(error) = option::take_error(wire.socket().as_fd()) {
                    let opener = *opener;
                    connection.stage = Progress::Dead;
                    return self.fail(opener, Stage::Connect, error);
                }
            } else if !ready.writable() {
                return;
            }
        }
        self.advance(number);
    }
}

/// Begins HTTP/2 on a connection. The preface and the SETTINGS are only buffered, so that this needs no wait.
fn begin(wire: Wire, body: usize) -> Option<(SendRequest<Bytes>, client::Connection<Wire, Bytes>)> {
    /// Size of the buffer of h2 for the body of a stream.
    const BUFFER: usize = 400 * 1024;
    let mut builder = client::Builder::new();
    builder
        .enable_push(false)
        .initial_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .initial_max_send_streams(1)
        // A whole body: a wait is then a wait for a window.
        .max_send_buffer_size(body.max(BUFFER));
    let mut handshake = Box::pin(builder.handshake::<_, Bytes>(wire));
    match handshake.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(begun)) => Some(begun),
        _ => None,
    }
}

/// Returns how an operation ends by an error of h2.
fn ended(error: &h2::Error, signals: &Signals, counts: &mut Streams) -> StreamEvent {
    let failed = |failure: Failure| StreamEvent::Ended(ParseOutcome::Failed(failure));
    if error.is_go_away() && error.is_remote() {
        return StreamEvent::Unprocessed;
    }
    match error.reason() {
        Some(reason) if error.is_reset() && error.is_remote() => {
            counts.refused += u64::from(reason == Reason::REFUSED_STREAM);
            failed(format!("{reason:?}").into())
        }
        _ if error.is_library() => failed(signals.not_http2(error.to_string())),
        // The wire knows the errno. Another stream of the connection needs it too.
        _ => {
            let name = signals.failure.borrow().as_ref().map(|failure| failure.name.clone());
            failed(name.unwrap_or("closed-early".into()).into())
        }
    }
}

impl Upload {
    fn begin(mut stream: SendStream<Bytes>, left: Bytes, turn: u64) -> Upload {
        stream.reserve_capacity(left.len());
        Upload { stream, left, since: Instant::now(), turn, is_short: false }
    }

    /// Counts the wait for a window, if there was one. The next turn after the request sends all that the windows permit.
    fn end(&self, counts: &mut Streams, turn: u64) {
        if self.is_short || !self.left.is_empty() || turn > self.turn + 1 {
            counts.window_waits += 1;
            counts.window_wait_ns += self.since.elapsed().as_nanos() as u64;
        }
    }

    /// Sends what the windows permit. Returns whether the body is complete, or not wanted any more: the response says why.
    fn poll(&mut self, context: &mut Context<'_>) -> bool {
        while !self.left.is_empty() {
            let Poll::Ready(capacity) = self.stream.poll_capacity(context) else { return false };
            let Some(Ok(capacity)) = capacity else { break };
            let part = self.left.split_to(capacity.min(self.left.len()));
            self.is_short |= !self.left.is_empty();
            if self.stream.send_data(part, self.left.is_empty()).is_err() {
                break;
            }
        }
        true
    }
}

impl Stream {
    /// Continues the stream until it ends, or has received a part of the response.
    fn poll(&mut self, context: &mut Context<'_>, counts: &mut Streams, turn: u64) -> Poll<StreamEvent> {
        if let Some(mut upload) = self.upload.take() {
            match upload.poll(context) {
                true => upload.end(counts, turn),
                false => self.upload = Some(upload),
            }
        }
        let mut received = false;
        let result = loop {
            match &mut self.response {
                Incoming::Head(future) => match Pin::new(future).poll(context) {
                    Poll::Pending => break None,
                    Poll::Ready(Err(error)) => break Some(Err(error)),
                    Poll::Ready(Ok(response)) => {
                        received = true;
                        let status = status(&response);
                        let body = response.into_body();
                        if body.is_end_stream() {
                            break Some(Ok(status));
                        }
                        self.response = Incoming::Body(body, status);
                    }
                },
                Incoming::Body(body, status) => match body.poll_data(context) {
                    Poll::Pending => break None,
                    Poll::Ready(Some(Err(error))) => break Some(Err(error)),
                    Poll::Ready(Some(Ok(data))) => {
                        received = true;
                        // h2 releases what is left of a stream that ends.
                        if body.is_end_stream() {
                            break Some(Ok(mem::take(status)));
                        }
                        // It fails only if more is released than was received.
                        let _ = body.flow_control().release_capacity(data.len());
                    }
                    Poll::Ready(None) => {
                        let Incoming::Body(body, status) = mem::replace(&mut self.response, Incoming::Done)
                        else {
                            break None;
                        };
                        self.response = Incoming::Trailers(body, status);
                    }
                },
                Incoming::Trailers(body, status) => match body.poll_trailers(context) {
                    Poll::Pending => break None,
                    Poll::Ready(Err(error)) => break Some(Err(error)),
                    Poll::Ready(Ok(_)) => break Some(Ok(mem::take(status))),
                },
                Incoming::Done => break None,
            }
        };
        match result {
            None if received => Poll::Ready(StreamEvent::Answer),
            None => Poll::Pending,
            Some(Ok(status)) => Poll::Ready(StreamEvent::Ended(ParseOutcome::Complete {
                closing: false,
                status: Some(status),
            })),
            Some(Err(error)) => Poll::Ready(ended(&error, &self.signals, counts)),
        }
    }
}

fn status(response: &Response<RecvStream>) -> Status {
    let code = response.status().as_u16();
    let location = response.headers().get(LOCATION).filter(|_| (300..400).contains(&code));
    Status { code, location: location.map(|value| value.as_bytes().escape_ascii().to_string()) }
}

impl Engine for Http2Engine {
    const SHARES_CONNECTIONS: bool = true;

    fn open(&mut self, slot: u32, to: usize, request: ConnectRequest, _bytes: &[u8]) -> io::Result<()> {
        if let Err((stage, error)) = self.connect(slot, to, request) {
            self.fail(slot, stage, error);
            self.call_openers();
        }
        Ok(())
    }

    fn join(&mut self, slot: u32, request: usize) -> bool {
        self.slots[slot as usize].state = State::Waiting;
        self.slots[slot as usize].request = request;
        self.waiting.push_back(slot);
        self.waiters += 1;
        self.dispatch();
        let expected = u64::from(self.opening) * u64::from(self.setup.streams);
        let is_waiting = matches!(self.slots[slot as usize].state, State::Waiting);
        if is_waiting && self.waiters > expected && !self.unused.is_empty() {
            self.waiting.pop_back();
            self.leave(slot);
            return false;
        }
        true
    }

    fn lend(&mut self, slot: u32, local: SocketAddr) {
        if let Some(connection) = &mut self.connections[self.slots[slot as usize].opened as usize] {
            connection.local = Some(local);
        }
    }

    fn withdraw(&mut self) -> Vec<u32> {
        let mut withdrawn = Vec::new();
        for slot in mem::take(&mut self.waiting) {
            if matches!(self.slots[slot as usize].state, State::Waiting) {
                self.leave(slot);
                withdrawn.push(slot);
            }
        }
        withdrawn
    }

    fn exchange(&mut self, _slot: u32, _bytes: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn probe(&mut self, _slot: u32) -> io::Result<()> {
        Ok(())
    }

    fn watch(&mut self, _slot: u32) -> io::Result<()> {
        Ok(())
    }

    fn close(&mut self, slot: u32) -> io::Result<()> {
        self.leave(slot);
        Ok(())
    }

    fn cancel(&mut self, slot: u32) -> io::Result<()> {
        let stage = match self.slots[slot as usize].state {
            State::Idle => return Ok(()),
            State::Opening(_) => Stage::Connect,
            State::Waiting | State::Streaming(_) => Stage::Exchange,
        };
        self.leave(slot);
        self.fail(slot, stage, Errno::ECANCELED.into());
        Ok(())
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        self.turn += 1;
        self.work();
        if self.next == self.reported {
            let is_idle =
                self.events.is_empty() && self.woken_connections.is_empty() && self.woken_slots.is_empty();
            self.count_calls(1);
            let timeout = if is_idle { timeout } else { Duration::ZERO };
            self.reported = self.epoll.wait_precisely(&mut self.ready, timeout)?.len();
            self.next = 0;
        }
        let most = if self.setup.streams == 1 { BATCH } else { NEWS_PER_TURN };
        while self.next < self.reported {
            self.next += 1;
            self.handle(self.ready[self.next - 1]);
            if self.woken_slots.list().len() >= most {
                break;
            }
        }
        self.work();
        Ok(())
    }

    fn event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn received(&self, _slot: u32, _count: usize) -> &[u8] {
        &[]
    }

    fn system_calls(&self) -> u64 {
        self.traffic.calls.get()
    }

    fn streams(&self) -> Option<Streams> {
        let (sent_bytes, received_bytes) = (self.traffic.sent_bytes.get(), self.traffic.received_bytes.get());
        Some(Streams { sent_bytes, received_bytes, ..self.counts })
    }
}

impl Drop for Http2Engine {
    /// Ends the connections with GOAWAY, as far as that needs no wait.
    fn drop(&mut self) {
        for slot in &mut self.slots {
            slot.state = State::Idle;
        }
        for connection in self.connections.iter_mut().flatten() {
            if let Progress::Open { connection, sender } = &mut connection.stage {
                *sender = None;
                let _ = Pin::new(&mut **connection).poll(&mut Context::from_waker(Waker::noop()));
            }
        }
    }
}
