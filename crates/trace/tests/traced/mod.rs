//! A trace of this very process, and what it has of one destination.
#![allow(dead_code, reason = "every theme uses its part of it")]

use std::net::SocketAddr;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use fourtuple_bpf::BpfError;
use fourtuple_record::{TraceConnectResults, TraceTuple};
use fourtuple_testing::skip;
use fourtuple_trace::{Connect, Outcome, TraceError};

/// Of this process, whose tests run at the same time: each has a destination of its own.
pub(crate) fn to(destination: SocketAddr) -> Connect {
    Connect {
        process: Some(process::id()),
        address: Some(destination.ip()),
        port: Some(destination.port()),
        ..Connect::default()
    }
}

/// Traces while `program` runs in the same namespace; `None`, aloud, where BPF is not to be had.
pub(crate) fn traced<T>(test: &str, connect: &Connect, program: impl FnOnce() -> T) -> Option<(T, Outcome)> {
    let stop = AtomicBool::new(false);
    let (attached, ready) = mpsc::channel();
    thread::scope(|scope| {
        let tracer = scope.spawn(|| connect.run(&stop, || attached.send(()).unwrap(), |_| ()));
        // Nothing comes from a tracer that has failed: then it has ended, or is about to.
        while ready.recv_timeout(Duration::from_millis(20)).is_err() {
            if tracer.is_finished() {
                match tracer.join().unwrap() {
                    Err(TraceError::Bpf(
                        error @ (BpfError::NotPermitted { .. } | BpfError::Absent { .. }),
                    )) => {
                        skip(test, "bpf", &error.to_string());
                        return None;
                    }
                    Err(error @ TraceError::NoCgroup(_)) => {
                        skip(test, "cgroup", &error.to_string());
                        return None;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        let known = program();
        stop.store(true, Ordering::Relaxed);
        Some((known, tracer.join().unwrap().unwrap()))
    })
}

/// The only one of this process to there.
pub(crate) fn tuple(results: &TraceConnectResults, destination: SocketAddr) -> &TraceTuple {
    let own = results
        .tuples
        .iter()
        .filter(|tuple| tuple.process == process::id() && tuple.destination == destination.to_string());
    let [tuple] = own.collect::<Vec<_>>()[..] else { panic!("{:?}", results.tuples) };
    tuple
}
