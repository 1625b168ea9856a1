//! The diagnosis of the calling thread's network namespace.

use std::any::type_name_of_val;
use std::net::SocketAddr;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_observe::doctor::{Diagnosis, Limits, diagnose};
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_record::snapshot::{FailedCall, Owner, Part, PortSearch, Snapshot, TracedConnects};
use fourtuple_record::{Advice, Finding, Proof};
use fourtuple_testing::python;
use fourtuple_testing::{in_namespace, set_sysctl, starting};

/// Reads the namespace, with the search of kernels since Linux 6.8: the command probes the search before it reads.
pub(crate) fn read(reader: &mut Reader) -> Snapshot {
    let mut snapshot = starting::undisturbed(|| reader.read());
    snapshot.search = Part::Seen(PortSearch { default: "parity".to_owned(), option: "linear".to_owned() });
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
    if python::is_installed(path.rsplit("::").nth(1).expect("a closure of a function")) {
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
