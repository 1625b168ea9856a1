//! Traces of connect(), accept() and locks.

use std::collections::BTreeMap;

use fourtuple_record::snapshot::{FailedCall, Failures, Part};
use fourtuple_record::*;

use super::{Noise, doctor, record};

/// Returns a trace of a range of 15,000 ports that fills up: even ports for the first half of the time, then odd ones, with an idle
/// second in between.
fn heat() -> TraceHeat {
    let columns = (0..100_u64).map(|column| match column {
        0..45 => vec![20, 146, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        45..55 => vec![0; 12],
        _ => vec![0, 0, 0, 0, 0, 0, 0, 2, 20 + column, 40, 3, u64::from(column == 80)],
    });
    let from_ns =
        vec![1_000, 1_778, 3_162, 5_623, 10_000, 17_783, 31_623, 56_234, 100_000, 177_828, 316_228, 562_341];
    TraceHeat { column_ns: 100_000_000, from_ns, columns: columns.collect() }
}

pub(crate) fn trace_connect() -> TraceConnectRecord {
    let settings = TraceConnectSettings {
        protocol: "tcp".into(),
        process: None,
        name: Some("it's wrk".into()),
        destination: Some("127.0.0.1".into()),
        port: Some(8080),
        netns: Some("/run/netns/blue".into()),
        cgroup: None,
        for_ns: Some(10_000_000_000),
        tier: "auto".into(),
        seed: 1,
    };
    let mut noise = Noise(7);
    let samples: Vec<TraceSample> = (0..1_000_u64)
        .map(|number| {
            let odd = number >= 500;
            let port = 20_000 + (number % 500) as u16 * 30 + u16::from(odd);
            TraceSample {
                at_ns: number * 9_000_000,
                search_ns: noise.time(if odd { 287_000.0 } else { 1_270.0 }),
                source_port: (number < 990).then_some(port),
                tuple: (number != 3).then_some(0),
            }
        })
        .collect();
    let spread = |mean: u64| Distribution {
        count: 7_500,
        mean,
        p50: mean,
        p99: 2 * mean,
        p999: 3 * mean,
        max: 9 * mean,
    };
    let tuple = |process: u32, searches: u64| TraceTuple {
        processes: 1,
        process,
        name: "wrk".into(),
        namespace: 4_026_531_840,
        destination: "127.0.0.1:8080".into(),
        searches,
        even: searches / 2,
        odd: searches / 2,
        mean_ns: 144_000,
        p99_ns: 574_000,
        even_p50_ns: Some(1_270),
        odd_p50_ns: (searches > 0).then_some(287_000),
        failed: 200,
        no_port: 199,
        given_port: 3,
        established: searches,
        retries: 150,
        syn_retries: 2,
        closed_first: searches / 3,
        closed_by_peer: 1,
        in_use: Some(14_900),
        range: (searches > 0).then_some(15_000),
        fill: (searches > 0).then_some(0.9933),
    };
    let results = TraceConnectResults {
        tier: "tp_btf".into(),
        tier_reason: None,
        elapsed_ns: 10_000_000_000,
        searches: 15_000,
        searches_per_s: 1_500.0,
        failed: BTreeMap::from([("EADDRNOTAVAIL".into(), 4_999), ("closed".into(), 1)]),
        given_port: 3,
        established: 15_000,
        untimed: 4,
        lost: 3,
        notes: vec!["3 events of 15,000 were lost: the ring buffer was full".into()],
        switched: 12,
        search_ns: ByParity {
            all: Some(spread(144_000)),
            even: Some(spread(1_270)),
            odd: Some(spread(287_000)),
        },
        failed_search_ns: Some(spread(584_000)),
        handshake_ns: Some(spread(9_300)),
        histogram: vec![
            TraceStep { from_ns: 1_248, even: 7_500, odd: 0 },
            TraceStep { from_ns: 286_720, even: 0, odd: 7_499 },
            TraceStep { from_ns: 4_063_232, even: 0, odd: 1 },
        ],
        heat: heat(),
        flame: Some(TraceFlame {
            samples: 6_601,
            samples_per_s: 997,
            in_connect: 0.59,
            in_search: 0.4,
            lost: 7,
        }),
        tuples: std::iter::once(tuple(4_711, 15_000))
            .chain((1..25).map(|process| tuple(process, 0)))
            .collect(),
        samples,
        calls: Part::Seen(Failures { calls: vec![doctor::failed_call()], ..Failures::default() }),
        symptoms: symptoms(),
    };
    record("trace connect", settings, results)
}

/// Returns a record with every filter, on a kernel without the first instrument.
pub(crate) fn filtered_trace_connect() -> TraceConnectRecord {
    let mut record = trace_connect();
    (record.settings.process, record.settings.cgroup) = (Some(7), Some("/sys/fs/cgroup/web".into()));
    record.results.tier = "fexit".into();
    record.results.tier_reason = Some("tp_btf: this kernel has no fib_table_lookup".into());
    record
}

/// Returns a record with every filter.
pub(crate) fn filtered_trace_accept() -> TraceAcceptRecord {
    let mut record = trace_accept();
    record.settings.cgroup = Some("/sys/fs/cgroup/web".into());
    record
}

/// Returns a record without filters, times or port counts: every field that may be null is null.
pub(crate) fn bare_trace_connect() -> TraceConnectRecord {
    let mut record = trace_connect();
    record.settings = TraceConnectSettings {
        protocol: "udp".into(),
        process: None,
        name: None,
        destination: None,
        port: None,
        netns: None,
        cgroup: None,
        for_ns: None,
        ..record.settings
    };
    let results = &mut record.results;
    results.tier = "cgroup+tp_btf".into();
    (results.search_ns, results.failed_search_ns, results.handshake_ns) = (ByParity::default(), None, None);
    (results.heat, results.flame) = (TraceHeat { column_ns: 50_000_000, ..TraceHeat::default() }, None);
    for tuple in &mut results.tuples {
        (tuple.even_p50_ns, tuple.odd_p50_ns) = (None, None);
        (tuple.in_use, tuple.range, tuple.fill) = (None, None, None);
    }
    for sample in &mut results.samples {
        (sample.source_port, sample.tuple) = (None, None);
    }
    record
}

/// Returns a record without filters or times: every field that may be null is null.
pub(crate) fn bare_trace_accept() -> TraceAcceptRecord {
    let mut record = empty_trace_accept();
    record.results = trace_accept().results;
    (record.results.wait_ns, record.results.handshake_ns) = (None, None);
    for listener in &mut record.results.listeners {
        (listener.wait_ns, listener.handshake_ns, listener.jain) = (None, None, None);
    }
    record
}

/// Returns a trace during which no process connected.
pub(crate) fn empty_trace() -> TraceConnectRecord {
    let mut record = trace_connect();
    record.settings = TraceConnectSettings {
        protocol: "tcp".into(),
        tier: "</script>".into(),
        seed: 1,
        ..bare_trace_connect().settings
    };
    record.results = TraceConnectResults {
        tier: "</script>".into(),
        tier_reason: Some("</script>".into()),
        searches: 0,
        searches_per_s: 0.0,
        failed: BTreeMap::new(),
        search_ns: ByParity::default(),
        failed_search_ns: None,
        handshake_ns: None,
        histogram: Vec::new(),
        heat: TraceHeat::default(),
        flame: None,
        tuples: Vec::new(),
        samples: Vec::new(),
        calls: Part::Seen(Failures {
            calls: vec![FailedCall { address: Some("</script>".into()), ..explained_call() }],
            left_out: 1,
            ..Failures::default()
        }),
        symptoms: symptoms(),
        ..record.results
    };
    record
}

/// Returns a trace of a ladder at one listener, and a listener whose queue is full.
pub(crate) fn trace_accept() -> TraceAcceptRecord {
    let settings = TraceAcceptSettings {
        process: Some(4711),
        name: Some("it's nginx".into()),
        listen: Some("127.0.0.1".into()),
        port: Some(8080),
        netns: Some("/run/netns/blue".into()),
        cgroup: None,
        for_ns: Some(10_000_000_000),
    };
    let wait = Distribution {
        count: 12_000,
        mean: 41_000,
        p50: 21_000,
        p99: 584_000,
        p999: 2_000_000,
        max: 3_100_000,
    };
    let worker = |thread: u32, accepts: u64| TraceWorker {
        process: 4711,
        processes: if accepts == 1_500 { 300 } else { 1 },
        thread,
        name: "it's nginx".into(),
        accepts,
        mean_ns: 41_000,
        p50_ns: 21_000,
        p99_ns: 584_000,
        max_ns: 3_100_000,
        open: accepts / 10,
        reads: 3 * accepts,
        empty: 40,
        woken_for_nothing: 17,
        closed_first: accepts / 2,
        failed: u64::from(accepts == 6_000) * 320,
        error: (accepts == 6_000).then(|| "EMFILE".into()),
    };
    let ladder = TraceListener {
        address: "127.0.0.1:8080".into(),
        cookie: 0xbeef,
        namespace: 4_026_531_840,
        group: 0,
        closed: false,
        queued: 12_001,
        accepts: 12_000,
        other_accepts: 0,
        wait_ns: Some(wait),
        handshake_ns: Some(wait),
        retried_handshakes: 1,
        depth: Depth { mean: 1.25, max: 9, backlog: 4096, full: 0 },
        overflows: 0,
        overflow_acks: 0,
        other_drops: 0,
        ignored: Some(99),
        never_accepted: 1,
        closed_by_peer: 5_000,
        closed_first: 6_000,
        reset: 3,
        jain: Some(0.553),
        workers: (0..24).map(|turn: u32| worker(4711 + turn, 6_000 >> turn.min(12))).collect(),
    };
    let full = TraceListener {
        address: "[::]:8081".into(),
        group: 2,
        closed: true,
        accepts: 0,
        wait_ns: None,
        depth: Depth { mean: 1.5, max: 2, backlog: 1, full: 1 },
        overflows: 77,
        overflow_acks: 7,
        jain: None,
        workers: Vec::new(),
        ..ladder.clone()
    };
    let results = TraceAcceptResults {
        tier: "tp_btf".into(),
        elapsed_ns: 10_000_000_000,
        accepts: 12_000,
        accepts_per_s: 1_200.0,
        wait_ns: Some(wait),
        handshake_ns: Some(wait),
        overflows: 77,
        empty: 960,
        woken_for_nothing: 408,
        lost: 3,
        notes: vec!["3 events of 15,000 were lost: the ring buffer was full".into()],
        earlier: 2,
        histogram: vec![
            WaitStep { from_ns: 20_480, count: 11_000 },
            WaitStep { from_ns: 573_440, count: 999 },
            WaitStep { from_ns: 3_014_656, count: 1 },
        ],
        listeners: vec![ladder, full],
        calls: Part::Seen(Failures { calls: vec![explained_call()], left_out: 1, ..Failures::default() }),
        symptoms: symptoms(),
        unix_listeners: Part::Seen(vec![TraceUnixListener {
            path: "/run/it's </script>.sock".into(),
            cookie: 4_102,
            readings: 51,
            waiting_first: 0,
            waiting_last: 8,
            waiting_max: 9,
            full: 12,
            backlog: 8,
            refused: Some(261),
            owners: vec![doctor::owner(903, "php-fpm8.2", 1)],
            workers: vec![doctor::owner(904, "php-fpm8.2", 1)],
        }]),
    };
    record("trace accept", settings, results)
}

/// Returns a trace during which no process accepted.
pub(crate) fn empty_trace_accept() -> TraceAcceptRecord {
    let mut record = trace_accept();
    record.settings = TraceAcceptSettings {
        process: None,
        name: None,
        listen: None,
        port: None,
        netns: None,
        cgroup: None,
        for_ns: None,
    };
    record.results = TraceAcceptResults {
        tier: "</script>".into(),
        accepts: 0,
        accepts_per_s: 0.0,
        wait_ns: None,
        handshake_ns: None,
        overflows: 0,
        histogram: Vec::new(),
        listeners: Vec::new(),
        calls: Part::Hidden("</script>".into()),
        symptoms: Part::Hidden("</script>".into()),
        unix_listeners: Part::Hidden("</script>".into()),
        ..record.results
    };
    record
}

fn symptoms() -> Part<Vec<TraceSymptom>> {
    Part::Seen(vec![
        TraceSymptom { sentence: "TcpExt.ListenOverflows grew by 1,006".into(), rules: vec!["A01".into()] },
        TraceSymptom { sentence: "Udp.MemErrors grew by 4</script>".into(), rules: Vec::new() },
    ])
}

/// Returns a failed call with the causes of its errno.
fn explained_call() -> FailedCall {
    FailedCall { causes: vec!["the cause here: it's </script>".into()], ..doctor::failed_call() }
}

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
