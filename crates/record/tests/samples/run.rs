//! A run of a program with a preloaded library, a supervised program that a signal ended, and one in a cgroup.

use std::collections::BTreeMap;

use fourtuple_record::*;

use super::{fix_ports, record};

pub(crate) fn preloaded_run() -> RunRecord {
    let settings = RunSettings { command: vec!["curl".into(), "-s".into()], via: Some("preload".into()) };
    let results = RunResults {
        way: "preload".into(),
        passed_over: BTreeMap::new(),
        elapsed_ns: 2_000_000_000,
        exit_code: Some(0),
        signal: None,
        connects: 18_000,
        changed: 17_990,
        left: BTreeMap::from([("udp".into(), 10)]),
        bound: Some(120),
        named: Some(3),
        connect_ns: Some(360_000_000),
        even: Some(9_020),
        odd: Some(8_970),
        unavailable: Some(0),
        avoided: Some(12),
        calls: None,
        held_ns: None,
        ports: None,
    };
    record("run", settings, results)
}

/// A supervised program: every field that may be null is null, or is not null in the other samples.
pub(crate) fn bare_run() -> RunRecord {
    let mut record = preloaded_run();
    record.settings.via = None;
    let reason = "cannot make the cgroup: Permission denied";
    record.results = RunResults {
        way: "supervise".into(),
        passed_over: BTreeMap::from([("cgroup".into(), reason.into())]),
        exit_code: None,
        signal: Some(15),
        connects: 0,
        changed: 0,
        left: BTreeMap::new(),
        bound: None,
        named: None,
        connect_ns: None,
        even: None,
        odd: None,
        unavailable: None,
        avoided: None,
        calls: Some(40),
        held_ns: Some(160_000),
        ..record.results
    };
    record
}

/// A run in a cgroup.
pub(crate) fn cgroup_run() -> RunRecord {
    let mut record = preloaded_run();
    record.settings.via = Some("cgroup".into());
    let unseen = bare_run().results;
    let ports = fix_ports().results;
    record.results = RunResults {
        way: "cgroup".into(),
        passed_over: BTreeMap::new(),
        connects: ports.connects,
        changed: ports.drawn,
        left: ports.left.clone(),
        calls: None,
        held_ns: None,
        ports: Some(ports),
        ..unseen
    };
    record
}

/// Numbers and texts that no command writes.
pub(crate) fn hostile_run() -> RunRecord {
    let mut record = preloaded_run();
    record.settings.command = vec!["</script><b>it's".into(), "\u{1b}[31m".into()];
    let results = &mut record.results;
    results.way = "<i>".into();
    results.connects = u64::MAX;
    results.changed = 0;
    results.connect_ns = Some(u64::MAX);
    results.even = Some(u64::MAX);
    results.left = BTreeMap::from([("</script>".into(), u64::MAX)]);
    record
}
