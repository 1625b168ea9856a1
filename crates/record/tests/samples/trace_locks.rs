//! A lock trace: a listener whose queue is contended, and a lost stack.

use fourtuple_record::snapshot::Part;
use fourtuple_record::*;

use super::{record, symptoms};

pub(crate) fn trace_locks() -> TraceLocksRecord {
    let settings = TraceLocksSettings {
        process: Some(7),
        name: Some("it's".into()),
        netns: Some("/run/netns/blue".into()),
        cgroup: Some("/sys/fs/cgroup/web".into()),
        for_ns: Some(5_000_000_000),
    };
    let class = LockClass {
        class: "listener".into(),
        waits: 1_250,
        wait_ns: 189_000_000,
        sleeps: 128,
        sleep_ns: 186_000_000,
        locks: 2,
        times_ns: Some(Distribution {
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
    let results = TraceLocksResults {
        tier: "tp_btf".into(),
        elapsed_ns: 5_000_000_000,
        connections: 54_554,
        waits: 1_250,
        wait_ns: 189_000_000,
        waits_per_connection: Some(0.0229),
        wait_ns_per_connection: Some(3_464.0),
        cpu_share: 0.000_02,
        lost: 2,
        notes: vec!["2 events of 54,554 were lost: no room for their stack".into()],
        elsewhere_waits: 4_010,
        elsewhere_wait_ns: 18_787_915,
        classes: vec![class],
        paths: vec![path, lost],
        ports: (0..40).map(|at| LockPort { port: 9_000 + at, waits: 1, wait_ns: 300, max_ns: 300 }).collect(),
        blind_spots: vec!["</script>paravirtual".into()],
        symptoms: symptoms(),
    };
    record("trace locks", settings, results)
}

/// Returns a trace without waits: every field that may be null is null.
pub(crate) fn bare_trace_locks() -> TraceLocksRecord {
    let mut record = trace_locks();
    record.settings =
        TraceLocksSettings { process: None, name: None, netns: None, cgroup: None, for_ns: None };
    let results = &mut record.results;
    (results.waits_per_connection, results.wait_ns_per_connection) = (None, None);
    results.classes[0].times_ns = None;
    results.paths.clear();
    results.ports.clear();
    results.symptoms = Part::Hidden("</script>".into());
    record
}
