//! Addresses, connections and findings in the network namespace of a test.
#![allow(dead_code, reason = "each test file uses a part")]

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use fourtuple_doctor::{Diagnosis, Limits, diagnose};
use fourtuple_host::snapshot::Reader;
use fourtuple_record::snapshot::{Part, PortSearch, Snapshot};
use fourtuple_record::{Advice, Finding};
use fourtuple_syscalls::device;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::set_sysctl;

/// Reads the namespace as it is, with the search of kernels since Linux 6.8.
pub(crate) fn snapshot() -> Snapshot {
    read(&mut Reader::new(Path::new("/")))
}

/// Reads the namespace again.
pub(crate) fn read(reader: &mut Reader) -> Snapshot {
    let mut snapshot = reader.read();
    // The command probes the search before it reads.
    snapshot.search = Part::Seen(PortSearch { default: "parity".to_owned(), option: "linear".to_owned() });
    snapshot
}

/// Diagnoses the namespace as it is.
pub(crate) fn diagnosis() -> Diagnosis {
    diagnose(&snapshot(), &Limits::default())
}

/// Returns the findings of a rule; fails if the rule could not be checked.
pub(crate) fn findings(id: &str) -> Vec<Finding> {
    findings_in(&snapshot(), id)
}

/// Returns the findings of a rule in a snapshot; fails if the rule could not be checked.
pub(crate) fn findings_in(snapshot: &Snapshot, id: &str) -> Vec<Finding> {
    let diagnosis = diagnose(snapshot, &Limits::default());
    assert!(diagnosis.checked.iter().any(|checked| checked == id), "{id}: {:?}", diagnosis.unchecked);
    diagnosis.findings.into_iter().filter(|finding| finding.id == id).collect()
}

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

/// Repeats until a condition holds.
pub(crate) fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    for _ in 0..5_000 {
        if let Some(value) = condition() {
            return value;
        }
    }
    panic!("{what}: not reached; {:#?}", diagnosis());
}

/// Returns the advice whose action contains a text.
pub(crate) fn advice<'a>(finding: &'a Finding, text: &str) -> &'a Advice {
    let mut all = finding.now.iter().chain(&finding.proper);
    all.find(|advice| advice.action.contains(text)).unwrap_or_else(|| panic!("no {text:?} in {finding:#?}"))
}

/// Executes `sysctl -w NAME=VALUE ...` of a remedy in the namespace.
pub(crate) fn apply(advice: &Advice) {
    assert!(advice.is_command && advice.recomputed, "{advice:?}");
    let mut rest = advice.action.strip_prefix("sysctl -w ").expect("a sysctl");
    while let Some((name, after)) = rest.split_once('=') {
        let (value, next) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').expect("a closing quote"),
            None => after.split_once(' ').unwrap_or((after, "")),
        };
        set_sysctl(name, value);
        rest = next.trim_start();
    }
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
    for _ in 0..number {
        let client = TcpStream::connect(server.local_addr().unwrap()).unwrap();
        let accepted = server.accept().unwrap();
        drop(client);
        drop(accepted);
    }
}

/// A TCP socket that is bound.
pub(crate) fn bound(address: &str, port: u16) -> OwnedFd {
    let address = SocketAddr::new(ip(address), port);
    let socket = socket::open(Transport::Tcp, address, false).unwrap();
    socket::bind(socket.as_fd(), address).unwrap();
    socket
}

/// Returns TIME_WAIT sockets of the namespace.
pub(crate) fn time_wait() -> u64 {
    snapshot().memory.seen().unwrap().time_wait
}
