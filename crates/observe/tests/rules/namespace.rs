//! Addresses, connections and findings in the network namespace of a test.

use std::io::Read;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_record::snapshot::Snapshot;
use fourtuple_record::{Advice, Finding};
use fourtuple_syscalls::device;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::{keep_time_wait, set_sysctl, skip};

use crate::scene::{findings, findings_in, has, now, until};

/// Returns the only finding of a rule in a snapshot.
pub(crate) fn the_finding(snapshot: &Snapshot, id: &str) -> Finding {
    let mut found = findings_in(snapshot, id);
    assert_eq!(found.len(), 1, "{id}: {found:#?}\n{:#?}", snapshot.connections);
    found.remove(0)
}

/// Returns the finding of a rule once there is one; another test of this process may hold copies of closed sockets until exec().
pub(crate) fn until_found(id: &str) -> Finding {
    until(id, || findings(id).into_iter().next())
}

/// Returns the advice whose action contains a text.
pub(crate) fn advice<'a>(finding: &'a Finding, text: &str) -> &'a Advice {
    let mut all = finding.now.iter().chain(&finding.proper);
    all.find(|advice| advice.action.contains(text)).unwrap_or_else(|| panic!("no {text:?} in {finding:#?}"))
}

/// Returns the process of the test as verdicts write it: `[1234]`.
pub(crate) fn this_process() -> String {
    format!("[{}]", std::process::id())
}

/// Addresses that are local, but not loopback addresses.
pub(crate) const NEAR: &str = "10.0.0.1";
pub(crate) const FAR: &str = "10.0.0.2";

/// Adds [`NEAR`] and [`FAR`] to the loopback device.
pub(crate) fn add_addresses() {
    for address in [NEAR, FAR] {
        device::add_address("lo", ip(address), 24).unwrap();
    }
}

pub(crate) const RANGE: &str = "net.ipv4.ip_local_port_range";

/// Sets the range of ephemeral ports, and adds [`NEAR`] and [`FAR`].
pub(crate) fn small_range(range: &str) {
    add_addresses();
    set_sysctl(RANGE, range);
}

/// Returns the finding of a rule once its verdict has a part, as [`crate::scene::says`] compares it.
pub(crate) fn until_says(id: &str, text: &str) -> Finding {
    until(id, || findings(id).pop().filter(|finding| has(&finding.verdict, text)))
}

pub(crate) fn ip(address: &str) -> IpAddr {
    address.parse().unwrap()
}

/// A server that accepts.
pub(crate) fn server(address: &str, port: u16) -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind((address, port)).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Opens connections.
pub(crate) fn connect(to: SocketAddr, number: usize) -> Vec<TcpStream> {
    (0..number).map(|_| TcpStream::connect(to).unwrap()).collect()
}

/// Opens connections one after the other and closes each on the client's side first.
pub(crate) fn connect_and_close(server: &TcpListener, number: usize) {
    keep_time_wait();
    for _ in 0..number {
        let client = TcpStream::connect(server.local_addr().unwrap()).unwrap();
        close(client, server.accept().unwrap().0);
    }
}

/// Closes a connection on one side, and on the second side when the FIN has arrived: both sides would be in TIME_WAIT otherwise.
pub(crate) fn close(first: TcpStream, mut second: TcpStream) {
    drop(first);
    assert_eq!(second.read(&mut [0]).unwrap(), 0);
}

/// A TCP socket that is bound.
pub(crate) fn bound(address: &str, port: u16) -> OwnedFd {
    let address = SocketAddr::new(ip(address), port);
    let socket = socket::open(Transport::Tcp, address, false).unwrap();
    socket::bind(socket.as_fd(), address).unwrap();
    socket
}

/// Returns whether a BPF iterator reads the sockets; reports the rest of the test as skipped otherwise, as /proc shows less.
pub(crate) fn reads_by_bpf(test: &str) -> bool {
    let is = now().connections.seen().unwrap().processes_by == "bpf";
    if !is {
        skip(test, "bpf", "the sockets are read without a BPF iterator");
    }
    is
}

/// Waits until the namespace has this number of TIME_WAIT sockets.
pub(crate) fn until_time_wait(number: u64) {
    until("TIME_WAIT", || (now().memory.seen().unwrap().time_wait == number).then_some(()));
}
