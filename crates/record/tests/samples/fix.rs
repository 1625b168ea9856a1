//! Fixes of ports and of accept, dry runs that saw nothing, and runs of a program: preloaded, supervised, in a cgroup.

use std::collections::BTreeMap;

use fourtuple_record::*;

use super::record;

pub(crate) fn fix_ports() -> FixPortsRecord {
    let settings = FixPortsSettings {
        cgroup: "/sys/fs/cgroup/system.slice/nginx.service".into(),
        source: Some("192.0.2.0/28".into()),
        to: Some("198.51.100.0/24:443".into()),
        past: 0.25,
        for_ns: Some(60_000_000_000),
        dry_run: false,
    };
    let tuple = |source: &str, connects, drawn| FixPortsTuple {
        namespace: 1,
        source: source.into(),
        destination: "198.51.100.7:443".into(),
        connects,
        drawn,
        fallbacks: 2,
        share: 0.9,
    };
    let results = FixPortsResults {
        elapsed_ns: 60_000_000_000,
        connects: 18_420,
        connects_per_s: 307.0,
        left: BTreeMap::from([("below".into(), 4_990), ("udp".into(), 11), ("source-unknown".into(), 3)]),
        drawn: 13_000,
        spread: 414,
        fallbacks: 2,
        would_draw: 0,
        probes: 65_117,
        probes_per_draw: Some(5.008),
        refused: 7,
        in_order: 21,
        time_wait_used: 4,
        hook_ns: 41_000_000,
        hook_ns_per_draw: Some(3_153),
        avoided_probes: 97_200_000,
        probe_ns: Some(51.4),
        floor_ns: Some(15_900),
        saved_ns: Some(4_955_080_000),
        namespaces: vec![FixNamespace { cookie: 1, low: 20_000, high: 39_999, usable: 19_990 }],
        tuples: vec![tuple("192.0.2.1", 12_000, 9_000), tuple("192.0.2.2", 6_406, 4_000)],
        tuples_left_out: 0,
    };
    record("fix ports", settings, results)
}

/// A dry run without connects: every field that may be null is null.
pub(crate) fn bare_fix_ports() -> FixPortsRecord {
    let mut record = fix_ports();
    record.settings =
        FixPortsSettings { source: None, to: None, for_ns: None, dry_run: true, ..record.settings };
    record.results = FixPortsResults {
        elapsed_ns: 1_000_000_000,
        connects: 0,
        connects_per_s: 0.0,
        left: BTreeMap::new(),
        drawn: 0,
        spread: 0,
        fallbacks: 0,
        would_draw: 0,
        probes: 0,
        probes_per_draw: None,
        refused: 0,
        in_order: 0,
        time_wait_used: 0,
        hook_ns: 0,
        hook_ns_per_draw: None,
        avoided_probes: 0,
        probe_ns: None,
        floor_ns: None,
        saved_ns: None,
        namespaces: Vec::new(),
        tuples: Vec::new(),
        tuples_left_out: 0,
    };
    record
}

/// Numbers and texts that no command writes.
pub(crate) fn hostile_fix_ports() -> FixPortsRecord {
    let mut record = fix_ports();
    record.settings.cgroup = "</script><b>it's".into();
    record.settings.past = f64::MAX;
    let results = &mut record.results;
    results.connects = u64::MAX;
    results.drawn = u64::MAX;
    results.left = BTreeMap::from([("</script>".into(), u64::MAX), ("below".into(), u64::MAX)]);
    results.namespaces[0] = FixNamespace { cookie: u64::MAX, low: 9, high: 3, usable: u32::MAX };
    results.tuples[0].destination = "<i>".into();
    results.tuples[0].share = -1.0;
    results.saved_ns = Some(u64::MAX);
    record
}

pub(crate) fn fix_accept() -> FixAcceptRecord {
    let settings = FixAcceptSettings {
        listen: Some("0.0.0.0:80".into()),
        pid: Some(4_711),
        select: "least-busy".into(),
        control: Some("ttl=255".into()),
        for_ns: Some(60_000_000_000),
        dry_run: false,
    };
    let listener = |address: &str, cookie, process, chosen, queue| FixAcceptListener {
        transport: if address.ends_with(":53") { "udp".into() } else { "tcp".into() },
        address: address.into(),
        cookie,
        process,
        command: "nginx".into(),
        choices: chosen,
        connections: chosen + 1,
        moves: 0,
        share: Some(chosen as f64 / 30_000.0),
        open: Some(17),
        queue,
    };
    let results = FixAcceptResults {
        elapsed_ns: 60_000_000_000,
        groups: 2,
        choices: 33_000,
        choices_per_s: 550.0,
        connections: 30_004,
        moves: 0,
        lapsed: 4,
        strays: 2,
        joined: 1,
        closed: 1,
        missed: 3,
        listeners: vec![
            listener("0.0.0.0:80", 41, 4_712, 10_001, Some(2)),
            listener("0.0.0.0:80", 42, 4_713, 9_999, Some(0)),
            listener("0.0.0.0:80", 43, 4_714, 10_000, None),
            listener("0.0.0.0:53", 44, 4_712, 3_000, Some(4_352)),
        ],
        listeners_left_out: 7,
    };
    record("fix accept", settings, results)
}

/// A dry run without connections: every field that may be null is null.
pub(crate) fn bare_fix_accept() -> FixAcceptRecord {
    let mut record = fix_accept();
    record.settings = FixAcceptSettings {
        listen: None,
        pid: None,
        select: "least-busy".into(),
        control: None,
        for_ns: None,
        dry_run: true,
    };
    let results = &mut record.results;
    results.choices = 0;
    results.choices_per_s = 0.0;
    results.connections = 0;
    (results.lapsed, results.strays, results.joined, results.closed, results.missed) = (0, 0, 0, 0, 0);
    results.listeners.truncate(1);
    results.listeners_left_out = 0;
    let listener = &mut results.listeners[0];
    (listener.choices, listener.connections, listener.open) = (0, 0, Some(0));
    (listener.share, listener.queue) = (None, None);
    record
}

/// Three workers of a unix listener, one of which has ended.
pub(crate) fn rotated_fix_accept() -> FixAcceptRecord {
    let mut record = fix_accept();
    record.settings.listen = Some("unix:/run/app.sock".into());
    (record.settings.pid, record.settings.control) = (None, None);
    record.settings.select = "rotate".into();
    let results = &mut record.results;
    (results.groups, results.choices, results.choices_per_s) = (1, 0, 0.0);
    (results.lapsed, results.strays, results.listeners_left_out) = (0, 0, 0);
    results.moves = 29_990;
    results.listeners.truncate(3);
    for listener in &mut results.listeners {
        (listener.transport, listener.address) = ("unix".into(), "/run/app.sock".into());
        (listener.cookie, listener.choices, listener.open) = (41, 0, None);
        listener.moves = listener.connections - 5;
    }
    record
}

/// Numbers and texts that no command writes.
pub(crate) fn hostile_fix_accept() -> FixAcceptRecord {
    let mut record = fix_accept();
    record.settings.select = "</script><b>it's".into();
    let results = &mut record.results;
    results.choices = u64::MAX;
    results.choices_per_s = -1.0;
    let listener = &mut results.listeners[0];
    listener.command = "<i>".into();
    listener.address = "</script>".into();
    listener.share = Some(-7.0);
    (listener.choices, listener.open, listener.queue) = (u64::MAX, Some(u64::MAX), Some(u32::MAX));
    record
}

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
