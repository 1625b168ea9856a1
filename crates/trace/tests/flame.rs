//! What is sampled of a program that dials is what it does. No time decides: it dials a number of times.

use std::net::TcpStream;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use fourtuple_bpf::BpfError;
use fourtuple_testing::{in_namespace, listener, set_sysctl, skip};
use fourtuple_trace::{Connect, Outcome, TraceError};

const PORTS: u16 = 2_000;
/// Each of them looks at all ports: a second of CPU time, and some hundred samples.
const FAILURES: u32 = 20_000;

fn begin(connect: &Connect, stop: &AtomicBool, program: impl FnOnce()) -> Result<Outcome, TraceError> {
    let (attached, ready) = mpsc::channel();
    thread::scope(|scope| {
        let tracer = scope.spawn(move || connect.run(stop, || attached.send(()).unwrap(), |_| ()));
        // Without a trace the sender goes, and nothing is dialed.
        if ready.recv().is_ok() {
            program();
        }
        stop.store(true, Ordering::Relaxed);
        tracer.join().unwrap()
    })
}

fn sampled(test: &str, connect: &Connect, program: impl FnOnce()) -> Option<Outcome> {
    match begin(connect, &AtomicBool::new(false), program) {
        Ok(outcome) => Some(outcome),
        Err(TraceError::Bpf(error @ (BpfError::NotPermitted { .. } | BpfError::Absent { .. }))) => {
            skip(test, "bpf", &error.to_string());
            None
        }
        Err(
            error @ (TraceError::HiddenSymbols
            | TraceError::Flame(BpfError::NotPermitted { .. } | BpfError::Absent { .. })),
        ) => {
            skip(test, "perf", &error.to_string());
            None
        }
        Err(other) => panic!("{other:?}"),
    }
}

#[test]
fn a_program_that_looks_for_a_port_is_seen_in_the_search() {
    let test = "a_program_that_looks_for_a_port_is_seen_in_the_search";
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", &format!("20000 {}", 20000 + PORTS - 1));
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let connect = Connect { process: Some(process::id()), flame: true, ..Connect::default() };
        let mut taken = Vec::new();
        let Some(outcome) = sampled(test, &connect, || {
            let mut failures = 0;
            while failures < FAILURES {
                match TcpStream::connect(destination) {
                    Ok(stream) => taken.push(stream),
                    Err(_) => failures += 1,
                }
            }
        }) else {
            return;
        };
        assert_eq!(taken.len(), usize::from(PORTS));
        let flame = outcome.results.flame.expect("it was asked for");
        let sum: u64 = outcome.folded.iter().map(|(_, samples)| samples).sum();
        assert_eq!(flame.samples, sum, "{flame:?}");
        // Nothing but the search takes so long.
        assert!(flame.samples >= 10 && flame.in_search > 0.25, "{flame:?}");
        assert!(flame.in_connect >= flame.in_search, "{flame:?}");
        let searching = outcome.folded.iter().find(|(frames, _)| frames.contains("__inet_hash_connect"));
        let (frames, _) = searching.unwrap_or_else(|| panic!("{:?}", outcome.folded));
        let at = |function: &str| frames.find(function).unwrap_or_else(|| panic!("{function}: {frames}"));
        // The outermost first.
        assert!(at("connect") < at("tcp_v4_connect") && at("tcp_v4_connect") < at("__inet_hash_connect"));
    });
}

#[test]
fn without_a_filter_only_programs_that_connect_are_seen() {
    let test = "without_a_filter_only_programs_that_connect_are_seen";
    // Nobody connects to this one, whatever else runs here.
    let connect = Connect { address: Some([192, 0, 2, 77].into()), flame: true, ..Connect::default() };
    let Some(outcome) = sampled(test, &connect, || thread::sleep(Duration::from_millis(50))) else { return };
    assert_eq!(outcome.folded, []);
    assert_eq!(outcome.results.flame.map(|flame| flame.samples), Some(0));
    assert_eq!(outcome.results.searches, 0);
}
