//! Runs a trace of this process while the test does something, and selects results.
#![allow(dead_code, reason = "each test file uses a part")]

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::process;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use fourtuple_bpf::BpfError;
use fourtuple_observe::trace::{Connect, Instrument, Outcome, Results, TraceError};
use fourtuple_record::{
    Distribution, Remark, TraceAcceptResults, TraceConnectResults, TraceLocksResults, TraceTuple,
};
use fourtuple_syscalls::netns;
use fourtuple_testing::{StopOnDrop, in_namespace_of, skip, test_of};

/// Runs a test, which gets its name, in a namespace of its own. The closure has to be of the test function itself.
pub(crate) fn named<T>(test: impl FnOnce(&str) -> T + Send + 'static) {
    let name = test_of(&test);
    in_namespace_of(name.clone(), move || {
        test(&name);
    });
}

/// Returns a trace of connects of this process to `destination` in this network namespace: tests that run at the same time may have the same
/// destination.
pub(crate) fn to(destination: SocketAddr) -> Connect {
    Connect {
        process: Some(process::id()),
        network: Some(own_network()),
        address: Some(destination.ip()),
        port: Some(destination.port()),
        ..Connect::default()
    }
}

/// Traces while `program` runs in the same namespace. Returns `None` and reports a skipped test where the host lacks what
/// the trace needs.
pub(crate) fn traced<I: Instrument + Sync, T>(
    test: &str,
    instrument: &I,
    program: impl FnOnce() -> T,
) -> Option<(T, Outcome<Results<I>>)>
where
    Results<I>: Send + std::fmt::Debug,
{
    let stop = AtomicBool::new(false);
    let (attached, ready) = mpsc::channel();
    thread::scope(|scope| {
        let tracer = scope.spawn(|| instrument.run(&stop, || attached.send(()).unwrap(), |_| ()));
        while ready.recv_timeout(Duration::from_millis(20)).is_err() {
            if tracer.is_finished() {
                let error = tracer.join().unwrap().expect_err("the trace ended before it was attached");
                let need = need(&error).unwrap_or_else(|| panic!("{error:?}"));
                skip(test, need, &error.to_string());
                return None;
            }
        }
        let stop_tracer = StopOnDrop(&stop);
        let known = program();
        drop(stop_tracer);
        Some((known, tracer.join().unwrap().unwrap()))
    })
}

/// Returns the inode of the network namespace of this thread.
pub(crate) fn own_network() -> u32 {
    fs::metadata("/proc/thread-self/ns/net").unwrap().ino() as u32
}

/// Runs `work` in a new network namespace, on a thread of this process.
pub(crate) fn elsewhere<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let enter = || {
        netns::enter_new().unwrap();
        work()
    };
    thread::scope(|scope| scope.spawn(enter).join().unwrap())
}

/// Returns the facility that the host lacks for a trace; `None` if the error is a defect.
fn need(error: &TraceError) -> Option<&'static str> {
    use BpfError::{Absent, NotPermitted};
    match error {
        TraceError::Bpf(NotPermitted { .. } | Absent { .. })
        | TraceError::Locks(NotPermitted { .. } | Absent { .. })
        | TraceError::Accept(NotPermitted { .. }) => Some("bpf"),
        // Kernels before Linux 6.3 lack the tracepoint.
        TraceError::Accept(Absent { .. }) => Some("sk_data_ready"),
        TraceError::NoCgroup(_) => Some("cgroup"),
        TraceError::HiddenSymbols | TraceError::Flame(NotPermitted { .. } | Absent { .. }) => Some("perf"),
        _ => None,
    }
}

/// Results with notes about lost events.
pub(crate) trait Notes {
    fn notes(&self) -> &[String];
}

impl Notes for TraceConnectResults {
    fn notes(&self) -> &[String] {
        &self.notes
    }
}

impl Notes for TraceAcceptResults {
    fn notes(&self) -> &[String] {
        &self.notes
    }
}

impl Notes for TraceLocksResults {
    fn notes(&self) -> &[String] {
        &self.notes
    }
}

/// Returns whether the kernel did not run a program for some event (`recursion_misses`), so that counts may be too low.
pub(crate) fn has_missed(outcome: &Outcome<impl Notes>) -> bool {
    let remarks = outcome.validity.iter().map(|remark| &remark.message);
    remarks.chain(outcome.results.notes()).any(|line| line.contains("recursion_misses"))
}

/// Repeats `run`, which returns what the program counted and what the trace counted, until no program has missed an event.
pub(crate) fn until_none_missed<T, R: Notes>(
    mut run: impl FnMut() -> Option<(T, Outcome<R>)>,
) -> Option<(T, Outcome<R>)> {
    for _ in 0..100 {
        let (known, outcome) = run()?;
        if !has_missed(&outcome) {
            return Some((known, outcome));
        }
    }
    panic!("events were missed in 100 attempts");
}

/// Returns the number of values in a distribution that is absent when empty.
pub(crate) fn count(distribution: Option<Distribution>) -> u64 {
    distribution.map_or(0, |distribution| distribution.count)
}

/// Returns the results of this process for `destination`.
pub(crate) fn tuple(results: &TraceConnectResults, destination: SocketAddr) -> &TraceTuple {
    let own = results
        .tuples
        .iter()
        .filter(|tuple| tuple.process == process::id() && tuple.destination == destination.to_string());
    let [tuple] = own.collect::<Vec<_>>()[..] else { panic!("{:?}", results.tuples) };
    tuple
}

/// Returns what the trace says about itself, without a program of 32 bits that another test runs at the same time.
pub(crate) fn remarks<R>(outcome: &Outcome<R>) -> Vec<&Remark> {
    outcome.validity.iter().filter(|remark| remark.id != "calls-unseen").collect()
}
