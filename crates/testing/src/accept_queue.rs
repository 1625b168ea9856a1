//! Listeners whose accept queue is full.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use fourtuple_syscalls::option;

/// Opens a listener whose accept queue is full: the kernel drops each further SYN. Returns the connection in the queue too.
pub fn full_listener(address: &str) -> (OwnedFd, SocketAddr, TcpStream) {
    // With a backlog of 0 the queue takes one connection.
    let (socket, address) = super::listener(address, 0);
    let queued = TcpStream::connect(address).expect("space for one connection");
    while option::accept_queue(socket.as_fd()).expect("a listener") == 0 {
        thread::yield_now();
    }
    (socket, address, queued)
}

/// Reads the kernel's counter ListenOverflows of the current network namespace: SYNs that found an accept queue full.
pub fn listen_overflows() -> u64 {
    tcp_counter("ListenOverflows")
}

/// Reads a counter of the group TcpExt of the current network namespace.
pub fn tcp_counter(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/thread-self/net/netstat").expect("procfs");
    let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = (lines.next().expect("names"), lines.next().expect("values"));
    let place = names.split(' ').position(|other| other == name).expect("the counter");
    values.split(' ').nth(place).and_then(|value| value.parse().ok()).expect("a number")
}
