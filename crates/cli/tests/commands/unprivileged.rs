//! Runs without root: a user namespace made by the program is enough.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::program::{Ended, Room, fourtuple_at, is_root, list, number, require_valid, run};

/// The user id of an unprivileged user on every Linux.
const UNPRIVILEGED: u32 = 65_534;

/// Runs the program as an unprivileged user.
fn run_unprivileged(program: &str, arguments: &str) -> Ended {
    let mut command = fourtuple_at(Path::new(program), arguments);
    if is_root() {
        command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    run(command.current_dir("/"))
}

/// A user namespace gives no right to load a BPF program, even with all capabilities.
#[test]
fn a_policy_without_bpf_rights_is_refused_not_replaced() {
    let room = Room::new();
    let program = room.program();
    for start in [
        "lab accept --policy reuseport-least-busy --load light --workers 2 --connections 2 --repeats 1",
        "serve http --policy reuseport-least-busy --listen 127.0.0.1:0 --workers 2 --for 1ms",
    ] {
        let ended = run_unprivileged(&program, start);
        if ended.is_without_namespaces() {
            let test = "unprivileged::a_policy_without_bpf_rights_is_refused_not_replaced";
            return fourtuple_testing::skip(test, "userns", ended.line());
        }
        assert_eq!((ended.code, ended.stdout.as_str()), (4, ""), "{start}: {ended:?}");
        for part in ["reuseport-least-busy is not permitted here: ", "CAP_BPF"] {
            assert!(ended.line().contains(part), "{start}: {part:?} in {ended:?}");
        }
    }
}

#[test]
fn doctor_probes_the_port_search_without_root() {
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--net", "true"]);
    if is_root() {
        unshare.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    if !unshare.status().is_ok_and(|status| status.success()) {
        let test = "unprivileged::doctor_probes_the_port_search_without_root";
        return fourtuple_testing::skip(test, "userns", "unshare --user --net true fails");
    }
    let room = Room::new();
    let record = run_unprivileged(&room.program(), "doctor --for 1ms --json --quiet").json();
    let search = record.pointer("/results/snapshot/search").unwrap();
    assert!(search.pointer("/seen/default").is_some(), "{search:#}");
}

#[test]
fn lab_planes_runs_without_root() {
    let room = Room::new();
    let program = room.program();
    for over in ["veth", "loopback"] {
        let flags = "--plane offload --planes 2 --bytes 64 --packets 1000 --repeats 1 --json";
        let ended = run_unprivileged(&program, &format!("lab planes --over {over} {flags}"));
        if ended.is_without_namespaces() {
            return fourtuple_testing::skip(
                "unprivileged::lab_planes_runs_without_root",
                "userns",
                ended.line(),
            );
        }
        assert!([0, 3].contains(&ended.code) && ended.stderr.is_empty(), "{over}: {ended:?}");
        let record = ended.json();
        require_valid(&record);
        let [cell] = list(&record, "/results/cells") else { panic!("one cell: {record:#}") };
        assert_eq!(number(cell, "packets"), 1000, "{cell:#}");
    }
}

#[test]
fn lab_ports_and_time_wait_run_without_root() {
    let room = Room::new();
    let program = room.program();
    for experiment in ["ports", "time-wait --patience 1ms"] {
        let ended = run_unprivileged(&program, &format!("lab {experiment} --range 20000-20063 --json"));
        if ended.is_without_namespaces() {
            return fourtuple_testing::skip(
                "unprivileged::lab_ports_and_time_wait_run_without_root",
                "userns",
                ended.line(),
            );
        }
        assert_eq!((ended.code, ended.stderr.as_str()), (0, ""), "{ended:?}");
        let record = ended.json();
        require_valid(&record);
        let (runs, counted) = if experiment == "ports" {
            ("/results/strategies", "connections")
        } else {
            ("/results/runs", "completed")
        };
        let runs = list(&record, runs);
        assert!(runs.len() >= 3, "{record:#}");
        for run in runs.iter().filter(|run| run["strategy"] != "select-test-repeat") {
            assert!(number(run, counted) >= 63, "{run:#}");
        }
    }
}
