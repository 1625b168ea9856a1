//! A worker: one thread, one epoll, and its connections, of which it serves one request at a time.

use std::io;
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{errno_name, option, socket};

use crate::connection::{Connection, Next};
use crate::counts::Counts;
use crate::serve::Close;
use crate::slab::Slab;
use crate::stop::Stop;
use crate::talk::{Answer, Talk};
use crate::work::Work;

const LISTENER: u64 = u64::MAX;
const STOP: u64 = u64::MAX - 1;

/// Room for what one recv() brings.
const ROOM: usize = 64 * 1024;
/// Events that one epoll_wait() may bring.
const EVENTS: usize = 256;
/// Connections accepted in a row from a queue that is ours alone; then those who have requests get their turn.
const ROW: usize = 64;
/// Full rooms read in a row from one connection; then the others get their turn.
const ROOMS: usize = 16;
/// How long nobody is accepted after accept() has found no descriptor.
const BACK_OFF: Duration = Duration::from_millis(10);
/// Of what a client goes on sending after the server's last word so much is read, so that a RST does not take that word
/// away from it (RFC 9112, 9.6).
const DRAIN: u64 = 1024 * 1024;

/// What a worker accepts from.
pub(crate) struct Listener {
    pub(crate) socket: Arc<OwnedFd>,
    /// Others accept from it too.
    pub(crate) shared: bool,
    /// A connection that is accepted has something to read already.
    pub(crate) deferred: bool,
}

pub(crate) struct Worker {
    epoll: Epoll,
    listener: Listener,
    talk: Arc<Talk>,
    close: Close,
    work: Work,
    stop: Stop,
    counts: Arc<Counts>,
    connections: Slab<Connection>,
    room: Vec<u8>,
    /// Nobody is accepted before.
    accept_after: Option<Instant>,
}

impl Worker {
    pub(crate) fn new(
        listener: Listener,
        talk: Arc<Talk>,
        close: Close,
        work: Work,
        stop: Stop,
        counts: Arc<Counts>,
    ) -> io::Result<Worker> {
        let worker = Worker {
            epoll: Epoll::new()?,
            listener,
            talk,
            close,
            work,
            stop,
            counts,
            connections: Slab::new(),
            room: vec![0; ROOM],
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

    /// Serves until it is told to stop.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = [Ready::NONE; EVENTS];
        while !self.stop.is_set() {
            let ready = self.epoll.wait(&mut events, self.accept_after.map(|_| BACK_OFF))?;
            for event in ready {
                // A request may take long: whoever is told to stop does not begin another one.
                if self.stop.is_set() {
                    break;
                }
                self.work.stall();
                match event.token() {
                    LISTENER => self.accept()?,
                    STOP => {}
                    // No number of a connection is beyond those that memory holds.
                    number => self.proceed(number as usize, event)?,
                }
            }
            if self.accept_after.is_some_and(|after| Instant::now() >= after) {
                self.accept_after = None;
                self.watch_listener()?;
            }
        }
        Ok(())
    }

    fn accept(&mut self) -> io::Result<()> {
        // Of a shared queue one at a time: whoever empties it makes others wait behind its own requests.
        for _ in 0..if self.listener.shared { 1 } else { ROW } {
            let socket = match socket::accept_nonblocking(self.listener.socket.as_fd()) {
                Ok(socket) => socket,
                Err(error) => return self.not_accepted(&error),
            };
            self.counts.accepted.add(1);
            let mut connection = Connection::new(socket);
            if self.listener.deferred && self.talk_on(&mut connection, false) == Next::Close {
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
        let name = errno_name(error);
        match name.as_str() {
            "EAGAIN" | "EINTR" => return Ok(()),
            "EMFILE" | "ENFILE" | "ENOBUFS" | "ENOMEM" => {
                // The listener stays ready: without this the worker would do nothing but ask again.
                self.epoll.remove(self.listener.socket.as_fd())?;
                self.accept_after = Some(Instant::now() + BACK_OFF);
            }
            _ => {}
        }
        self.counts.error(&format!("accept: {name}"));
        Ok(())
    }

    /// Puts a connection that goes on among the others.
    fn watch(&mut self, mut connection: Connection) -> io::Result<()> {
        connection.watches_room = connection.sending.is_some();
        let added =
            self.epoll.add(connection.socket.as_fd(), self.connections.next() as u64, interest(&connection));
        match added {
            Ok(()) => drop(self.connections.insert(connection)),
            // fs.epoll.max_user_watches: this connection is lost, the others are not.
            Err(error) if matches!(errno_name(&error).as_str(), "ENOSPC" | "ENOMEM") => {
                self.counts.error(&format!("epoll_ctl: {}", errno_name(&error)));
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// A connection has something to read, or room to write.
    fn proceed(&mut self, number: usize, event: &Ready) -> io::Result<()> {
        // An event of a connection that ended in the same batch finds nobody, or somebody who has nothing to say.
        let Some(mut connection) = self.connections.lend(number) else { return Ok(()) };
        if self.talk_on(&mut connection, event.ended()) == Next::Close {
            self.connections.free(number);
            return Ok(());
        }
        let must_watch_room = connection.sending.is_some() && !connection.watches_room;
        connection.watches_room |= must_watch_room;
        // Setting the interest again makes an edge of what is there already.
        if mem::take(&mut connection.more) || must_watch_room {
            self.epoll.modify(connection.socket.as_fd(), number as u64, interest(&connection))?;
        }
        self.connections.give_back(number, connection);
        Ok(())
    }

    /// Reads, works and answers until there is nothing more to read, no room for an answer, or the end. `ended`: the end
    /// of what the client says is near, and no further event will tell of it.
    fn talk_on(&mut self, connection: &mut Connection, mut ended: bool) -> Next {
        if let Some((answer, from)) = connection.sending.take() {
            match self.send(connection, answer, from) {
                Sent::Partly => return Next::Wait,
                Sent::Failed => return Next::Close,
                Sent::Whole if answer.ends() => {
                    if self.end(connection, false) == Next::Close {
                        return Next::Close;
                    }
                }
                Sent::Whole => match self.digest(connection, &[], false) {
                    Digested::Needs => {}
                    Digested::Full => return Next::Wait,
                    Digested::Over => return Next::Close,
                },
            }
            // Events that came meanwhile were not looked at.
            ended = true;
        }
        let mut room = mem::take(&mut self.room);
        let next = self.read(connection, ended, &mut room);
        self.room = room;
        next
    }

    fn read(&mut self, connection: &mut Connection, ended: bool, room: &mut [u8]) -> Next {
        for _ in 0..ROOMS {
            if self.stop.is_set() {
                return Next::Wait;
            }
            let count = match socket::receive(connection.socket.as_fd(), room) {
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
                    self.counts.error(&errno_name(&error));
                    return Next::Close;
                }
            };
            self.counts.received_bytes.add(count as u64);
            // What comes from now on is told by another event.
            let drained = count < room.len();
            if let Some(left) = connection.draining {
                match left.checked_sub(count as u64) {
                    Some(left) => connection.draining = Some(left),
                    None => return Next::Close,
                }
            } else {
                match self.digest(connection, &room[..count], drained) {
                    Digested::Needs => {}
                    Digested::Full => return Next::Wait,
                    Digested::Over => return Next::Close,
                }
            }
            // What is to be discarded may have been kept from telling of itself: it is read to its end.
            if drained && !ended && connection.draining.is_none() {
                return Next::Wait;
            }
        }
        connection.more = true;
        Next::Wait
    }

    /// Makes requests of what was kept and what is fresh, and answers them. `drained`: there is nothing behind it.
    fn digest(&mut self, connection: &mut Connection, fresh: &[u8], drained: bool) -> Digested {
        let mut joined = mem::take(&mut connection.kept);
        let mut bytes = fresh;
        if !joined.is_empty() {
            joined.extend_from_slice(fresh);
            bytes = &joined;
        }
        while !bytes.is_empty() && !self.stop.is_set() {
            let last = self.close.every().is_some_and(|every| connection.responses + 1 >= every);
            let step = self.talk.next(&mut connection.place, bytes, last);
            bytes = &bytes[step.used..];
            let Some(answer) = step.answer else { break };
            if let Some(name) = answer.error() {
                self.counts.error(name);
            }
            if answer.is_response() {
                connection.responses += 1;
                // Before the answer: whoever has it finds it counted.
                self.counts.requests.add(1);
                self.work.serve();
            }
            match self.send(connection, answer, 0) {
                Sent::Whole if answer.ends() => {
                    // Who is told that a request is bad may be in the middle of it still.
                    let drained = drained && bytes.is_empty() && answer.is_response();
                    return match self.end(connection, drained) {
                        Next::Close => Digested::Over,
                        Next::Wait => Digested::Needs,
                    };
                }
                Sent::Whole => {}
                Sent::Partly => {
                    connection.kept = bytes.to_vec();
                    return Digested::Full;
                }
                Sent::Failed => return Digested::Over,
            }
        }
        if !bytes.is_empty() {
            connection.kept = bytes.to_vec();
        }
        Digested::Needs
    }

    fn send(&mut self, connection: &mut Connection, answer: Answer, mut from: usize) -> Sent {
        let bytes = self.talk.bytes(answer);
        loop {
            match socket::send(connection.socket.as_fd(), &bytes[from..]) {
                Ok(count) => {
                    self.counts.sent_bytes.add(count as u64);
                    from += count;
                    if from == bytes.len() {
                        return Sent::Whole;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    connection.sending = Some((answer, from));
                    return Sent::Partly;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.counts.error(&errno_name(&error));
                    return Sent::Failed;
                }
            }
        }
    }

    /// After the last word. `drained`: the client has said nothing that was not read.
    fn end(&mut self, connection: &mut Connection, drained: bool) -> Next {
        if let Close::Reset { every } = self.close
            && connection.responses >= every
        {
            if let Err(error) = option::set_reset_on_close(connection.socket.as_fd()) {
                self.counts.error(&errno_name(&error));
            }
            return Next::Close;
        }
        if drained || socket::shutdown_write(connection.socket.as_fd()).is_err() {
            return Next::Close;
        }
        // close() with unread data would send a RST, which could take the answer away from the client.
        connection.draining = Some(DRAIN);
        Next::Wait
    }
}

/// What became of an answer.
enum Sent {
    Whole,
    /// No room: the rest is kept.
    Partly,
    Failed,
}

/// What became of bytes that came in.
enum Digested {
    /// All that can be answered is: more are needed.
    Needs,
    /// There is no room for an answer: no more may be read.
    Full,
    /// The connection is over.
    Over,
}

fn interest(connection: &Connection) -> Interest {
    let both = Interest::READ.and(Interest::EDGE);
    if connection.watches_room { both.and(Interest::WRITE) } else { both }
}
