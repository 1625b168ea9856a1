//! A worker without an accept policy: one thread with an epoll instance that serves one request at a time.

use std::io;
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::{self, Epoll, Interest, Ready};
use fourtuple_syscalls::socket::{self, AcceptFailure};
use fourtuple_syscalls::{Errno, errno_name, option};

use crate::serve::Close;
use crate::serve::decoder::{Answer, Decoder, Position};
use crate::serve::running::{Counts, Stop};
use crate::serve::service::Work;

const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;

/// Size of the receive buffer, in bytes.
const BUFFER: usize = 64 * 1024;
/// Maximum number of events of one epoll_wait().
const EVENTS: usize = 256;
/// Maximum number of connections accepted in a row from a queue that is not shared, before requests are served.
const ACCEPTS_IN_A_ROW: usize = 64;
/// Maximum number of full buffers read in a row from one connection, before other connections are served.
const READS_IN_A_ROW: usize = 16;
/// Pause in accepting after accept() has failed for want of descriptors or memory.
const BACK_OFF: Duration = Duration::from_millis(10);
/// Maximum number of bytes read and discarded after the last response. Closing with unread data would send a RST, which can
/// make the client lose the response (RFC 9112, 9.6).
const DRAIN: u64 = 1024 * 1024;

/// The listening socket of a worker.
pub(crate) struct Listener {
    pub(crate) socket: Arc<OwnedFd>,
    /// Other workers accept from this socket too.
    pub(crate) shared: bool,
    /// An accepted connection already has bytes to read (TCP_DEFER_ACCEPT).
    pub(crate) deferred: bool,
}

pub(crate) struct Worker {
    epoll: Epoll,
    listener: Listener,
    decoder: Arc<dyn Decoder>,
    close: Close,
    /// A connection without traffic for this long is closed.
    idle: Duration,
    /// When the connections are next compared with the idle limit; `None` for a limit beyond the clock's range.
    next_sweep: Option<Instant>,
    work: Work,
    stop: Stop,
    counts: Arc<Counts>,
    connections: Slab<Connection>,
    buffer: Vec<u8>,
    /// End of a pause in accepting.
    accept_after: Option<Instant>,
}

impl Worker {
    pub(crate) fn new(
        listener: Listener,
        decoder: Arc<dyn Decoder>,
        close: Close,
        idle: Duration,
        work: Work,
        stop: Stop,
        counts: Arc<Counts>,
    ) -> io::Result<Worker> {
        let worker = Worker {
            epoll: Epoll::new()?,
            listener,
            decoder,
            close,
            idle,
            next_sweep: next_sweep(idle),
            work,
            stop,
            counts,
            connections: Slab::new(),
            buffer: vec![0; BUFFER],
            accept_after: None,
        };
        worker.epoll.add(worker.stop.as_fd(), STOP, Interest::READ)?;
        worker.watch_listener()?;
        Ok(worker)
    }

    fn watch_listener(&self) -> io::Result<()> {
        // EPOLLEXCLUSIVE goes with EPOLLIN alone, and not with EPOLLRDHUP.
        let interest =
            if self.listener.shared { Interest::ACCEPT.and(Interest::EXCLUSIVE) } else { Interest::ACCEPT };
        self.epoll.add(self.listener.socket.as_fd(), LISTENER, interest)
    }

    /// Watches the listener after a pause; the pause goes on if epoll refuses.
    fn watch_listener_again(&mut self) -> io::Result<()> {
        match self.watch_listener() {
            Err(error) if epoll::is_watch_refused(&error) => {
                self.counts.error(&format!("epoll_ctl: {}", errno_name(&error)));
                self.accept_after = Some(Instant::now() + BACK_OFF);
                Ok(())
            }
            watched => watched,
        }
    }

    /// Serves until the stop flag is set.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = [Ready::NONE; EVENTS];
        while !self.stop.is_set() {
            let ready = self.epoll.wait(&mut events, self.longest_wait())?;
            for event in ready {
                // A request may take long: after a stop no further request begins.
                if self.stop.is_set() {
                    break;
                }
                self.work.stall();
                match event.token() {
                    LISTENER => self.accept()?,
                    STOP => {}
                    // The token is the number of a connection, which fits into usize.
                    number => self.proceed(number as usize, event)?,
                }
            }
            if self.accept_after.is_some_and(|after| Instant::now() >= after) {
                self.accept_after = None;
                self.watch_listener_again()?;
            }
            self.close_idle();
        }
        Ok(())
    }

    fn longest_wait(&self) -> Option<Duration> {
        let until_sweep = self.next_sweep.map(|at| at.saturating_duration_since(Instant::now()));
        [self.accept_after.map(|_| BACK_OFF), until_sweep].into_iter().flatten().min()
    }

    /// Closes the connections that were idle for longer than the limit, if that is due. It is due four times per limit, so that
    /// a connection is closed between the limit and 1.25 times the limit after its last event.
    fn close_idle(&mut self) {
        let now = Instant::now();
        if self.next_sweep.is_none_or(|at| now < at) {
            return;
        }
        self.next_sweep = next_sweep(self.idle);
        let limit = self.idle;
        let closed = self.connections.remove_if(|connection| {
            // Bytes that wait for a busy worker make a connection not idle; bytes that wait for its client to read do not.
            now.saturating_duration_since(connection.active_at) >= limit
                && (connection.sending.is_some() || !socket::has_something(connection.socket.as_fd()))
        });
        self.counts.errors("idle-closed", closed);
    }

    fn accept(&mut self) -> io::Result<()> {
        // Takes one connection at a time from a shared queue, because connections taken in a row would wait for this worker.
        for _ in 0..if self.listener.shared { 1 } else { ACCEPTS_IN_A_ROW } {
            let socket = match socket::accept_nonblocking(self.listener.socket.as_fd()) {
                Ok(socket) => socket,
                Err(error) => return self.not_accepted(&error),
            };
            self.counts.accepted.add(1);
            let mut connection = Connection::new(socket);
            if self.listener.deferred && self.continue_connection(&mut connection, false) == Next::Close {
                continue;
            }
            self.watch(connection)?;
            if self.stop.is_set() {
                break;
            }
        }
        Ok(())
    }

    fn not_accepted(&mut self, error: &io::Error) -> io::Result<()> {
        match AcceptFailure::of(error) {
            AcceptFailure::Wait => return Ok(()),
            AcceptFailure::Retry => {}
            AcceptFailure::Pause => {
                // The listener stays readable: without the removal epoll_wait() would return at once in a busy loop.
                self.epoll.remove(self.listener.socket.as_fd())?;
                self.accept_after = Some(Instant::now() + BACK_OFF);
            }
            // The thread that stops the worker may have shut the listener down.
            AcceptFailure::Fatal if self.stop.is_set() => return Ok(()),
            AcceptFailure::Fatal => return Err(Errno::of(error).map_or(error.kind().into(), io::Error::from)),
        }
        self.counts.error(&format!("accept: {}", errno_name(error)));
        Ok(())
    }

    /// Registers an accepted connection with epoll.
    fn watch(&mut self, mut connection: Connection) -> io::Result<()> {
        connection.watches_space = connection.sending.is_some();
        let added =
            self.epoll.add(connection.socket.as_fd(), self.connections.next() as u64, interest(&connection));
        match added {
            Ok(()) => drop(self.connections.insert(connection)),
            // Only this connection is closed.
            Err(error) if epoll::is_watch_refused(&error) => {
                self.counts.error(&format!("epoll_ctl: {}", errno_name(&error)));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Handles an event of a connection: it is readable or writable.
    fn proceed(&mut self, number: usize, event: &Ready) -> io::Result<()> {
        // After a connection ended in the same batch, its event finds no connection, or a new one with nothing to read.
        let Some(mut connection) = self.connections.lend(number) else { return Ok(()) };
        if self.continue_connection(&mut connection, event.ended()) == Next::Close {
            self.connections.free(number);
            return Ok(());
        }
        let must_watch_space = connection.sending.is_some() && !connection.watches_space;
        connection.watches_space |= must_watch_space;
        // epoll_ctl(EPOLL_CTL_MOD) reports an edge again if its condition holds already.
        if mem::take(&mut connection.more) || must_watch_space {
            self.epoll.modify(connection.socket.as_fd(), number as u64, interest(&connection))?;
        }
        connection.active_at = Instant::now();
        self.connections.give_back(number, connection);
        Ok(())
    }

    /// Reads, works and responds until there is nothing to read, the send buffer is full, or the connection ends. `ended`: the
    /// client has sent its FIN, and no further event will report it.
    fn continue_connection(&mut self, connection: &mut Connection, mut ended: bool) -> Next {
        if let Some((answer, from)) = connection.sending.take() {
            match self.send(connection, answer, from) {
                SendOutcome::Partly => return Next::Wait,
                SendOutcome::Failed => return Next::Close,
                SendOutcome::Whole if answer.ends() => {
                    if self.end(connection, false) == Next::Close {
                        return Next::Close;
                    }
                }
                SendOutcome::Whole => match self.decode_requests(connection, &[], false) {
                    DecodeOutcome::Needs => {}
                    DecodeOutcome::Full => return Next::Wait,
                    DecodeOutcome::Over => return Next::Close,
                },
            }
            // Events since then were ignored, the FIN included: read until EAGAIN or the end.
            ended = true;
        }
        let mut buffer = mem::take(&mut self.buffer);
        let next = self.read(connection, ended, &mut buffer);
        self.buffer = buffer;
        next
    }

    fn read(&mut self, connection: &mut Connection, ended: bool, buffer: &mut [u8]) -> Next {
        for _ in 0..READS_IN_A_ROW {
            if self.stop.is_set() {
                return Next::Wait;
            }
            let count = match socket::receive(connection.socket.as_fd(), buffer) {
                Ok(0) => {
                    if connection.is_within_a_request() {
                        self.counts.error("request-cut");
                    }
                    return Next::Close;
                }
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Next::Wait,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    self.counts.error(&errno_name(&error).to_string());
                    return Next::Close;
                }
            };
            self.counts.received_bytes.add(count as u64);
            // A short read: another event reports bytes that arrive from now on.
            let drained = count < buffer.len();
            if let Some(left) = connection.draining {
                match left.checked_sub(count as u64) {
                    Some(left) => connection.draining = Some(left),
                    None => return Next::Close,
                }
            } else {
                match self.decode_requests(connection, &buffer[..count], drained) {
                    DecodeOutcome::Needs => {}
                    DecodeOutcome::Full => return Next::Wait,
                    DecodeOutcome::Over => return Next::Close,
                }
            }
            // While draining, the worker reads until EAGAIN: an earlier event may be gone.
            if drained && !ended && connection.draining.is_none() {
                return Next::Wait;
            }
        }
        connection.more = true;
        Next::Wait
    }

    /// Decodes the requests in the kept and the fresh bytes, and answers them. `drained`: no more bytes are waiting.
    fn decode_requests(&mut self, connection: &mut Connection, fresh: &[u8], drained: bool) -> DecodeOutcome {
        let mut joined = mem::take(&mut connection.kept);
        let mut bytes = fresh;
        if !joined.is_empty() {
            joined.extend_from_slice(fresh);
            bytes = &joined;
        }
        while !bytes.is_empty() && !self.stop.is_set() {
            let last = self.close.every().is_some_and(|every| connection.responses + 1 >= every);
            let step = self.decoder.next(&mut connection.position, bytes, last);
            bytes = &bytes[step.used..];
            let Some(answer) = step.answer else { break };
            if let Some(name) = answer.error() {
                self.counts.error(name);
            }
            if answer.is_response() {
                connection.responses += 1;
                // Counted before it is sent: a client that has the response finds the request counted.
                self.counts.requests.add(1);
                self.work.serve();
            }
            match self.send(connection, answer, 0) {
                SendOutcome::Whole if answer.ends() => {
                    // A client whose request is refused may still be sending it.
                    let drained = drained && bytes.is_empty() && answer.is_response();
                    return match self.end(connection, drained) {
                        Next::Close => DecodeOutcome::Over,
                        Next::Wait => DecodeOutcome::Needs,
                    };
                }
                SendOutcome::Whole => {}
                SendOutcome::Partly => {
                    connection.kept = bytes.to_vec();
                    return DecodeOutcome::Full;
                }
                SendOutcome::Failed => return DecodeOutcome::Over,
            }
        }
        if !bytes.is_empty() {
            connection.kept = bytes.to_vec();
        }
        DecodeOutcome::Needs
    }

    fn send(&mut self, connection: &mut Connection, answer: Answer, mut from: usize) -> SendOutcome {
        let bytes = self.decoder.bytes(answer);
        loop {
            match socket::send(connection.socket.as_fd(), &bytes[from..]) {
                Ok(count) => {
                    self.counts.sent_bytes.add(count as u64);
                    from += count;
                    if from == bytes.len() {
                        return SendOutcome::Whole;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    connection.sending = Some((answer, from));
                    return SendOutcome::Partly;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.counts.error(&errno_name(&error).to_string());
                    return SendOutcome::Failed;
                }
            }
        }
    }

    /// Ends a connection after its last response. `drained`: no received bytes are unread.
    fn end(&mut self, connection: &mut Connection, drained: bool) -> Next {
        if let Close::Reset { every } = self.close
            && connection.responses >= every
        {
            if let Err(error) = option::set_reset_on_close(connection.socket.as_fd()) {
                self.counts.error(&errno_name(&error).to_string());
            }
            return Next::Close;
        }
        if drained || socket::shutdown_write(connection.socket.as_fd()).is_err() {
            return Next::Close;
        }
        // close() with unread data would send a RST, which can make the client lose the response.
        connection.draining = Some(DRAIN);
        Next::Wait
    }
}

fn next_sweep(idle: Duration) -> Option<Instant> {
    Instant::now().checked_add((idle / 4).max(Duration::from_millis(1)))
}

/// The outcome of sending a response.
enum SendOutcome {
    Whole,
    /// The send buffer is full; the rest is kept.
    Partly,
    Failed,
}

/// The outcome of decoding received bytes.
enum DecodeOutcome {
    /// All complete requests are answered: more bytes are needed.
    Needs,
    /// The send buffer is full: the worker must not read more.
    Full,
    /// The connection has ended.
    Over,
}

fn interest(connection: &Connection) -> Interest {
    let both = Interest::READ.and(Interest::EDGE);
    if connection.watches_space { both.and(Interest::WRITE) } else { both }
}

pub(crate) struct Connection {
    pub(crate) socket: OwnedFd,
    /// The position in the current request.
    pub(crate) position: Position,
    pub(crate) responses: u64,
    /// A response that did not fit into the send buffer, and the number of its bytes that were sent.
    sending: Option<(Answer, usize)>,
    /// Received bytes that cannot be used yet: an incomplete head, or requests after a response that did not fit. It is
    /// usually empty, so that a connection allocates nothing.
    pub(crate) kept: Vec<u8>,
    /// The last response was sent: further bytes are discarded, at most this many.
    pub(crate) draining: Option<u64>,
    /// The worker stopped reading although more may be there: epoll must report the connection again, after other connections.
    pub(crate) more: bool,
    /// epoll also reports when the socket is writable.
    watches_space: bool,
    /// When the worker last had an event of this connection.
    active_at: Instant,
}

impl Connection {
    pub(crate) fn new(socket: OwnedFd) -> Connection {
        Connection {
            socket,
            position: Position::Between,
            responses: 0,
            sending: None,
            kept: Vec::new(),
            draining: None,
            more: false,
            watches_space: false,
            active_at: Instant::now(),
        }
    }

    /// Returns whether an end of the stream now would truncate a request.
    fn is_within_a_request(&self) -> bool {
        self.draining.is_none() && (self.position != Position::Between || !self.kept.is_empty())
    }
}

/// The next action on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Wait for the next epoll event.
    Wait,
    Close,
}

/// A vector of slots that are reused.
pub(crate) struct Slab<T> {
    slots: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Slab<T> {
    pub(crate) fn new() -> Slab<T> {
        Slab { slots: Vec::new(), free: Vec::new() }
    }

    /// Returns the number that the next insertion will use.
    pub(crate) fn next(&self) -> usize {
        self.free.last().copied().unwrap_or(self.slots.len())
    }

    pub(crate) fn insert(&mut self, item: T) -> usize {
        match self.free.pop() {
            Some(number) => {
                self.slots[number] = Some(item);
                number
            }
            None => {
                self.slots.push(Some(item));
                self.slots.len() - 1
            }
        }
    }

    /// Takes out the item with this number. The number stays reserved until `give_back` or `free`.
    fn lend(&mut self, number: usize) -> Option<T> {
        self.slots.get_mut(number)?.take()
    }

    /// Puts an item back that was taken out with `lend`.
    fn give_back(&mut self, number: usize, item: T) {
        self.slots[number] = Some(item);
    }

    /// Removes the items for which `is_over` holds, and returns their number.
    fn remove_if(&mut self, is_over: impl Fn(&T) -> bool) -> u64 {
        let before = self.free.len();
        for (number, slot) in self.slots.iter_mut().enumerate() {
            if slot.take_if(|item| is_over(item)).is_some() {
                self.free.push(number);
            }
        }
        (self.free.len() - before) as u64
    }

    /// Releases a number that was taken out with `lend`.
    pub(crate) fn free(&mut self, number: usize) {
        self.free.push(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_number_is_reused_only_after_it_is_free() {
        let mut slab = Slab::new();
        assert_eq!((slab.next(), slab.insert('a'), slab.next(), slab.insert('b')), (0, 0, 1, 1));
        assert_eq!((slab.lend(0), slab.lend(0), slab.lend(9)), (Some('a'), None, None));
        assert_eq!(slab.next(), 2, "a number that is lent is taken");
        slab.give_back(0, 'A');
        assert_eq!(slab.lend(0), Some('A'));
        slab.free(0);
        assert_eq!((slab.next(), slab.insert('c'), slab.insert('d')), (0, 0, 2));
        assert_eq!((slab.remove_if(|item| *item == 'c'), slab.next()), (1, 0));
        assert_eq!((slab.lend(0), slab.lend(1)), (None, Some('b')));
    }
}
