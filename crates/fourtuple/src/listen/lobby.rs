//! Connections and listeners on their way from one worker to another, as messages with a descriptor (SCM_RIGHTS).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use fourtuple_syscalls::{message, socket};

use crate::listen::connection::{Connection, Place};

/// Kind, requests answered, luck, age in nanoseconds, mark.
const HEAD: usize = 1 + 4 + 4 + 8 + 8;
const CONNECTION: u8 = b'C';
const LISTENER: u8 = b'L';
const NUDGE: u8 = b'N';
/// The longest message; a longer carry does not travel.
pub(crate) const ROOM: usize = 64 * 1024 + HEAD;

/// What was received.
#[derive(Debug)]
pub(crate) enum Arrival {
    Connection(Passenger),
    Listener(OwnedFd),
    /// Nothing but a reason to look again.
    Nudge,
}

/// A connection between two workers.
#[derive(Debug)]
pub(crate) struct Passenger {
    socket: OwnedFd,
    served: u32,
    luck: u32,
    born: Instant,
    mark: u64,
    carry: Vec<u8>,
}

impl AsFd for Passenger {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Passenger {
    /// One that was just accepted.
    pub(crate) fn new(socket: OwnedFd) -> Passenger {
        Passenger {
            socket,
            served: 0,
            luck: fastrand::u32(..),
            born: Instant::now(),
            mark: 0,
            carry: Vec::new(),
        }
    }

    /// As [`send_connection`], under a kind that `to` knows.
    pub(crate) fn send(&self, to: BorrowedFd<'_>, kind: u8) -> io::Result<()> {
        let bytes = head(kind, self.served, self.luck, self.born, self.mark, &self.carry)?;
        message::send(to, &bytes, Some(self.socket.as_fd()))
    }

    /// The connection of a message, by what follows its kind.
    pub(crate) fn read(bytes: &[u8], socket: OwnedFd) -> Option<Passenger> {
        let (served, rest) = bytes.split_first_chunk()?;
        let (luck, rest) = rest.split_first_chunk()?;
        let (age, rest) = rest.split_first_chunk()?;
        let (mark, carry) = rest.split_first_chunk()?;
        let (age, now) = (Duration::from_nanos(u64::from_ne_bytes(*age)), Instant::now());
        Some(Passenger {
            socket,
            served: u32::from_ne_bytes(*served),
            luck: u32::from_ne_bytes(*luck),
            born: now.checked_sub(age).unwrap_or(now),
            mark: u64::from_ne_bytes(*mark),
            carry: carry.to_vec(),
        })
    }

    pub(crate) fn settle(self, place: Place) -> Connection {
        let mut connection = Connection::new(self.socket, place);
        connection.served = self.served;
        connection.luck = self.luck;
        connection.mark = self.mark;
        connection.carry = self.carry;
        connection.born = self.born;
        connection
    }
}

/// A message without its descriptor.
fn head(kind: u8, served: u32, luck: u32, born: Instant, mark: u64, carry: &[u8]) -> io::Result<Vec<u8>> {
    if carry.len() > ROOM - HEAD {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let mut bytes = Vec::with_capacity(HEAD + carry.len());
    bytes.push(kind);
    bytes.extend_from_slice(&served.to_ne_bytes());
    bytes.extend_from_slice(&luck.to_ne_bytes());
    let age = u64::try_from(born.elapsed().as_nanos()).unwrap_or(u64::MAX);
    bytes.extend_from_slice(&age.to_ne_bytes());
    bytes.extend_from_slice(&mark.to_ne_bytes());
    bytes.extend_from_slice(carry);
    Ok(bytes)
}

/// Sends a connection, without waiting; the caller closes its own copy by dropping it. WouldBlock: no room, or a carry that
/// is too long.
pub(crate) fn send_connection(to: BorrowedFd<'_>, kind: u8, connection: &Connection) -> io::Result<()> {
    let Connection { served, luck, born, mark, carry, .. } = connection;
    let bytes = head(kind, *served, *luck, *born, *mark, carry)?;
    message::send(to, &bytes, Some(connection.as_fd()))
}

/// Whether a message may go later: no room, or too many descriptors of this user are under way (ETOOMANYREFS).
pub(crate) fn is_full(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock || error.raw_os_error() == Some(message::TOO_MANY)
}

/// What has come, if anything has. `room` is of [`ROOM`] bytes.
pub(crate) fn receive(from: BorrowedFd<'_>, room: &mut [u8]) -> io::Result<Option<Arrival>> {
    match message::receive(from, room) {
        Ok((count, socket)) => Ok(read(&room[..count], socket)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

fn read(bytes: &[u8], socket: Option<OwnedFd>) -> Option<Arrival> {
    let (kind, rest) = bytes.split_first()?;
    if *kind == NUDGE {
        return Some(Arrival::Nudge);
    }
    let socket = socket?;
    if *kind == LISTENER {
        return Some(Arrival::Listener(socket));
    }
    Passenger::read(rest, socket).map(Arrival::Connection)
}

/// Where a worker that leaves puts what others are to take over.
#[derive(Debug)]
pub(crate) struct Lobby {
    entrance: OwnedFd,
    exit: OwnedFd,
}

/// How long a worker that leaves waits for others to make room.
const PATIENCE: Duration = Duration::from_secs(1);

impl Lobby {
    pub(crate) fn new() -> io::Result<Lobby> {
        let (entrance, exit) = message::pair()?;
        Ok(Lobby { entrance, exit })
    }

    /// Readable while there is something to take.
    pub(crate) fn exit(&self) -> BorrowedFd<'_> {
        self.exit.as_fd()
    }

    /// Takes what is there, if anything is.
    pub(crate) fn take(&self) -> io::Result<Option<Arrival>> {
        receive(self.exit.as_fd(), &mut vec![0; ROOM])
    }

    /// Takes the first listener that is there, if any is.
    pub(crate) fn take_listener(&self) -> io::Result<Option<OwnedFd>> {
        let mut found = None;
        let mut others = Vec::new();
        while found.is_none() {
            match self.take()? {
                Some(Arrival::Listener(listener)) => found = Some(listener),
                Some(Arrival::Connection(passenger)) => others.push(passenger),
                Some(Arrival::Nudge) => {}
                None => break,
            }
        }
        for passenger in others {
            self.patiently(|to| passenger.send(to, CONNECTION))?;
        }
        Ok(found)
    }

    /// Puts a connection there; `false`: nobody made room for it.
    pub(crate) fn put(&self, connection: &Connection) -> io::Result<bool> {
        self.patiently(|to| send_connection(to, CONNECTION, connection))
    }

    /// Puts one there that nobody has, if there is room.
    pub(crate) fn offer(&self, passenger: &Passenger) -> io::Result<()> {
        passenger.send(self.entrance.as_fd(), CONNECTION)
    }

    pub(crate) fn put_listener(&self, listener: BorrowedFd<'_>) -> io::Result<bool> {
        self.patiently(|to| message::send(to, &[LISTENER], Some(listener)))
    }

    /// Wakes those who wait, with nothing to take. Without room there is something that wakes them already.
    pub(crate) fn nudge(&self) -> io::Result<()> {
        match message::send(self.entrance.as_fd(), &[NUDGE], None) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    }

    /// Puts what is there in again. A worker that leaves may have been woken for something that it did not take, and nobody
    /// else was.
    pub(crate) fn announce_again(&self) -> io::Result<()> {
        let mut found = Vec::new();
        while let Some(arrival) = self.take()? {
            found.push(arrival);
        }
        for arrival in found {
            match arrival {
                Arrival::Connection(passenger) => {
                    self.patiently(|to| passenger.send(to, CONNECTION))?;
                }
                Arrival::Listener(listener) => {
                    self.put_listener(listener.as_fd())?;
                }
                Arrival::Nudge => self.nudge()?,
            }
        }
        Ok(())
    }

    fn patiently(&self, send: impl Fn(BorrowedFd<'_>) -> io::Result<()>) -> io::Result<bool> {
        let begun = Instant::now();
        loop {
            match send(self.entrance.as_fd()) {
                Ok(()) => return Ok(true),
                Err(error) if is_full(&error) => {
                    let left = PATIENCE.saturating_sub(begun.elapsed());
                    if left.is_zero() {
                        return Ok(false);
                    }
                    let slice = left.min(Duration::from_millis(10));
                    if socket::wait_writable(self.entrance.as_fd(), Some(slice))? {
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
    fn a_connection_arrives_with_what_it_carries() {
        let seats = Arc::new(Seats::new(2).unwrap());
        let lobby = Lobby::new().unwrap();
        assert!(lobby.take().unwrap().is_none());
        for carry in [0, 5, 60_000] {
            let (mut client, server) = UnixStream::pair().unwrap();
            let mut connection = Connection::new(server.into(), Place::new(&seats, 0));
            connection.carry = vec![b'x'; carry];
            connection.mark = 7;
            connection.served = 3;
            let luck = connection.luck;
            assert!(lobby.put(&connection).unwrap());
            drop(connection);
            let Some(Arrival::Connection(passenger)) = lobby.take().unwrap() else { panic!("no connection") };
            let mut connection = passenger.settle(Place::new(&seats, 1));
            assert_eq!((connection.carry.len(), connection.mark, connection.served), (carry, 7, 3));
            assert_eq!(connection.luck, luck, "drawn once for each connection");
            connection.write_all(b"hello").unwrap();
            drop(connection);
            let mut text = String::new();
            client.read_to_string(&mut text).unwrap();
            assert_eq!(text, "hello");
        }
        assert_eq!(seats.stats().iter().map(|seat| seat.open).collect::<Vec<_>>(), [0, 0]);
    }

    #[test]
    fn what_is_too_long_stays() {
        let seats = Arc::new(Seats::new(1).unwrap());
        let (_client, server) = UnixStream::pair().unwrap();
        let mut connection = Connection::new(server.into(), Place::new(&seats, 0));
        connection.carry = vec![0; ROOM];
        assert_eq!(
            send_connection(Lobby::new().unwrap().entrance.as_fd(), CONNECTION, &connection)
                .unwrap_err()
                .kind(),
            io::ErrorKind::WouldBlock
        );
    }
}
