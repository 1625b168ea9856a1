//! A worker for UDP: one socket, every datagram sent back as it came.

use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use fourtuple_syscalls::epoll::{Epoll, Interest, Ready};
use fourtuple_syscalls::errno_name;

use crate::counts::Counts;
use crate::stop::Stop;
use crate::work::Work;

const SOCKET: u64 = 0;
const STOP: u64 = 1;

/// No datagram is longer.
const ROOM: usize = 64 * 1024;

pub(crate) struct Datagrams {
    epoll: Epoll,
    socket: UdpSocket,
    request: usize,
    work: Work,
    stop: Stop,
    counts: Arc<Counts>,
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
        let socket = UdpSocket::from(socket.try_clone()?);
        epoll.add(socket.as_fd(), SOCKET, Interest::READ)?;
        epoll.add(stop.as_fd(), STOP, Interest::READ)?;
        Ok(Datagrams { epoll, socket, request, work, stop, counts })
    }

    /// Serves until it is told to stop.
    pub(crate) fn run(mut self) -> io::Result<()> {
        let mut events = [Ready::NONE; 2];
        let mut room = vec![0; ROOM];
        while !self.stop.is_set() {
            self.epoll.wait(&mut events, None)?;
            // Whatever woke it: if it was told to stop, it does; else there are datagrams.
            while !self.stop.is_set() {
                self.work.stall();
                match self.socket.recv_from(&mut room) {
                    Ok((count, client)) => self.answer(&room[..count], client),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => self.counts.error(&errno_name(&error)),
                }
            }
        }
        Ok(())
    }

    fn answer(&mut self, datagram: &[u8], client: std::net::SocketAddr) {
        self.counts.received_bytes.add(datagram.len() as u64);
        if datagram.len() < self.request {
            self.counts.error("short-datagram");
            return;
        }
        self.counts.requests.add(1);
        self.work.serve();
        match self.socket.send_to(datagram, client) {
            Ok(count) => self.counts.sent_bytes.add(count as u64),
            Err(error) => self.counts.error(&errno_name(&error)),
        }
    }
}
