//! A group of listeners with SO_REUSEPORT and the program that chooses among them, in the test's namespace.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::io;
use std::net::{SocketAddr, SocketAddrV4, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_bpf::{BpfError, LeastBusy};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};

/// The deadline for each step, generous enough for a slow machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) struct Group {
    pub(crate) busy: LeastBusy,
    /// The open listener of each seat, or `None` after it is closed.
    pub(crate) listeners: Vec<Option<OwnedFd>>,
    pub(crate) address: SocketAddr,
}

/// Returns the loaded program, or counts a skip if BPF is not available.
pub(crate) fn loaded<T>(test: &str, result: Result<T, BpfError>) -> Option<T> {
    match result {
        Ok(loaded) => Some(loaded),
        Err(error @ (BpfError::NotPermitted { .. } | BpfError::Absent { .. })) => {
            fourtuple_testing::skip(test, "bpf", &error.to_string());
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

/// Opens a listener in the group of `port`, or of a new port for 0.
pub(crate) fn listen(address: &str, port: u16) -> (OwnedFd, SocketAddr) {
    let wanted = SocketAddr::new(address.parse().unwrap(), port);
    let listener = socket::open(Transport::Tcp, wanted, true).unwrap();
    assert_eq!(option::set_reuse_port(listener.as_fd()).unwrap(), Answer::Done);
    socket::bind(listener.as_fd(), wanted).unwrap();
    socket::listen(listener.as_fd(), 4096).unwrap();
    let address = socket::local_address(listener.as_fd()).unwrap();
    (listener, address)
}

/// Waits until the condition holds.
pub(crate) fn until(what: &str, is_so: impl Fn() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !is_so() {
        assert!(Instant::now() < end, "never: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

impl Group {
    /// Opens one listener per seat, with all seats taken, or skips the test.
    pub(crate) fn open(test: &str, seats: usize) -> Option<Group> {
        Self::open_at(test, "127.0.0.1", seats)
    }

    pub(crate) fn open_at(test: &str, address: &str, seats: usize) -> Option<Group> {
        fourtuple_testing::set_sysctl("net.core.somaxconn", "4096");
        let busy = loaded(test, LeastBusy::load(seats))?;
        let (first, address) = listen(address, 0);
        busy.attach(first.as_fd()).unwrap();
        let mut listeners = vec![Some(first)];
        for _ in 1..seats {
            listeners.push(Some(listen(&address.ip().to_string(), address.port()).0));
        }
        for (seat, listener) in listeners.iter().enumerate() {
            busy.seat_taken(seat, listener.as_ref().unwrap().as_fd()).unwrap();
        }
        Some(Group { busy, listeners, address })
    }

    pub(crate) fn v4(&self) -> SocketAddrV4 {
        let SocketAddr::V4(address) = self.address else { panic!("IPv4 only") };
        address
    }

    pub(crate) fn connect(&self) -> TcpStream {
        TcpStream::connect_timeout(&self.address, DEADLINE).unwrap()
    }

    /// Accepts from a seat's queue, without waiting.
    pub(crate) fn accept(&self, seat: usize) -> Option<OwnedFd> {
        match socket::accept(self.listeners[seat].as_ref()?.as_fd()) {
            Ok(connection) => Some(connection),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => panic!("accept: {error}"),
        }
    }

    /// Accepts the next connection of any seat and counts it as a worker does. Returns the connection and the seat.
    pub(crate) fn accept_anywhere(&self) -> (usize, OwnedFd) {
        let end = Instant::now() + DEADLINE;
        loop {
            for seat in 0..self.listeners.len() {
                if let Some(connection) = self.accept(seat) {
                    let counters = self.busy.seat(seat).unwrap();
                    counters.opened();
                    counters.accepted();
                    return (seat, connection);
                }
            }
            assert!(Instant::now() < end, "no connection came");
            thread::yield_now();
        }
    }

    /// Makes and accepts this many connections in sequence, keeps them open, and returns how many each seat got.
    pub(crate) fn shares(&self, connections: usize) -> Vec<usize> {
        let mut shares = vec![0; self.listeners.len()];
        let mut open = Vec::new();
        for _ in 0..connections {
            let client = self.connect();
            let (seat, server) = self.accept_anywhere();
            shares[seat] += 1;
            open.push((client, server, seat));
        }
        for (_, _, seat) in open {
            self.busy.seat(seat).unwrap().closed();
        }
        shares
    }

    /// Returns the length of a seat's accept queue.
    pub(crate) fn queued(&self, seat: usize) -> u64 {
        let listener = self.listeners[seat].as_ref();
        listener.map_or(0, |listener| option::accept_queue(listener.as_fd()).unwrap().into())
    }

    pub(crate) fn all_queued(&self) -> Vec<u64> {
        (0..self.listeners.len()).map(|seat| self.queued(seat)).collect()
    }

    /// Returns for every seat the number of connections that are claimed and not accepted.
    pub(crate) fn coming(&self) -> Vec<i64> {
        let seats = 0..self.listeners.len();
        seats
            .map(|seat| {
                let counters = self.busy.seat(seat).unwrap().counters();
                counters.claimed as i64 - counters.accepted as i64
            })
            .collect()
    }
}
