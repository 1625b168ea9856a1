//! A worker for UDP: it sends each datagram back with a TTL that is one lower than the received TTL.
//!
//! Two echo servers could answer each other endlessly after one datagram with a forged source address. The TTL of a datagram
//! therefore decreases with each reply, and a datagram whose TTL would become 0 is dropped. Datagrams from ports below 1024,
//! where other echo services are, and from the own address of the server get no reply.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use fourtuple_syscalls::datagram::{Batch, Datagram};
use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::{errno_name, option, socket};

use crate::counts::Counts;
use crate::stop::Stop;
use crate::work::Work;

const SOCKET: u64 = 0;
const STOP: u64 = 1;

/// The pause after a failed receive call.
const BACK_OFF: Duration = Duration::from_millis(10);

/// Maximum length of a datagram.
const ROOM: usize = 64 * 1024;
/// Lowest port of a client that gets a reply.
const FIRST_CLIENT_PORT: u16 = 1024;

pub(crate) struct Datagrams {
    epoll: Epoll,
    replies: Replies,
    stop: Stop,
}

/// The state needed to reply.
struct Replies {
    socket: OwnedFd,
    own: SocketAddr,
    request: usize,
    work: Work,
    counts: Arc<Counts>,
    /// The TTL set on the socket; `None` before the first reply.
    hops: Option<u8>,
}

impl Datagrams {
    pub(crate) fn new(
        socket: &OwnedFd,
        request: usize,
        work: Work,
        stop: Stop,
        counts: Arc<Counts>,
    ) -> io::Result<Datagrams> {
        let epoll = Epoll::new()?;
        let socket = socket.try_clone()?;
        option::set_receive_hops(socket.as_fd(), true)?;
        let own = socket::local_address(socket.as_fd())?;
        epoll.add(socket.as_fd(), SOCKET, Interest::READ)?;
        epoll.add(stop.as_fd(), STOP, Interest::READ)?;
        Ok(Datagrams { epoll, replies: Replies { socket, own, request, work, counts, hops: None }, stop })
    }

    /// Serves until the stop flag is set.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = [Ready::NONE; 2];
        let mut batch = Batch::new(1, ROOM);
        while !self.stop.is_set() {
            self.epoll.wait(&mut events, None)?;
            // Both events are handled the same way: the loop checks the stop flag and receives until EAGAIN.
            while !self.stop.is_set() {
                self.replies.work.stall();
                match batch.receive(self.replies.socket.as_fd()) {
                    Ok(_) => batch.iter().for_each(|datagram| self.replies.answer(datagram)),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => {
                        self.replies.counts.error(&errno_name(&error).to_string());
                        // The failure may repeat at once.
                        thread::sleep(BACK_OFF);
                    }
                }
            }
        }
        Ok(())
    }
}

impl Replies {
    fn answer(&mut self, datagram: Datagram<'_>) {
        self.counts.received_bytes.add(datagram.bytes.len() as u64);
        if datagram.bytes.len() < self.request {
            self.counts.error("short-datagram");
            return;
        }
        let Some(client) = datagram.from() else { return };
        let hops = datagram.hops.unwrap_or(u8::MAX).saturating_sub(1);
        if hops == 0 || self.is_own(client) || client.port() < FIRST_CLIENT_PORT {
            self.counts.error("reflected-datagram");
            return;
        }
        self.counts.requests.add(1);
        self.work.serve();
        match self.send(datagram.bytes, client, hops) {
            Ok(count) => self.counts.sent_bytes.add(count as u64),
            Err(error) => self.counts.error(&errno_name(&error).to_string()),
        }
    }

    /// Returns whether a client is the server itself. A server at the unspecified address has each address of the host.
    fn is_own(&self, client: SocketAddr) -> bool {
        let own = self.own;
        client.port() == own.port() && (own.ip().is_unspecified() || client.ip() == own.ip())
    }

    fn send(&mut self, bytes: &[u8], client: SocketAddr, hops: u8) -> io::Result<usize> {
        if self.hops.replace(hops) != Some(hops) {
            option::set_hops(self.socket.as_fd(), hops)?;
        }
        socket::send_to(self.socket.as_fd(), bytes, client)
    }
}
