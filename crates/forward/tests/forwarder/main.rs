//! Forwarders of every kind of plane, on real sockets. None of these tests starts a process: until its exec, a child would hold the
//! ports of sockets that other tests close.

mod bfd;
mod clients;
mod flood;
#[path = "../kinds/mod.rs"]
mod kinds;
mod planes;
mod robust;
mod sources;
mod take_over;

use std::net::{ToSocketAddrs, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_forward::bfd::State;
use fourtuple_forward::{Forward, Link, PlaneKind, Running, SessionReport};
use fourtuple_testing::stream::LONG;

fn socket(address: impl ToSocketAddrs) -> UdpSocket {
    let socket = UdpSocket::bind(address).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

fn start(link: Link, kind: PlaneKind, planes: usize) -> Running {
    Forward { kind, ..Forward::new(link, planes) }.start().unwrap()
}

/// Returns the only BFD session.
fn session(running: &Running) -> SessionReport {
    let mut sessions = running.bfd();
    assert_eq!(sessions.len(), 1);
    sessions.remove(0)
}

fn is_up(running: &Running) -> bool {
    session(running).report.state == State::Up
}

#[track_caller]
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < LONG, "{what} did not come about");
        thread::sleep(Duration::from_millis(1));
    }
}

#[track_caller]
fn until(condition: impl FnMut() -> bool) {
    wait_until("what the test waits for", condition);
}
