//! The messages between two processes: text with a kind in the first line, a name and a value in each further line, and descriptors.

use std::fmt::Write;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::spread::UdpGroup;
use fourtuple_syscalls::unix_socket::{self, Peer};
use fourtuple_syscalls::{Errno, socket};

use crate::handover::HandoverError;
use crate::plane::PlaneKind;
use crate::settings::{Forward, ForwardError};

/// The time limit for the next message of the peer process.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of bytes of a message: enough for [`unix_socket::MAX_DESCRIPTORS`] targets of two addresses each.
const BUFFER: usize = 64 * 1024;

/// A connection to the other process.
#[derive(Debug)]
pub(super) struct PeerConnection {
    socket: OwnedFd,
    path: PathBuf,
    pub(super) peer: Peer,
}

#[derive(Debug)]
pub(super) struct Message {
    pub(super) text: String,
    pub(super) descriptors: Vec<OwnedFd>,
    path: PathBuf,
}

impl PeerConnection {
    /// Opens a connection, and refuses a peer process of a user other than this user and root: the peer receives or sends the sockets.
    pub(super) fn new(socket: OwnedFd, path: &Path) -> Result<PeerConnection, HandoverError> {
        let path = path.to_owned();
        let peer = unix_socket::peer(socket.as_fd()).map_err(|source| HandoverError::Call {
            call: "getsockopt(SO_PEERCRED)",
            path: path.clone(),
            source,
        })?;
        if !peer.is_root_or_own() {
            return Err(HandoverError::Stranger { path, user: peer.user });
        }
        Ok(PeerConnection { socket, path, peer })
    }

    fn failed(&self, call: &'static str) -> impl Fn(io::Error) -> HandoverError {
        let path = self.path.clone();
        move |source| match Errno::of(&source) {
            Some(Errno::EPIPE | Errno::ECONNRESET) => HandoverError::Gone { path: path.clone() },
            _ => HandoverError::Call { call, path: path.clone(), source },
        }
    }

    pub(super) fn send_text(&self, text: &str) -> Result<(), HandoverError> {
        self.send(text, &[])
    }

    /// Sends a message with at most [`unix_socket::MAX_DESCRIPTORS`] descriptors.
    pub(super) fn send(&self, text: &str, descriptors: &[BorrowedFd<'_>]) -> Result<(), HandoverError> {
        let begun = Instant::now();
        loop {
            match unix_socket::send_all(self.socket.as_fd(), text.as_bytes(), descriptors) {
                Ok(()) => return Ok(()),
                Err(error) if begun.elapsed() >= PATIENCE => return Err(self.failed("sendmsg()")(error)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let _ = socket::wait_writable(self.socket.as_fd(), Some(PATIENCE))
                        .map_err(self.failed("poll()"))?;
                }
                // The kernel limits descriptors in flight: retry until the peer has received some.
                Err(error) if Errno::of(&error) == Some(Errno::ETOOMANYREFS) => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(self.failed("sendmsg()")(error)),
            }
        }
    }

    /// Returns the next message, if one has arrived.
    pub(super) fn receive(&self) -> Result<Option<Message>, HandoverError> {
        let mut buffer = vec![0; BUFFER];
        let (count, descriptors) = match unix_socket::receive_all(self.socket.as_fd(), &mut buffer) {
            Ok((0, _)) => return Err(HandoverError::Gone { path: self.path.clone() }),
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(self.failed("recvmsg()")(error)),
        };
        let text = String::from_utf8_lossy(&buffer[..count]).into_owned();
        match text.strip_prefix("no\n") {
            Some(why) => Err(HandoverError::Refused { why: why.to_owned() }),
            None => Ok(Some(Message { text, descriptors, path: self.path.clone() })),
        }
    }

    /// Waits for the next message.
    pub(super) fn wait(&self) -> Result<Message, HandoverError> {
        self.wait_for(PATIENCE)
    }

    fn wait_for(&self, time: Duration) -> Result<Message, HandoverError> {
        let begun = Instant::now();
        loop {
            if let Some(said) = self.receive()? {
                return Ok(said);
            }
            let left = time.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Err(HandoverError::Silent { path: self.path.clone(), after: time });
            }
            let _ = socket::wait_readable(self.socket.as_fd(), Some(left)).map_err(self.failed("poll()"))?;
        }
    }

    /// Waits for a message within this time. After a timeout, the connection is shut down for receive, so that a later send by
    /// the peer fails: both processes then agree on the outcome.
    pub(super) fn wait_or_shut(&self, time: Duration) -> Result<Message, HandoverError> {
        let silent = match self.wait_for(time) {
            Err(error @ HandoverError::Silent { .. }) => error,
            received => return received,
        };
        let socket = self.socket.try_clone().map_err(self.failed("dup()"))?;
        UnixStream::from(socket).shutdown(std::net::Shutdown::Read).map_err(self.failed("shutdown()"))?;
        match self.receive() {
            Ok(Some(said)) => Ok(said),
            _ => Err(silent),
        }
    }

    /// Waits until the peer process has ended or closed the connection. Returns whether that happened within this time.
    pub(super) fn wait_for_end(&self, time: Duration) -> bool {
        let begun = Instant::now();
        loop {
            match self.receive() {
                Ok(_) => {}
                Err(_) => return true,
            }
            let left = time.saturating_sub(begun.elapsed());
            if left.is_zero() || socket::wait_readable(self.socket.as_fd(), Some(left)).is_err() {
                return false;
            }
        }
    }
}

impl Message {
    pub(super) fn kind(&self) -> &str {
        self.text.lines().next().unwrap_or_default()
    }

    /// Returns the lines after the kind.
    pub(super) fn lines(&self) -> impl Iterator<Item = &str> {
        self.text.lines().skip(1)
    }

    pub(super) fn unexpected(&self, expected: &'static str) -> HandoverError {
        let said = self.text.chars().take(60).collect();
        HandoverError::Unexpected { path: self.path.clone(), said, expected }
    }

    /// Returns the value of the line that begins with this name.
    pub(super) fn value<T: FromStr>(&self, name: &'static str) -> Result<T, HandoverError> {
        let line = self.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse().ok()).ok_or_else(|| self.unexpected(name))
    }
}

/// A message under construction.
pub(super) struct Text(String);

impl Text {
    pub(super) fn of(kind: &str) -> Text {
        Text(kind.to_owned())
    }

    pub(super) fn with(mut self, name: &str, value: impl std::fmt::Display) -> Text {
        // Writing to a String does not fail.
        let _ = write!(self.0, "\n{name} {value}");
        self
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

/// The open sockets of the running process.
pub(super) struct Offer {
    pub(super) process: u32,
    /// The kind of its planes by name. A newer version may have a kind that this version does not know.
    plane: String,
    takeover_socket: OwnedFd,
    links: Vec<OfferedLink>,
}

struct OfferedLink {
    /// The requested address, perhaps with port 0.
    listen: SocketAddr,
    at: SocketAddr,
    spread: String,
    seats: usize,
    members: Vec<OwnedFd>,
    /// Whether the link has an in-band BFD session.
    is_in_band: bool,
    /// The socket for in-band control packets.
    control: Option<OwnedFd>,
    /// The BPF link of the program at a device.
    link: Option<OwnedFd>,
}

impl Offer {
    pub(super) fn receive(connection: &PeerConnection) -> Result<Offer, HandoverError> {
        let mut received = connection.wait()?;
        if received.kind() != "offer" {
            return Err(received.unexpected("offer"));
        }
        let Some(takeover_socket) = received.descriptors.pop() else {
            return Err(received.unexpected("the socket of the path"));
        };
        let (process, plane, number): (u32, String, usize) =
            (received.value("process")?, received.value("plane")?, received.value("links")?);
        let mut links: Vec<OfferedLink> = Vec::new();
        loop {
            let mut received = connection.wait()?;
            let is_whole = number == links.len() && links.iter().all(OfferedLink::is_whole);
            match (received.kind(), links.last_mut()) {
                ("link", _) => links.push(OfferedLink::of(received)?),
                ("seats", Some(link)) => link.members.append(&mut received.descriptors),
                ("that is all", _) if is_whole => {
                    return Ok(Offer { process, plane, takeover_socket, links });
                }
                _ => return Err(received.unexpected("all links with their sockets")),
            }
        }
    }

    /// Checks that the settings fit the offer, and returns the number of sockets at each address.
    pub(super) fn fits(&self, wanted: &Forward) -> Result<usize, HandoverError> {
        let differs = |why: String| HandoverError::Differs { why };
        let (theirs, ours) = (self.links.len(), wanted.links.len());
        if theirs != ours {
            return Err(differs(format!("it has {theirs} links, and there are to be {ours}")));
        }
        for (link, place) in wanted.links.iter().zip(self.places(wanted)) {
            let Some(offered) = place.map(|place| &self.links[place]) else {
                let at: Vec<_> = self.links.iter().map(|offered| offered.at.to_string()).collect();
                let (listen, at) = (link.listen, at.join(", "));
                return Err(differs(format!("it does not listen at {listen} but at {at}")));
            };
            let OfferedLink { at, spread, .. } = offered;
            let wanted = link.spread_over(offered.seats).to_string();
            if *spread != wanted {
                return Err(differs(format!(
                    "packets to {at} are spread by {spread}, which cannot become {wanted}"
                )));
            }
            // A filter for control packets exists as long as the group, and a session must read the packets that it separates.
            if offered.is_in_band != link.is_in_band() {
                let (a, why) = match offered.is_in_band {
                    true => ("a", "which would have to go on"),
                    false => ("no", "which cannot begin with sockets that are open"),
                };
                return Err(differs(format!("it has {a} BFD session among the data to {at}, {why}")));
            }
        }
        let seats = self.links.iter().map(|link| link.seats).min().unwrap_or_default();
        if wanted.planes > seats {
            let planes = wanted.planes;
            return Err(differs(format!("sockets at each address: {seats}, fewer than the {planes} planes")));
        }
        // Packets that UDP_GRO has coalesced stay coalesced in the receive queue. Planes without UDP_GRO could not split them and have no
        // buffers for them. The same is assumed for planes of an unknown kind.
        let is_split = self.plane.parse().is_ok_and(|kind: PlaneKind| !kind.offloads());
        if !is_split && !wanted.kind.offloads() {
            return Err(differs(format!(
                "its planes are {}, and packets that were put together for them may wait: planes that are {} cannot take them",
                self.plane, wanted.kind
            )));
        }
        Ok(seats)
    }

    /// Returns the offered link of each requested link: the link with its bound address, or else with its requested address.
    fn places(&self, wanted: &Forward) -> Vec<Option<usize>> {
        let mut is_free = vec![true; self.links.len()];
        let by: [fn(&OfferedLink) -> SocketAddr; 2] = [|offered| offered.at, |offered| offered.listen];
        let place = |listen: SocketAddr| {
            let mut found = by.iter().flat_map(|by| {
                self.links.iter().enumerate().filter(|(_, link)| by(link) == listen).map(|(place, _)| place)
            });
            let found = found.find(|place| is_free[*place])?;
            is_free[found] = false;
            Some(found)
        };
        wanted.links.iter().map(|link| link.listen).map(place).collect()
    }

    /// Returns the groups in the order of the requested links, each with its number in the offer, and the listening socket of the takeover path.
    /// Call it only after [`Offer::fits`].
    pub(super) fn groups(self, wanted: &Forward) -> Result<(Vec<(UdpGroup, usize)>, OwnedFd), ForwardError> {
        let places = self.places(wanted);
        let mut links: Vec<Option<OfferedLink>> = self.links.into_iter().map(Some).collect();
        let mut groups = Vec::new();
        for (place, link) in places.into_iter().zip(&wanted.links) {
            let Some((place, offered)) = place.and_then(|place| Some((place, links[place].take()?))) else {
                continue;
            };
            let spread = link.spread_over(offered.seats);
            groups.push((UdpGroup::adopt(spread, offered.members, offered.control, offered.link)?, place));
        }
        Ok((groups, self.takeover_socket))
    }
}

impl OfferedLink {
    fn of(mut received: Message) -> Result<OfferedLink, HandoverError> {
        let (has_control, has_link): (bool, bool) = (received.value("control")?, received.value("link")?);
        if received.descriptors.len() != usize::from(has_control) + usize::from(has_link) {
            return Err(received.unexpected("a link with its descriptors"));
        }
        let mut descriptors = std::mem::take(&mut received.descriptors).into_iter();
        Ok(OfferedLink {
            listen: received.value("listen")?,
            at: received.value("at")?,
            spread: received.value("spread")?,
            seats: received.value("seats")?,
            members: Vec::new(),
            is_in_band: received.value("in-band")?,
            control: if has_control { descriptors.next() } else { None },
            link: descriptors.next(),
        })
    }

    fn is_whole(&self) -> bool {
        self.members.len() == self.seats
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (PeerConnection, PeerConnection) {
        let (one, other) = unix_socket::pair().unwrap();
        let path = Path::new("/there");
        (PeerConnection::new(one, path).unwrap(), PeerConnection::new(other, path).unwrap())
    }

    #[test]
    fn messages_keep_values_and_descriptors() {
        let (one, other) = pair();
        assert!(other.receive().unwrap().is_none());
        let text = Text::of("seat").with("number", 7).with("at", "[::1]:4000");
        one.send(text.as_str(), &[one.socket.as_fd()]).unwrap();
        let said = other.wait().unwrap();
        assert_eq!((said.kind(), said.descriptors.len()), ("seat", 1));
        assert_eq!(said.value::<u32>("number").unwrap(), 7);
        assert!(said.value::<std::net::SocketAddr>("at").is_ok());
        assert!(said.value::<u32>("at").is_err() && said.value::<u32>("num").is_err());
        drop(said);
        one.send_text("no\nnot like this").unwrap();
        assert!(matches!(other.wait(), Err(HandoverError::Refused { why }) if why == "not like this"));
        drop(one);
        assert!(matches!(other.wait(), Err(HandoverError::Gone { .. })));
        assert!(matches!(other.send_text("x"), Err(HandoverError::Gone { .. })));
        assert!(other.wait_for_end(PATIENCE));
    }

    #[test]
    fn a_message_after_the_timeout_fails_at_the_sender() {
        let (one, other) = pair();
        let silent = one.wait_or_shut(Duration::from_millis(1)).unwrap_err();
        assert!(matches!(silent, HandoverError::Silent { .. }), "{silent}");
        assert!(matches!(other.send_text("taken"), Err(HandoverError::Gone { .. })));
        let (one, other) = pair();
        other.send_text("taken").unwrap();
        assert_eq!(one.wait_or_shut(Duration::ZERO).unwrap().kind(), "taken");
    }
}
