//! The network namespace of a test: its addresses and connections, readings of it, and their findings.

use std::any::type_name_of_val;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_observe::doctor::{Diagnosis, Limits, diagnose};
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_record::snapshot::{FailedCall, Owner, Part, PortSearch, Snapshot, TracedConnects};
use fourtuple_record::{Advice, Finding, Proof, Severity};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{device, netns};
use fourtuple_testing::process::{Python, undisturbed};
use fourtuple_testing::{in_namespace, keep_time_wait, set_sysctl, skip};

/// Reads the namespace, with the search of kernels since Linux 6.8: the command probes the search before it reads.
pub(crate) fn read(reader: &mut Reader) -> Snapshot {
    let mut snapshot = undisturbed(|| reader.read());
    snapshot.search = Part::Seen(PortSearch { default: "parity".to_owned(), option: "linear".to_owned() });
    // They are of the whole host, and other tests flood it.
    if let Part::Seen(counters) = &mut snapshot.counters {
        counters.retain(|name, _| !name.starts_with("softnet."));
    }
    snapshot
}

/// Reads the namespace once.
pub(crate) fn now() -> Snapshot {
    read(&mut Reader::new(Path::new("/")))
}

/// Diagnoses the namespace as it is.
pub(crate) fn diagnosis() -> Diagnosis {
    diagnose(&now(), &Limits::default())
}

/// Returns the findings of a rule; fails if the rule could not be checked.
pub(crate) fn findings(id: &str) -> Vec<Finding> {
    of(diagnosis(), id)
}

/// Returns the findings of a rule in a snapshot; fails if the rule could not be checked.
pub(crate) fn findings_in(snapshot: &Snapshot, id: &str) -> Vec<Finding> {
    of(diagnose(snapshot, &Limits::default()), id)
}

/// Returns the findings of a rule; fails if the rule could not be checked.
pub(crate) fn of(diagnosis: Diagnosis, id: &str) -> Vec<Finding> {
    assert!(diagnosis.checked.iter().any(|checked| checked == id), "{id}: {:?}", diagnosis.unchecked);
    diagnosis.findings.into_iter().filter(|finding| finding.id == id).collect()
}

/// Runs a test in a namespace of its own; reports it as skipped without python3. The closure has to be of the test function itself,
/// whose name [`in_namespace`] and the report take from it.
pub(crate) fn with_python<F: FnOnce() + Send + 'static>(test: F) {
    let path = type_name_of_val(&test);
    if Python::is_installed(path.rsplit("::").nth(1).expect("a closure of a function")) {
        in_namespace(test);
    }
}

/// Returns a part of a snapshot that was read, for a change.
#[track_caller]
pub(crate) fn known<T>(part: &mut Part<T>) -> &mut T {
    match part {
        Part::Seen(value) => value,
        Part::Hidden(reason) => panic!("{reason}"),
    }
}

/// Returns whether a text has a part; `^` and `$` tie the part to the start and to the end.
pub(crate) fn has(text: &str, part: &str) -> bool {
    match (part.strip_prefix('^'), part.strip_suffix('$')) {
        (Some(_), Some(_)) => text == &part[1..part.len() - 1],
        (Some(start), None) => text.starts_with(start),
        (None, Some(end)) => text.ends_with(end),
        (None, None) => text.contains(part),
    }
}

/// Checks that the verdict of a finding has these parts; `^` and `$` are its start and its end.
#[track_caller]
pub(crate) fn says(finding: &Finding, parts: &[&str]) {
    for part in parts {
        assert!(has(&finding.verdict, part), "no {part:?} in {finding:#?}");
    }
}

/// Checks that lines of the evidence have these parts; `^` and `$` are the start and the end of a line.
#[track_caller]
pub(crate) fn shows(finding: &Finding, parts: &[&str]) {
    for part in parts {
        assert!(finding.evidence.iter().any(|line| has(line, part)), "no {part:?} in {finding:#?}");
    }
}

/// Repeats an observation until it holds; fails after a minute.
#[track_caller]
pub(crate) fn until<T>(what: &str, mut observe: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(seen) = observe() {
            return seen;
        }
        assert!(Instant::now() < end, "{what}: not reached in a minute; {:#?}", diagnosis());
        thread::sleep(Duration::from_millis(2));
    }
}

/// Executes `sysctl -w NAME=VALUE ...` of a remedy in the namespace.
#[track_caller]
pub(crate) fn apply(advice: &Advice) {
    assert!(advice.is_command && advice.proof == Proof::Calculation, "{advice:?}");
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

pub(crate) fn owner(pid: u32, name: &str, sockets: u32) -> Owner {
    Owner { pid, name: name.to_owned(), sockets }
}

/// Returns calls of TCP sockets that failed, as a trace counts them.
pub(crate) fn failed_call(owner: Owner, call: &str, errno: &str, address: &str) -> FailedCall {
    FailedCall {
        call: call.to_owned(),
        errno: errno.to_owned(),
        protocol: "tcp".to_owned(),
        processes: 1,
        address: Some(address.to_owned()),
        failed: owner.sockets.into(),
        owner,
        ..FailedCall::default()
    }
}

/// Returns connects whose searches are long, as a trace counts them.
pub(crate) fn traced_connects(owner: Owner, destination: SocketAddr) -> TracedConnects {
    TracedConnects {
        processes: 1,
        owner,
        destination,
        searches: 1_000,
        search_mean_ns: 2_300_000,
        search_p99_ns: 4_700_000,
        ..TracedConnects::default()
    }
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

/// Returns the finding of a rule once its verdict has a part, as [`says`] compares it.
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

/// Sends data on connections: those that have carried none for 5 s seem to be a leak.
pub(crate) fn use_all(connections: &[TcpStream]) {
    connections.iter().for_each(|mut connection| connection.write_all(b"x").unwrap());
}

/// Returns whether half of the connections of the largest tuple have carried data in the last 5 s.
pub(crate) fn are_used(snapshot: &Snapshot) -> bool {
    let idle = snapshot.connections.seen().unwrap().tuples[0].idle;
    idle.expect("the tuple has a quarter of the ports").median_ns < 5_000_000_000
}

/// Reads the namespace right after data on its connections, again if a busy host took long in between.
#[track_caller]
pub(crate) fn now_used(connections: &[TcpStream]) -> Snapshot {
    let mut reader = Reader::new(Path::new("/"));
    // The first reading loads BPF programs, which takes seconds on a busy host.
    read(&mut reader);
    until("a reading right after the data", || {
        use_all(connections);
        Some(read(&mut reader)).filter(are_used)
    })
}

/// Opens connections one after the other and closes each on the client's side first.
pub(crate) fn connect_and_close(server: &TcpListener, number: usize) {
    keep_time_wait();
    for _ in 0..number {
        let client = TcpStream::connect(server.local_addr().unwrap()).unwrap();
        close(client, server.accept().unwrap().0);
    }
}

/// Does the same towards a new server, and returns the server and the finding of a rule whose verdict has a part, as [`says`] compares it. The
/// rules count the closes of the last 10 s: where a busy host took longer, another namespace begins anew.
#[track_caller]
pub(crate) fn found_after_closes(range: &str, number: usize, id: &str, text: &str) -> (TcpListener, Finding) {
    let mut seen = Vec::new();
    for _ in 0..6 {
        small_range(range);
        let (server, _) = server(NEAR, 4000);
        let begun = Instant::now();
        connect_and_close(&server, number);
        while begun.elapsed() < Duration::from_secs(10) {
            seen = findings(id);
            if let Some(finding) = seen.iter().find(|finding| has(&finding.verdict, text)) {
                return (server, finding.clone());
            }
        }
        netns::enter_new().unwrap();
    }
    panic!("no {text:?} in {seen:#?}");
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

/// Returns the findings of a rule after two readings of the namespace with an event between them.
pub(crate) fn between(id: &str, event: impl FnOnce()) -> Vec<Finding> {
    findings_in(&snapshot(event), id)
}

/// Returns the snapshot of two readings of the namespace with an event between them.
pub(crate) fn snapshot(event: impl FnOnce()) -> Snapshot {
    let mut reader = Reader::new(Path::new("/"));
    read(&mut reader);
    event();
    read(&mut reader)
}

/// Returns the only finding, and checks its severity and a part of its verdict.
#[track_caller]
pub(crate) fn only(found: &[Finding], severity: Severity, verdict: &str) -> Finding {
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].severity, severity, "{}", found[0].verdict);
    assert!(found[0].verdict.contains(verdict), "{} does not contain {verdict}", found[0].verdict);
    found[0].clone()
}

/// Applies the advice whose action contains a text; the rule has no finding after it.
#[track_caller]
pub(crate) fn cured(finding: &Finding, text: &str) {
    apply(advice(finding, text));
    let left = findings(&finding.id);
    assert!(left.is_empty(), "{left:#?}");
}

/// Sets the sysctl of the first sysctl whose effect was computed.
#[track_caller]
pub(crate) fn apply_first(finding: &Finding) {
    let advice = finding
        .now
        .iter()
        .find(|advice| advice.proof == Proof::Calculation && advice.action.starts_with("sysctl -w "));
    apply(advice.unwrap_or_else(|| panic!("no sysctl in {finding:?}")));
}
