use super::*;

fn settings() -> AcceptSettings {
    AcceptSettings {
        workers: 8,
        clients: 24,
        connections: 8_000,
        families: vec!["unix".into(), "tcp4".into()],
        policies: ["exclusive", "rotate", "reuseport", "shared-oneshot"].map(String::from).to_vec(),
        close_every: vec![1],
        load: vec!["light".into(), "heavy".into()],
        service: "sleep".into(),
        short_ns: 100_000,
        long_ns: 10_000_000,
        long_share: 0.05,
        pause_ns: 0,
        slow_ns: 5_000_000,
        for_ns: 5_000_000_000,
        repeats: 3,
        backlog: 4096,
        seed: 1,
        server: None,
    }
}

fn cell(policy: &str, family: &str, every: u64, load: &str, counts: [u64; 8], p999: u64) -> AcceptCell {
    let sum: u64 = counts.iter().sum();
    let squares: u64 = counts.iter().map(|count| count * count).sum();
    let most = counts.iter().max().copied().unwrap_or(0);
    let wait_ns = WaitNs {
        p50: 70_000,
        p99: p999 / 2,
        p999,
        max: p999 * 2,
        p999_low: Some(p999 / 10 * 8),
        p999_high: Some(p999 / 10 * 13),
    };
    AcceptCell {
        policy: policy.into(),
        server: (policy == "external").then(|| "nginx".into()),
        family: family.into(),
        close_every: every,
        load: load.into(),
        workers: 8,
        clients: if load == "light" { 1 } else { 24 },
        accepts: counts.to_vec(),
        requests: counts.to_vec(),
        sockets: counts.map(|count| count / 300).to_vec(),
        busy_ns: counts.map(|count| count * 600_000).to_vec(),
        jain: Some((sum * sum) as f64 / (8 * squares) as f64),
        max_over_mean: Some(most as f64 * 8.0 / sum as f64),
        wait_ns,
        slow_per_10k: p999 as f64 / 200_000.0,
        misplaced_wait_ns: p999 / 100,
        probe: (load == "sleep").then_some(Probe {
            requests: 900,
            slow_per_10k: p999 as f64 / 150_000.0,
            wait_ns,
        }),
        cpu_ns_per_request: 14_200,
        wakeups_per_accept: Some(1.08),
        empty_accepts_per_accept: Some(0.08),
        operations: sum * 3,
        errors: BTreeMap::new(),
        repeats: 3,
    }
}

const LADDER: [u64; 8] = [4325, 2848, 0, 682, 141, 4, 0, 0];
const EVEN: [u64; 8] = [1010, 1013, 1016, 975, 987, 994, 1000, 1005];
const HASHED: [u64; 8] = [1110, 913, 1056, 905, 1087, 894, 1030, 1005];

/// Returns the results of a ladder over two families under two loads; skips combinations that Unix sockets do not support.
pub(crate) fn accept() -> AcceptRecord {
    let mut cells = Vec::new();
    for family in ["unix", "tcp4"] {
        for load in ["light", "heavy"] {
            let ladder = if load == "light" { LADDER } else { LADDER.map(|count| count + 1500) };
            cells.push(cell("exclusive", family, 1, load, ladder, 11_300_000));
            cells.push(cell("rotate", family, 1, load, EVEN, 10_350_000));
            cells.push(cell("shared-oneshot", family, 1, load, EVEN, 3_100_000));
            cells.push(cell("external", family, 1, load, HASHED, 12_000_000));
            if family == "tcp4" {
                cells.push(cell("reuseport-least-busy", family, 1, load, HASHED, 4_000_000));
            }
        }
    }
    let skipped = SkippedCell {
        policy: "reuseport".into(),
        family: "unix".into(),
        close_every: 1,
        why: "reuseport is not possible on unix sockets: SO_REUSEPORT is refused".into(),
    };
    cells[0].errors.insert("ECONNRESET".into(), 12);
    let results =
        AcceptResults { cells, skipped: vec![skipped], timeline: None, break_even: None, advice: Vec::new() };
    record("lab accept", AcceptSettings { server: Some("unix:/run/my nginx".into()), ..settings() }, results)
}

/// Returns the results of kept connections, which wait for a busy worker unless workers share them.
pub(crate) fn keepalive() -> AcceptRecord {
    let closings = [1, 2, 5, 100, 0];
    let mut cells = Vec::new();
    for (policy, counts, waits) in [
        ("exclusive", LADDER, [11_300_000, 22_800_000, 33_000_000, 34_000_000, 34_600_000]),
        ("rotate", EVEN, [10_350_000, 12_000_000, 15_000_000, 19_000_000, 19_800_000]),
        ("shared-oneshot", EVEN, [2_600_000, 2_650_000, 2_600_000, 2_700_000, 2_620_000]),
        ("dispatcher", HASHED, [2_900_000, 2_950_000, 2_900_000, 2_900_000, 2_920_000]),
        ("external", HASHED, [11_900_000, 13_950_000, 18_900_000, 21_900_000, 22_920_000]),
    ] {
        for (every, p999) in closings.into_iter().zip(waits) {
            cells.push(cell(policy, "unix", every, "sleep", counts, p999));
        }
    }
    let skipped = [("blocking", "unix", 0), ("reuseport", "unix", 1), ("reuseport", "unix", 0)];
    let skipped = skipped.map(|(policy, family, close_every)| SkippedCell {
        policy: policy.into(),
        family: family.into(),
        close_every,
        why: if policy == "blocking" { "a worker would wait for one connection for ever" } else { "refused" }
            .into(),
    });
    let span = |from: u64, to: u64, waited: u64| Span {
        from_ns: 80_000_000 + from * 10_000,
        to_ns: 80_000_000 + to * 10_000,
        waited_ns: waited * 10_000,
    };
    let timeline = Timeline {
        policy: "exclusive".into(),
        family: "unix".into(),
        close_every: 0,
        workers: vec![
            vec![
                span(0, 90, 3),
                span(100, 1100, 12),
                span(1100, 1110, 800),
                span(1110, 2110, 700),
                span(2110, 2120, 1900),
            ],
            vec![span(20, 30, 0), span(400, 410, 1), span(1400, 2400, 2)],
            vec![span(50, 1050, 0)],
            vec![span(700, 710, 0)],
            Vec::new(),
        ],
        from_ns: 80_000_000,
        to_ns: 104_000_000,
        waiting: Waiter {
            worker: 0,
            sent_ns: 82_200_000,
            begun_ns: 101_100_000,
            ended_ns: 101_200_000,
            idle_worker: 3,
        },
    };
    let break_even =
        BreakEven { fresh_connection_ns: 21_000, misplaced_wait_ns: 346_000, requests: 2000, closes: true };
    let results = AcceptResults {
        cells,
        skipped: skipped.to_vec(),
        timeline: Some(timeline),
        break_even: Some(break_even),
        advice: vec!["Connections can stay open: with shared-oneshot they belong to no worker.".into()],
    };
    let settings = AcceptSettings {
        connections: 0,
        families: vec!["unix".into()],
        close_every: closings.to_vec(),
        load: vec!["sleep".into()],
        pause_ns: 1_000_000,
        ..settings()
    };
    record("lab keepalive", settings, results)
}

/// Returns a record without balance, intervals and counters: every field that may be null is null.
pub(crate) fn bare_keepalive() -> AcceptRecord {
    let mut record = keepalive();
    (record.results.timeline, record.results.break_even) = (None, None);
    let cell = &mut record.results.cells[0];
    (cell.jain, cell.max_over_mean, cell.probe) = (None, None, None);
    (cell.wait_ns.p999_low, cell.wait_ns.p999_high) = (None, None);
    (cell.wakeups_per_accept, cell.empty_accepts_per_accept) = (None, None);
    cell.errors.insert("ECONNRESET".into(), 1);
    record
}

/// Returns a record with skipped combinations only.
pub(crate) fn refused() -> AcceptRecord {
    let mut record = accept();
    record.results.cells.clear();
    record
}

/// Returns a hostile record that attacks the page and the terminal.
pub(crate) fn hostile_keepalive() -> AcceptRecord {
    let evil = "</script><script>alert(1)</script><!-- \" ' & \x1b[2J\u{202e} ";
    let mut record = keepalive();
    let cells = &mut record.results.cells;
    cells.truncate(3);
    for cell in cells.iter_mut() {
        (cell.policy, cell.family, cell.load) = (evil.into(), evil.into(), evil.into());
    }
    cells[0].server = Some(evil.into());
    cells[0].errors.insert(evil.into(), u64::MAX);
    cells[0].accepts = vec![u64::MAX; 300];
    cells[0].requests = vec![u64::MAX; 300];
    cells[1].requests = Vec::new();
    cells[1].wait_ns = WaitNs {
        max: u64::MAX,
        p999: u64::MAX,
        p999_low: Some(0),
        p999_high: Some(u64::MAX),
        ..WaitNs::default()
    };
    (cells[1].jain, cells[1].max_over_mean, cells[1].probe) = (None, None, None);
    (cells[2].jain, cells[2].slow_per_10k) = (Some(f64::MAX), f64::MAX);
    cells[2].operations = 0;
    record.results.skipped[0].why = evil.into();
    let timeline = record.results.timeline.as_mut().unwrap();
    (timeline.from_ns, timeline.to_ns) = (u64::MAX, 0);
    timeline.workers[0][0] = Span { from_ns: u64::MAX, to_ns: 0, waited_ns: u64::MAX };
    timeline.workers[1][0] = Span { from_ns: 0, to_ns: u64::MAX, waited_ns: u64::MAX };
    timeline.waiting =
        Waiter { worker: u32::MAX, sent_ns: 0, begun_ns: u64::MAX, ended_ns: 0, idle_worker: u32::MAX };
    record.settings.long_share = 0.0;
    record.settings.server = Some(evil.into());
    record
}
