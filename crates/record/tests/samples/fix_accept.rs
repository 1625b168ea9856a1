//! A fix of two groups with a reload, a dry run that saw nothing, and workers that take turns.

use fourtuple_record::*;

use super::record;

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
