//! Connections and listeners in transit between workers: messages with a descriptor (SCM_RIGHTS).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_syscalls::{Errno, option, socket, unix_socket};

use crate::listen::connection::{Connection, OpenGuard};
use crate::listen::seats::Seats;

/// The bytes before the carry: kind, requests answered, draw, age in nanoseconds, mark.
const HEAD: usize = 1 + 4 + 4 + 8 + 8;
const CONNECTION: u8 = b'C';
const LISTENER: u8 = b'L';
const NUDGE: u8 = b'N';
/// Maximum size of a message. A connection with a longer carry cannot be sent.
pub(crate) const MAX_MESSAGE: usize = 64 * 1024 + HEAD;

/// A received message.
#[derive(Debug)]
pub(crate) enum Arrival {
    Connection(HandoffConnection),
    Listener(OwnedFd),
    /// A wakeup without content: the receiver checks its accept queue again.
    Nudge,
}

/// A connection in transit between two workers.
#[derive(Debug)]
pub(crate) struct HandoffConnection {
    socket: OwnedFd,
    served: u32,
    draw: u32,
    born: Instant,
    mark: u64,
    carry: Vec<u8>,
    _in_transit: InTransit,
}

/// Counts a connection as in transit until it is dropped; `None`: the dispatcher counts it.
#[derive(Debug)]
struct InTransit(Option<Arc<Seats>>);

impl Drop for InTransit {
    fn drop(&mut self) {
        if let Some(seats) = &self.0 {
            seats.sub_in_transit();
        }
    }
}

/// Sends a message with a connection, which counts as in transit until the receiver has read it.
fn send_counted(
    seats: &Seats,
    to: BorrowedFd<'_>,
    bytes: &[u8],
    connection: BorrowedFd<'_>,
) -> io::Result<()> {
    seats.add_in_transit();
    unix_socket::send(to, bytes, Some(connection)).inspect_err(|_| seats.sub_in_transit())
}

impl AsFd for HandoffConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl HandoffConnection {
    /// Returns a connection that was just accepted, and counts as in transit.
    pub(crate) fn new(socket: OwnedFd, seats: &Arc<Seats>) -> HandoffConnection {
        seats.add_in_transit();
        let _in_transit = InTransit(Some(Arc::clone(seats)));
        HandoffConnection { _in_transit, ..HandoffConnection::of_dispatcher(socket) }
    }

    /// Returns a connection that was just accepted, and that the dispatcher counts.
    pub(crate) fn of_dispatcher(socket: OwnedFd) -> HandoffConnection {
        HandoffConnection {
            socket,
            served: 0,
            draw: fastrand::u32(..),
            born: Instant::now(),
            mark: 0,
            carry: Vec::new(),
            _in_transit: InTransit(None),
        }
    }

    /// Sends the connection without waiting, as [`send_connection`].
    pub(crate) fn send(&self, to: BorrowedFd<'_>, kind: u8, seats: &Seats) -> io::Result<()> {
        let bytes = head(kind, self.served, self.draw, self.born, self.mark, &self.carry)?;
        send_counted(seats, to, &bytes, self.socket.as_fd())
    }

    /// Leaves the count of the connection to the dispatcher.
    pub(crate) fn leave_count(&mut self) {
        self._in_transit.0 = None;
    }

    /// Parses the bytes of a message after its kind.
    pub(crate) fn read(bytes: &[u8], socket: OwnedFd, seats: &Arc<Seats>) -> Option<HandoffConnection> {
        let _in_transit = InTransit(Some(Arc::clone(seats)));
        let (served, rest) = bytes.split_first_chunk()?;
        let (draw, rest) = rest.split_first_chunk()?;
        let (age, rest) = rest.split_first_chunk()?;
        let (mark, carry) = rest.split_first_chunk()?;
        let (age, now) = (Duration::from_nanos(u64::from_ne_bytes(*age)), Instant::now());
        Some(HandoffConnection {
            socket,
            served: u32::from_ne_bytes(*served),
            draw: u32::from_ne_bytes(*draw),
            born: now.checked_sub(age).unwrap_or(now),
            mark: u64::from_ne_bytes(*mark),
            carry: carry.to_vec(),
            _in_transit,
        })
    }

    /// Returns the connection of a worker, which `guard` counts as open.
    pub(crate) fn settle(self, guard: OpenGuard) -> Connection {
        let mut connection = Connection::new(self.socket, guard);
        connection.served = self.served.into();
        connection.draw = self.draw;
        connection.mark = self.mark;
        connection.carry = self.carry;
        connection.born = self.born;
        connection
    }
}

/// Returns the bytes of a message with a connection. WouldBlock: the carry is too long.
fn head(kind: u8, served: u32, draw: u32, born: Instant, mark: u64, carry: &[u8]) -> io::Result<Vec<u8>> {
    if carry.len() > MAX_MESSAGE - HEAD {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let mut bytes = Vec::with_capacity(HEAD + carry.len());
    bytes.push(kind);
    bytes.extend_from_slice(&served.to_ne_bytes());
    bytes.extend_from_slice(&draw.to_ne_bytes());
    let age = u64::try_from(born.elapsed().as_nanos()).unwrap_or(u64::MAX);
    bytes.extend_from_slice(&age.to_ne_bytes());
    bytes.extend_from_slice(&mark.to_ne_bytes());
    bytes.extend_from_slice(carry);
    Ok(bytes)
}

/// Sends a connection without waiting. Dropping `connection` closes the caller's copy. WouldBlock: the channel has no space, or
/// the carry is too long.
pub(crate) fn send_connection(to: BorrowedFd<'_>, kind: u8, connection: &Connection) -> io::Result<()> {
    let Connection { served, draw, born, mark, carry, .. } = connection;
    let bytes = head(kind, served.get(), *draw, *born, *mark, carry)?;
    send_counted(connection.seats(), to, &bytes, connection.as_fd())
}

/// Returns whether a later retry of sendmsg(2) may succeed: the channel has no space, the kernel no memory, or too many descriptors of this
/// user are in transit (ETOOMANYREFS).
pub(crate) fn is_full(error: &io::Error) -> bool {
    // `head` returns an error without an errno.
    error.kind() == io::ErrorKind::WouldBlock
        || is_empty(error)
        || Errno::of(error) == Some(Errno::ETOOMANYREFS)
}

/// Returns whether recvmsg(2) took no message, and a later retry may succeed: there is none, or the kernel had no memory.
pub(crate) fn is_empty(error: &io::Error) -> bool {
    matches!(Errno::of(error), Some(Errno::EAGAIN | Errno::EINTR | Errno::ENOBUFS | Errno::ENOMEM))
}

/// Receives a message without waiting. `buffer` has [`MAX_MESSAGE`] bytes.
fn receive(from: BorrowedFd<'_>, buffer: &mut [u8], seats: &Arc<Seats>) -> io::Result<Option<Arrival>> {
    match unix_socket::receive(from, buffer) {
        Ok((count, socket)) => Ok(read(&buffer[..count], socket, seats)),
        Err(error) if is_empty(&error) => Ok(None),
        Err(error) => {
            // The kernel has closed the connection in the message.
            if Errno::of(&error) == Some(Errno::EMFILE) && buffer[0] == CONNECTION {
                seats.sub_in_transit();
            }
            Err(error)
        }
    }
}

fn read(bytes: &[u8], socket: Option<OwnedFd>, seats: &Arc<Seats>) -> Option<Arrival> {
    let (kind, rest) = bytes.split_first()?;
    if *kind == NUDGE {
        return Some(Arrival::Nudge);
    }
    let socket = socket?;
    if *kind == LISTENER {
        return Some(Arrival::Listener(socket));
    }
    HandoffConnection::read(rest, socket, seats).map(Arrival::Connection)
}

/// The queue in which a worker that leaves puts its connections and its listener for other workers.
#[derive(Debug)]
pub(crate) struct HandoffQueue {
    sender: OwnedFd,
    receiver: OwnedFd,
    /// Both ends of the queue of listeners without an owner, of which each worker that joins takes one. Meanwhile the worker that
    /// found the listener in the other queue accepts from it.
    ownerless: (OwnedFd, OwnedFd),
    seats: Arc<Seats>,
    /// Accessed before each system call in models, so that loom may schedule another thread there.
    #[cfg(all(test, fourtuple_loom))]
    turn: crate::sync::AtomicU64,
}

/// The time for which a worker that leaves waits for space in the queue, in total for all its messages.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Returns the end of the wait of a worker that leaves now.
pub(crate) fn deadline() -> Instant {
    Instant::now() + TIMEOUT
}

impl HandoffQueue {
    pub(crate) fn new(seats: &Arc<Seats>) -> io::Result<HandoffQueue> {
        let (sender, receiver) = unix_socket::pair()?;
        Ok(HandoffQueue {
            sender,
            receiver,
            ownerless: unix_socket::pair()?,
            seats: Arc::clone(seats),
            #[cfg(all(test, fourtuple_loom))]
            turn: crate::sync::AtomicU64::new(0),
        })
    }

    /// Returns a descriptor that is readable while the queue has a message.
    pub(crate) fn receiver(&self) -> BorrowedFd<'_> {
        self.receiver.as_fd()
    }

    #[cfg(all(test, fourtuple_loom))]
    fn turn(&self) {
        self.turn.fetch_add(1, crate::sync::Ordering::SeqCst);
    }

    /// Takes the next message, if there is one.
    pub(crate) fn take(&self) -> io::Result<Option<Arrival>> {
        #[cfg(all(test, fourtuple_loom))]
        self.turn();
        receive(self.receiver.as_fd(), &mut vec![0; MAX_MESSAGE], &self.seats)
    }

    /// Takes a listener without an owner, if there is one.
    pub(crate) fn take_listener(&self) -> io::Result<Option<OwnedFd>> {
        match unix_socket::receive(self.ownerless.1.as_fd(), &mut [0]) {
            Ok((_, listener)) => Ok(listener),
            Err(error) if is_empty(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Offers a listener to the next worker that joins; `false` if there was no space until the deadline.
    pub(crate) fn offer_listener(&self, listener: BorrowedFd<'_>, until: Instant) -> io::Result<bool> {
        self.send_until(until, &self.ownerless.0, |to| unix_socket::send(to, &[LISTENER], Some(listener)))
    }

    /// Puts a listener into the queue, so that a worker accepts from it until another worker owns it.
    pub(crate) fn put_listener(&self, listener: BorrowedFd<'_>, until: Instant) -> io::Result<bool> {
        self.send_until(until, &self.sender, |to| unix_socket::send(to, &[LISTENER], Some(listener)))
    }

    /// Puts a connection into the queue; `false` if there was no space until the deadline.
    pub(crate) fn put(&self, connection: &Connection, until: Instant) -> io::Result<bool> {
        self.send_until(until, &self.sender, |to| send_connection(to, CONNECTION, connection))
    }

    /// Puts a connection of no worker into the queue, without waiting for space.
    pub(crate) fn offer(&self, connection: &HandoffConnection) -> io::Result<()> {
        connection.send(self.sender.as_fd(), CONNECTION, &self.seats)
    }

    /// Wakes a waiting worker. A full queue has woken it already.
    pub(crate) fn nudge(&self) -> io::Result<()> {
        match unix_socket::send(self.sender.as_fd(), &[NUDGE], None) {
            Err(error) if !is_full(&error) => Err(error),
            _ => Ok(()),
        }
    }

    /// Takes all messages out and puts them in again. The kernel may have woken only the worker that leaves for a message that
    /// it did not take. Returns the number of connections.
    pub(crate) fn requeue_all(&self) -> io::Result<usize> {
        let (mut found, mut listeners) = (Vec::new(), Vec::new());
        let mut connections = 0;
        while let Some(arrival) = self.take()? {
            found.push(arrival);
        }
        let until = deadline();
        for arrival in found {
            match arrival {
                Arrival::Connection(received) => {
                    let sent = self
                        .send_until(until, &self.sender, |to| received.send(to, CONNECTION, &self.seats))?;
                    connections += usize::from(sent);
                }
                Arrival::Listener(listener) => {
                    let cookie = option::cookie(listener.as_fd())?;
                    // One worker accepts from a listener without an owner.
                    if !self.seats.is_owned(cookie) && !listeners.contains(&cookie) {
                        self.put_listener(listener.as_fd(), until)?;
                        listeners.push(cookie);
                    }
                }
                Arrival::Nudge => self.nudge()?,
            }
        }
        Ok(connections)
    }

    /// Calls `send` until the queue has space, at least once; `false` after the deadline.
    fn send_until(
        &self,
        until: Instant,
        sender: &OwnedFd,
        send: impl Fn(BorrowedFd<'_>) -> io::Result<()>,
    ) -> io::Result<bool> {
        loop {
            #[cfg(all(test, fourtuple_loom))]
            self.turn();
            match send(sender.as_fd()) {
                Ok(()) => return Ok(true),
                Err(error) if is_full(&error) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(false);
                    }
                    let slice = left.min(Duration::from_millis(10));
                    if socket::wait_writable(sender.as_fd(), Some(slice))? {
                        std::thread::yield_now();
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::*;
    use crate::listen::seats::Seats;

    #[test]
    fn a_handed_over_connection_keeps_its_state() {
        let seats = Arc::new(Seats::new(2).unwrap());
        let queue = HandoffQueue::new(&seats).unwrap();
        assert!(queue.take().unwrap().is_none());
        for carry in [0, 5, 60_000] {
            let (mut client, server) = UnixStream::pair().unwrap();
            let mut connection = Connection::new(server.into(), OpenGuard::new(&seats, 0));
            connection.carry = vec![b'x'; carry];
            connection.mark = 7;
            connection.served = 3.into();
            let draw = connection.draw;
            assert!(queue.put(&connection, deadline()).unwrap());
            drop(connection);
            assert_eq!(seats.in_transit(), 1);
            let Some(Arrival::Connection(received)) = queue.take().unwrap() else { panic!("no connection") };
            let mut connection = received.settle(OpenGuard::new(&seats, 1));
            assert_eq!((connection.carry.len(), connection.mark, connection.served()), (carry, 7, 3));
            assert_eq!(connection.draw, draw, "drawn once for each connection");
            connection.write_all(b"hello").unwrap();
            drop(connection);
            let mut text = String::new();
            client.read_to_string(&mut text).unwrap();
            assert_eq!(text, "hello");
        }
        assert_eq!(seats.stats().iter().map(|seat| seat.open).collect::<Vec<_>>(), [0, 0]);
        assert_eq!(seats.in_transit(), 0);
    }

    #[test]
    fn a_long_carry_is_not_sent() {
        let seats = Arc::new(Seats::new(1).unwrap());
        let (_client, server) = UnixStream::pair().unwrap();
        let mut connection = Connection::new(server.into(), OpenGuard::new(&seats, 0));
        connection.carry = vec![0; MAX_MESSAGE];
        assert_eq!(
            send_connection(HandoffQueue::new(&seats).unwrap().sender.as_fd(), CONNECTION, &connection)
                .unwrap_err()
                .kind(),
            io::ErrorKind::WouldBlock
        );
    }
}

/// The kernel implements the queue, so these models check the interleavings between system calls.
#[cfg(all(test, fourtuple_loom))]
mod models {
    use std::os::unix::net::UnixStream;

    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// Returns a queue with two connections, of marks 1 and 2, and a listener behind them.
    fn queue() -> Arc<HandoffQueue> {
        let seats = std::sync::Arc::new(crate::listen::seats::Seats::new(1).unwrap());
        let queue = HandoffQueue::new(&seats).unwrap();
        let (socket, _) = UnixStream::pair().unwrap();
        for mark in [1, 2] {
            let socket = socket.as_fd().try_clone_to_owned().unwrap();
            let seats = &queue.seats;
            let incoming = HandoffConnection { mark, ..HandoffConnection::new(socket, seats) };
            assert!(
                queue
                    .send_until(deadline(), &queue.sender, |to| incoming.send(to, CONNECTION, seats))
                    .unwrap()
            );
        }
        assert!(queue.put_listener(socket.as_fd(), deadline()).unwrap());
        Arc::new(queue)
    }

    /// Returns the marks of the remaining connections and the number of remaining listeners.
    fn left(queue: &HandoffQueue) -> (Vec<u64>, usize) {
        let (mut marks, mut listeners) = (Vec::new(), 0);
        while let Some(arrival) = queue.take().unwrap() {
            match arrival {
                Arrival::Connection(received) => marks.push(received.mark),
                Arrival::Listener(_) => listeners += 1,
                Arrival::Nudge => {}
            }
        }
        marks.sort_unstable();
        (marks, listeners)
    }

    /// A worker requeues all messages while another worker takes one: each message remains once, or was taken.
    #[test]
    fn loom_requeue_all_duplicates_no_message() {
        loom::model(|| {
            let queue = queue();
            let other = thread::spawn({
                let queue = Arc::clone(&queue);
                move || queue.take().unwrap()
            });
            queue.requeue_all().unwrap();
            let taken = other.join().unwrap();
            let (mut marks, mut listeners) = left(&queue);
            match taken {
                Some(Arrival::Connection(received)) => marks.push(received.mark),
                Some(Arrival::Listener(_)) => listeners += 1,
                Some(Arrival::Nudge) | None => {}
            }
            marks.sort_unstable();
            assert_eq!((marks, listeners), (vec![1, 2], 1));
        });
    }
}
