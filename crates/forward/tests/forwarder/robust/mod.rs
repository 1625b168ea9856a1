//! Failures around a forwarder: each is counted, and later packets are forwarded.

mod circulate;
mod icmp;
mod loops;
mod mtu;
mod overflow;
mod replies;

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::kinds;
use fourtuple_forward::{Drop, Forward, Link, PlaneCounts, PlaneKind, Running};
use fourtuple_syscalls::datagram::{Batch, Outgoing};
use fourtuple_syscalls::option;
use fourtuple_syscalls::socket::wait_readable;

/// A time limit that no working machine reaches.
const LONG: Duration = Duration::from_secs(60);

fn socket(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind(address).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

/// Returns all plane kinds that this machine supports.
fn kinds() -> impl Iterator<Item = PlaneKind> {
    kinds::kinds("robust").into_iter()
}

fn start(link: Link, kind: PlaneKind) -> Running {
    Forward { kind, ..Forward::new(link, 1) }.start().unwrap()
}

/// Drains the forwarder and returns the counters of its only plane for its only link.
fn drain(running: Running) -> PlaneCounts {
    running.drain().unwrap().remove(0).remove(0)
}

fn until(mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < end, "not within {LONG:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Checks that the counters account for every packet.
fn require_balance(counts: &PlaneCounts, what: &str) {
    // No plane receives these.
    let is_received = |reason: &Drop| !matches!(reason, Drop::Overflow | Drop::Checksum);
    let dropped: u64 =
        counts.dropped.iter().filter(|(reason, _)| is_received(reason)).map(|(_, number)| number).sum();
    assert_eq!(counts.received, counts.sent + dropped, "{what}: {counts:?}");
}

/// Sends `packets` packets of `bytes` bytes as one message, which the kernel segments before it reaches a socket without
/// UDP_GRO.
fn burst(sender: &UdpSocket, to: SocketAddr, packets: usize, bytes: usize) {
    let mut batch = Batch::new(1, packets * bytes);
    batch.room_mut(0).fill(0xa5);
    let mut outgoing = Outgoing::new();
    outgoing.message(Some(to), Some(bytes as u16));
    outgoing.part(0, 0..packets * bytes);
    assert_eq!(outgoing.send(sender.as_fd(), &batch, 0).unwrap(), 1);
}

/// Opens a socket with UDP_GRO, which receives the packets of one message together.
fn gathering_socket(address: SocketAddr) -> UdpSocket {
    let socket = socket(&address.to_string());
    let _ = option::set_udp_gro(socket.as_fd(), true).unwrap();
    socket
}

/// Sends until a packet arrives. Kernel workers make devices and addresses usable some time after their creation
/// (`linkwatch_event`, `addrconf_dad_work`), and earlier packets are lost.
fn reach(there: &UdpSocket) {
    let to = there.local_addr().unwrap();
    let from = socket(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" });
    there.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    // A call that fails now may succeed at the next attempt.
    until(|| from.send_to(b"?", to).is_ok() && there.recv(&mut [0; 10]).is_ok());
}

/// Receives `packets` packets of `bytes` bytes at a [`gathering_socket`]. Returns whether some of them came as one message.
fn take(target: &UdpSocket, packets: usize, bytes: usize) -> bool {
    let mut batch = Batch::new(1, 65_536);
    let (mut got, mut is_one) = (0, false);
    while got < packets {
        assert!(wait_readable(target.as_fd(), Some(LONG)).unwrap(), "{got} of {packets}");
        batch.receive(target.as_fd()).unwrap();
        for datagram in batch.iter() {
            assert_eq!(datagram.bytes.len() % bytes, 0, "{:?}", datagram.segment);
            assert!(datagram.bytes.iter().all(|byte| *byte == 0xa5));
            got += datagram.bytes.len() / bytes;
            is_one |= datagram.bytes.len() > bytes;
        }
    }
    assert_eq!(got, packets);
    is_one
}
