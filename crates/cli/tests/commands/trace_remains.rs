//! When a trace ends, also by SIGKILL, the kernel frees all of its BPF programs, links and maps.

use std::io::{self, BufRead, BufReader};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::program::fourtuple;
use fourtuple_bpf::Objects;
use fourtuple_syscalls::child;

/// Every trace with its ready line.
const TRACES: &[(&str, &str)] = &[
    ("trace connect", "tracing connect()"),
    ("trace connect --protocol udp", "tracing connect()"),
    ("trace accept", "tracing accept()"),
    ("trace locks", "tracing locks"),
];

/// Time after which a test fails. The kernel frees unreferenced objects after a grace period.
const DEADLINE: Duration = Duration::from_secs(60);

/// Starts a trace and waits for its ready line. Returns `None` and reports a skipped test where it cannot be attached.
fn start(test: &str, arguments: &str, ready: &str) -> Option<Child> {
    let mut child = fourtuple(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut line = String::new();
    let mut stderr = BufReader::new(child.stderr.as_mut().expect("a pipe"));
    stderr.read_line(&mut line).expect("UTF-8");
    if line.trim_end() == ready {
        return Some(child);
    }
    assert_eq!(child.wait().unwrap().code(), Some(4), "{arguments}: {line:?}");
    let need = if line.contains("cgroup2") { "cgroup" } else { "bpf" };
    fourtuple_testing::skip(test, need, line.trim_end());
    None
}

/// Ends each trace with `end`. Its objects are compared by id, because other tests trace at the same time.
fn leaves_nothing(test: &str, end: fn(u32) -> io::Result<()>) {
    for (arguments, ready) in TRACES {
        let Some(mut child) = start(test, arguments, ready) else { continue };
        let held = Objects::of_process(child.id());
        let existing = held.as_ref().ok().map(Objects::remaining);
        end(child.id()).unwrap();
        child.wait().unwrap();
        let held = held.unwrap();
        assert!(
            !held.programs.is_empty() && !held.links.is_empty() && !held.maps.is_empty(),
            "{arguments}: {held:?}"
        );
        match existing.expect("the objects of the trace were read") {
            Ok(existing) => assert_eq!(existing, held, "{arguments}: all objects exist while it runs"),
            Err(error) => return fourtuple_testing::skip(test, "root", &error.to_string()),
        }
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = held.remaining().unwrap();
            if left.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "{arguments}: {left:?} of {held:?}");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn a_killed_trace_leaves_nothing() {
    leaves_nothing("trace_remains::a_killed_trace_leaves_nothing", child::kill);
}

#[test]
fn an_interrupted_trace_leaves_nothing() {
    leaves_nothing("trace_remains::an_interrupted_trace_leaves_nothing", child::interrupt);
}
