//! A trace of locks, on the terminal and as a page.

use std::collections::BTreeMap;

use fourtuple_record::{
    Host, LockClass, LockPath, LockPort, Record, SCHEMA, Saved, Spread, TraceLocksRecord, TraceLocksResults,
    TraceLocksSettings,
};
use fourtuple_report::html::page;
use fourtuple_report::terminal::render;

fn record() -> TraceLocksRecord {
    let class = LockClass {
        class: "listener".into(),
        waits: 1_250,
        wait_ns: 189_000_000,
        sleeps: 128,
        sleep_ns: 186_000_000,
        locks: 2,
        times_ns: Some(Spread {
            count: 1_250,
            mean: 151_200,
            p50: 336,
            p99: 31_000_000,
            p999: 31_400_000,
            max: 31_497_677,
        }),
        remedy: "a listener for each worker".into(),
    };
    let path = LockPath {
        class: "listener".into(),
        kind: "sleep".into(),
        frames: ["__lock_sock", "lock_sock_nested", "inet_csk_accept", "inet_accept", "do_accept"]
            .map(String::from)
            .into(),
        waits: 128,
        wait_ns: 186_000_000,
        max_ns: 31_497_677,
    };
    let lost = LockPath { kind: "spin".into(), frames: Vec::new(), ..path.clone() };
    Record {
        schema: SCHEMA.into(),
        command: "trace locks".into(),
        started: "2026-03-01T12:00:00Z".into(),
        host: Host {
            kernel: "6.18.5".into(),
            cpus: 2,
            virtualization: "kvm".into(),
            sysctls: BTreeMap::new(),
            capabilities: BTreeMap::new(),
        },
        settings: TraceLocksSettings {
            process: None,
            name: Some("it's".into()),
            cgroup: None,
            for_ns: Some(5_000_000_000),
        },
        validity: Vec::new(),
        results: TraceLocksResults {
            tier: "tp_btf".into(),
            elapsed_ns: 5_000_000_000,
            connections: 54_554,
            waits: 1_250,
            wait_ns: 189_000_000,
            waits_per_connection: Some(0.0229),
            wait_ns_per_connection: Some(3_464.0),
            cpu_share: 0.000_02,
            lost: 0,
            elsewhere_waits: 4_010,
            elsewhere_wait_ns: 18_787_915,
            classes: vec![class],
            paths: vec![path, lost],
            ports: (0..40)
                .map(|at| LockPort { port: 9_000 + at, waits: 1, wait_ns: 300, max_ns: 300 })
                .collect(),
            blind_spots: vec!["</script>paravirtual".into()],
        },
    }
}

const WORDS: [&str; 9] = [
    "54,554",
    "0.0229",
    "3.46us",
    "below 0.01%",
    "a listener for each worker",
    "__lock_sock",
    "inet_csk_accept",
    "unknown",
    "paravirtual",
];

#[test]
fn the_terminal_has_classes_paths_ports_and_blind_spots() {
    let text = render(&Saved::TraceLocks(record()), 120, false);
    for expected in WORDS.into_iter().chain(["and 28 ports more"]) {
        assert!(text.contains(expected), "{expected} is missing from\n{text}");
    }
}

#[test]
fn the_page_has_them_too_and_stays_whole() {
    let page = page(&[Saved::TraceLocks(record())]);
    for expected in WORDS.into_iter().chain(["9039", "fourtuple trace locks --comm"]) {
        assert!(page.contains(expected), "{expected} is missing");
    }
    assert!(!page.contains("</script>paravirtual"));
}

#[test]
fn without_waits_it_says_so() {
    let mut record = record();
    record.results.classes.clear();
    record.results.paths.clear();
    record.results.ports.clear();
    record.results.waits_per_connection = None;
    assert!(render(&Saved::TraceLocks(record), 120, false).contains("no waits"));
}
