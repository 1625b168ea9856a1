//! Commands that cannot create a thread or process (RLIMIT_NPROC, pids.max): one line and exit code 4.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use crate::program::{Ended, fourtuple, is_root, list, require_valid, run, text};
use fourtuple_syscalls::seccomp::Facility;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{child, option};
use fourtuple_testing::in_namespace;

/// A user id without processes.
pub(crate) const UNUSED_USER: u32 = 1_987_654_321;

/// The experiments, with the shortest settings.
const LABS: [&str; 6] = [
    "lab ports --range 20000-20063 --strategy full-range",
    "lab time-wait --range 20000-20063 --patience 1ms",
    "lab accept --policy exclusive --workers 2 --clients 3 --for 10ms --repeats 1",
    "lab keepalive --policy exclusive --workers 2 --clients 3 --for 10ms --repeats 1",
    "lab locks --workers 2 --clients 3 --queries 100 --repeats 1 --change reuseport",
    "lab planes --planes 1 --packets 1000 --repeats 1",
];

/// Returns the command, for which the kernel refuses threads and processes.
fn without_threads(arguments: &str) -> Command {
    let mut command = fourtuple(arguments);
    child::refuse(&mut command, Facility::Threads);
    command
}

/// Asserts that the command ended with one line that names EAGAIN, and exit code 4.
fn is_refused(what: &str, ended: &Ended) {
    assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{what}: {ended:?}");
    assert!(ended.line().contains("EAGAIN") || ended.line().contains("os error 11"), "{what}: {ended:?}");
}

#[test]
fn without_threads_commands_end_with_one_line() {
    let others = [
        "plan --range 20000-20063",
        "load tcp://127.0.0.1:9 --for 10ms",
        "load http://127.0.0.1:9/ --rate 10/s --for 10ms",
        "serve crr --listen 127.0.0.1:0 --for 10ms",
        "serve crr --listen 127.0.0.1:0 --policy dispatcher --for 10ms",
        "forward --listen 127.0.0.1:0 --to 127.0.0.1:9 --for 10ms",
    ];
    let with_own_flags = [
        "export --listen 127.0.0.1:0",
        "run --quiet --via preload -- true",
        "run --quiet --via supervise -- true",
    ];
    let quiet = others.iter().chain(&LABS).map(|line| format!("{line} --quiet"));
    for line in quiet.chain(with_own_flags.map(str::to_owned)) {
        is_refused(&line, &run(&mut without_threads(&line)));
    }
    let mut compare = without_threads("compare --for 1s --");
    compare.args([LABS[0], LABS[0]]);
    is_refused("compare", &run(&mut compare));
}

/// In its own network namespace `doctor` needs a thread for the probe of the port search only.
#[test]
fn without_threads_doctor_says_what_is_not_checked() {
    for line in ["doctor --for 10ms --json --quiet", "doctor --for 10ms --json --quiet --no-trace"] {
        let record = run(&mut without_threads(line)).json();
        let unchecked = list(&record, "/results/unchecked");
        let search =
            unchecked.iter().find(|rule| rule["id"] == "P02").unwrap_or_else(|| panic!("{record:#}"));
        assert!(text(search, "reason").contains("cannot start a thread"), "{search}");
    }
}

/// A guard process would remove the selector if the command were killed.
#[test]
fn without_processes_fix_accept_changes_nothing() {
    in_namespace(|| {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 4000));
        let _group = [(); 2].map(|()| {
            let listener = socket::open(Transport::Tcp, address, false).unwrap();
            let _ = option::set_reuse_port(listener.as_fd()).unwrap();
            socket::bind(listener.as_fd(), address).unwrap();
            socket::listen(listener.as_fd(), 16).unwrap();
            listener
        });
        let line = "fix accept --listen 127.0.0.1:4000 --select cpu --for 10ms";
        let ended = run(&mut fourtuple(line));
        if ended.code == 4 {
            let test = "threads::without_processes_fix_accept_changes_nothing";
            return fourtuple_testing::skip(test, "bpf", ended.line());
        }
        assert_eq!(ended.code, 0, "{ended:?}");
        is_refused(line, &run(&mut without_threads(line)));
    });
}

/// A trace reads the counters of BPF programs on the main thread.
#[test]
fn a_trace_needs_no_thread() {
    for what in ["connect", "accept", "locks"] {
        let line = format!("trace {what} --for 10ms --json --quiet");
        let ended = run(&mut fourtuple(&line));
        if ended.code == 4 {
            return fourtuple_testing::skip("threads::a_trace_needs_no_thread", "bpf", ended.line());
        }
        let ended = run(&mut without_threads(&line));
        assert!([0, 3].contains(&ended.code) && ended.stderr.is_empty(), "{line}: {ended:?}");
        require_valid(&ended.json());
    }
}

/// A plan without calibration simulates the dials on the main thread, with the same results.
#[test]
fn a_plan_without_threads_has_the_same_results() {
    let plan = "plan --kernel linear --range 20000-20127 --rate 20/s --sources 3 --json";
    let own = run(&mut fourtuple(plan)).json();
    let ended = run(&mut without_threads(plan));
    ended.require_silence();
    assert_eq!(ended.json()["results"], own["results"]);
}

/// When the first threads start and a later thread does not, the command ends all of them.
#[test]
fn an_experiment_ends_when_a_later_thread_fails() {
    let test = "threads::an_experiment_ends_when_a_later_thread_fails";
    if !is_root() {
        return fourtuple_testing::skip(test, "root", "only root can become a user without processes");
    }
    let with = |line: &str, limit: u64| {
        let mut command = fourtuple(&format!("{line} --quiet"));
        command.uid(UNUSED_USER).gid(UNUSED_USER).current_dir("/");
        child::limit_threads(&mut command, limit);
        command
    };
    match with("plan --help", 1).output() {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return fourtuple_testing::skip(test, "root", "other users may not run this program");
        }
        output => assert!(output.expect("it starts").status.code().is_some()),
    }
    for line in LABS.into_iter().chain(["doctor --for 10ms"]) {
        for limit in [1, 2, 3, 4, 6] {
            let ended = run(&mut with(line, limit));
            if ended.skips_without_namespaces(test, "netns") {
                return;
            }
            // Some experiments need no more threads than the limit, and the host may have findings.
            if ![0, 1, 3].contains(&ended.code) {
                is_refused(&format!("{line} with {limit}"), &ended);
            }
        }
    }
}
