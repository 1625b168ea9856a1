//! Experiments of `lab`, except `accept` and `keepalive`.

use std::collections::BTreeMap;

use fourtuple_record::measure::summary;
use fourtuple_record::*;

use super::{LOW, Noise, SECOND, accept, record};

/// Returns one run over `dials` ports. `cost(fill, odd)` is the mean time in connect(), `failing(fill)` the share that fails.
fn run(
    strategy: &str,
    repeat: u32,
    dials: u64,
    parity: impl Fn(f64, f64) -> bool,
    cost: impl Fn(f64, bool) -> f64,
    failing: impl Fn(f64) -> f64,
) -> StrategyResult {
    let mut noise = Noise(strategy.len() as u64 * 7919 + u64::from(repeat));
    let mut scatter = Scatter::with_capacity(dials as usize);
    let (mut even, mut odd, mut failed, mut elapsed) = (Vec::new(), Vec::new(), 0_u64, 0_u64);
    let mut parts = vec![(0_u64, 0_u64); 16];
    for dial in 0..dials {
        let fill = dial as f64 / dials as f64;
        let is_odd = parity(fill, noise.next());
        let time = noise.time(cost(fill, is_odd));
        let fails = noise.next() < failing(fill);
        scatter.push(time, is_odd, fails);
        elapsed += time + 4_000;
        if fails {
            failed += 1;
            continue;
        }
        let part = &mut parts[(fill * 16.0) as usize];
        *part = (part.0 + 1, part.1 + time);
        if is_odd { odd.push(time) } else { even.push(time) }
    }
    let mut all = [even.as_slice(), odd.as_slice()].concat();
    StrategyResult {
        strategy: strategy.into(),
        chosen: (strategy == "auto").then(|| "full-range".into()),
        repeat,
        dials,
        connections: dials - failed,
        retries: 0,
        errors: if failed > 0 { BTreeMap::from([("EADDRNOTAVAIL".into(), failed)]) } else { BTreeMap::new() },
        elapsed_ns: elapsed,
        rate_per_s: (dials - failed) as f64 / elapsed as f64 * 1e9,
        cpu_ns_per_dial: elapsed / dials - 900,
        connect_ns: ByParity { all: summary(&mut all), even: summary(&mut even), odd: summary(&mut odd) },
        by_fill: parts
            .iter()
            .enumerate()
            .map(|(part, (connections, time))| FillPoint {
                fill: (part + 1) as f64 / 16.0,
                connections: *connections,
                mean_ns: time.checked_div(*connections).unwrap_or(0),
                floor_ns: 14_100 + 37 * (part as u64 % 3),
            })
            .collect(),
        floor_ns: 14_130,
        scatter: Some(scatter),
    }
}

pub(crate) fn strategy(name: &str, repeat: u32, dials: u64) -> StrategyResult {
    let by_chance = |_: f64, chance: f64| chance < 0.5;
    match name {
        "kernel-default" => {
            let cost = |_: f64, odd: bool| if odd { 4_682_000.0 } else { 16_500.0 };
            run(name, repeat, dials, |fill, _| fill >= 0.5, cost, |_| 0.0)
        }
        "select-test-repeat" => {
            let cost = |fill: f64, _: bool| 15_000.0 + 2_500.0 / (1.001 - fill);
            run(name, repeat, dials, by_chance, cost, |_| 0.0)
        }
        "full-range" | "auto" => {
            let cost = |fill: f64, _: bool| 14_300.0 + 40.0 / (1.0005 - fill);
            run(name, repeat, dials, by_chance, cost, |_| 0.0)
        }
        window => {
            let width: f64 = window.rsplit(':').next().unwrap().parse().unwrap();
            let cost = move |fill: f64, _: bool| {
                15_000.0 + width * 3.0 * fill.powi(3) + width * 12.0 * fill.powi(30)
            };
            let failing = move |fill: f64| (fill.powi(14) * (0.2 + width / 12_000.0)).min(0.95);
            run(name, repeat, dials, by_chance, cost, failing)
        }
    }
}

pub(crate) fn ports(names: &[&str], repeats: u32, dials: u64) -> PortsRecord {
    let mut strategies = Vec::new();
    for repeat in 1..=repeats {
        strategies.extend(names.iter().map(|name| strategy(name, repeat, dials)));
    }
    let settings = PortsSettings {
        low: LOW,
        high: LOW + (dials - 1) as u16,
        strategies: names.iter().map(|&name| name.into()).collect(),
        repeats,
        seed: 7,
        ..PortsSettings::default()
    };
    let advice = vec![
        "This kernel searches linearly when IP_LOCAL_PORT_RANGE is set: set option 51 at SOL_IP to 0xFFFF0000 on \
         every socket before connect(), or dial through fourtuple::dial with Strategy::Auto."
            .into(),
        "Without it, connect() takes 4.68ms instead of 16.5us once half of the range is in use.".into(),
    ];
    record("lab ports", settings, PortsResults { tuples: dials, strategies, advice })
}

fn time_wait_run(remedy: &str, transactions: u64, stalls: bool, keeps: f64) -> TimeWaitRun {
    let (rate, ports) = (19_800.0, 16_384_u64);
    let first_part = transactions.min(if stalls { ports } else { transactions });
    let busy_ns = (first_part as f64 / rate * 1e9) as u64;
    let stall_ns = if stalls { 60 * SECOND - busy_ns + 180_000_000 } else { 0 };
    let rest_ns = ((transactions - first_part) as f64 / rate * 1e9) as u64;
    let end = busy_ns + stall_ns + rest_ns;
    let step = if stalls { 500_000_000 } else { 20_000_000 };
    let points = (0..=end / step).map(|index| {
        let at_ns = index * step;
        let completed = if at_ns < busy_ns {
            (at_ns as f64 / 1e9 * rate) as u64
        } else if at_ns < busy_ns + stall_ns {
            first_part
        } else {
            first_part + ((at_ns - busy_ns - stall_ns) as f64 / 1e9 * rate) as u64
        };
        TimeWaitPoint { at_ns, count: (completed.min(ports * 4) as f64 * keeps) as u64, completed }
    });
    TimeWaitRun {
        remedy: remedy.into(),
        transactions,
        completed: transactions,
        elapsed_ns: end,
        rate_per_s: rate,
        predicted_stall_at: stalls.then_some(ports + 1),
        stalled_at: stalls.then_some(ports + 1),
        predicted_stall_ns: if stalls { 60 * SECOND - busy_ns } else { 0 },
        stall_ns,
        cut: false,
        errors: if stalls { BTreeMap::from([("EADDRNOTAVAIL".into(), 5_911)]) } else { BTreeMap::new() },
        time_wait: points.collect(),
    }
}

pub(crate) fn time_wait() -> TimeWaitRecord {
    let mut cut = time_wait_run("none-over", 18_432, true, 1.0);
    cut.errors.insert("ECONNREFUSED".into(), 1);
    let runs = vec![
        time_wait_run("none-under", 16_383, false, 1.0),
        cut,
        time_wait_run("more-sources", 32_768, false, 1.0),
        time_wait_run("wider-range", 32_768, false, 1.0),
        time_wait_run("tcp-tw-reuse", 32_768, false, 0.6),
        time_wait_run("server-closes-first", 32_768, false, 0.01),
        time_wait_run("keep-alive", 32_768, false, 0.0),
    ];
    let settings = TimeWaitSettings {
        low: 49_152,
        high: 65_535,
        remedies: runs.iter().map(|run| run.remedy.clone()).collect(),
        patience_ns: 70 * SECOND,
    };
    let advice = vec![
        "One source address closes 273 connections a second for ever; beyond that a stall of up to 60 s is certain."
            .into(),
        "Keep connections alive, or let the server close first; net.ipv4.tcp_tw_reuse=1 also removes the stall here."
            .into(),
    ];
    let results = TimeWaitResults {
        ports: 16_384,
        time_wait_ns: 60 * SECOND,
        ceiling_per_s: 16_384.0 / 60.0,
        runs,
        advice,
    };
    record("lab time-wait", settings, results)
}

pub(crate) fn lab() -> LabRecord {
    let (ports, time_wait) = (ports(&["kernel-default", "full-range", "auto"], 1, 4_000), time_wait());
    let accept = accept();
    record(
        "lab",
        LabSettings { ports: ports.settings, time_wait: time_wait.settings, accept: Some(accept.settings) },
        LabResults { ports: ports.results, time_wait: time_wait.results, accept: Some(accept.results) },
    )
}

/// Returns a hostile record that attacks the page and the terminal.
pub(crate) fn hostile() -> PortsRecord {
    let evil = "</script><script>alert(1)</script><!-- \" ' & \x1b[2J\u{202e} ";
    let mut record = ports(&["random-window:500"], 1, 64);
    record.started = evil.into();
    record.host.name = evil.into();
    record.host.kernel = evil.into();
    record.host.virtualization = evil.into();
    record.host.sysctls.insert(evil.into(), evil.into());
    record.validity.push(Remark::new("evil", evil.repeat(20)));
    record.results.advice.push(evil.into());
    record.results.strategies[0].strategy = evil.into();
    record.results.strategies[0].chosen = Some(evil.into());
    record.results.strategies[0].errors.insert(evil.into(), u64::MAX);
    record.results.strategies[0].errors.insert("EVIL".into(), u64::MAX);
    record.results.strategies[0].by_fill[0].connections = u64::MAX;
    record.results.strategies[0].by_fill[0].mean_ns = u64::MAX;
    record.results.strategies.push(record.results.strategies[0].clone());
    record.results.strategies[0].rate_per_s = f64::MAX;
    record.results.strategies[0].elapsed_ns = u64::MAX;
    record
}

fn side(policy: &str, queries_per_s: f64, waits_per_query: f64) -> LocksSide {
    let cpu = 1.6e9 / queries_per_s;
    LocksSide {
        policy: policy.into(),
        sources: 4,
        strategy: "kernel-default".into(),
        low: 1_024,
        high: 65_535,
        queries: 80_000,
        queries_per_s,
        queries_per_s_low: queries_per_s * 0.97,
        queries_per_s_high: queries_per_s * 1.03,
        cpu_ns_per_query: cpu,
        cpu_ns_per_query_low: cpu * 0.98,
        cpu_ns_per_query_high: cpu * 1.01,
        waits_per_query: Some(waits_per_query),
        wait_ns_per_query: Some(waits_per_query * 3_000.0),
        classes: vec![LocksClass {
            class: "listener".into(),
            waits_per_query,
            wait_ns_per_query: waits_per_query * 3_000.0,
        }],
        errors: BTreeMap::new(),
    }
}

/// Returns a record of one change, which has an effect.
pub(crate) fn lab_locks() -> LabLocksRecord {
    let settings = LabLocksSettings {
        changes: vec!["reuseport".into()],
        workers: 2,
        clients: 4,
        queries: 10_000,
        sources: 4,
        repeats: 8,
        traced: 2,
        closer: "client".into(),
        narrow: 0.05,
        seed: 1,
    };
    let advice = "A listener for each worker helps on this host.";
    let pair = LocksPair {
        change: "reuseport".into(),
        before: side("exclusive", 20_000.0, 0.025),
        after: side("reuseport", 22_000.0, 0.001),
        pairs: 8,
        ratio: LocksRatio { value: 1.1, low: Some(1.07), high: Some(1.13) },
        verdict: "10.0% more queries per second, 7.0 to 13.0".into(),
        cpu_ratio: LocksRatio { value: 0.909, low: Some(0.89), high: Some(0.93) },
        cpu_verdict: "9.1% less CPU time per query, 7.0 to 11.0".into(),
        advice: advice.into(),
    };
    let results = LabLocksResults {
        pairs: vec![pair],
        untraced: None,
        blind_spots: vec!["spinlocks of guests".into()],
        advice: vec![advice.into()],
    };
    record("lab locks", settings, results)
}

/// Returns a record without permission to trace, with one pair only.
pub(crate) fn untraced_lab_locks() -> LabLocksRecord {
    let mut record = lab_locks();
    record.settings.traced = 0;
    record.results.untraced = Some("BPF is refused".into());
    record.results.blind_spots.clear();
    let pair = &mut record.results.pairs[0];
    pair.pairs = 1;
    pair.ratio = LocksRatio { value: 1.1, low: None, high: None };
    pair.cpu_ratio = pair.ratio;
    for side in [&mut pair.before, &mut pair.after] {
        (side.waits_per_query, side.wait_ns_per_query) = (None, None);
        side.classes.clear();
        side.errors.insert("ECONNRESET".into(), 1);
    }
    record
}

/// Returns a hostile record: markup in every text, and impossible numbers.
pub(crate) fn hostile_lab_locks() -> LabLocksRecord {
    let mut record = lab_locks();
    let evil = || "</script><b onclick=x>\u{1b}[2J".to_owned();
    let mut pair = record.results.pairs[0].clone();
    (pair.change, pair.verdict, pair.cpu_verdict, pair.advice) = (evil(), evil(), evil(), evil());
    pair.before.policy = evil();
    pair.before.classes[0].class = evil();
    (pair.before.queries_per_s, pair.before.queries_per_s_high) = (0.0, 1e300);
    pair.before.waits_per_query = Some(1e300);
    pair.after.cpu_ns_per_query = 1e300;
    pair.after.errors = BTreeMap::from([(evil(), u64::MAX), ("ECONNRESET".into(), u64::MAX)]);
    pair.ratio.value = 1e300;
    let mut empty = record.results.pairs[0].clone();
    for side in [&mut empty.before, &mut empty.after] {
        (side.queries_per_s, side.queries_per_s_low, side.queries_per_s_high) = (0.0, 0.0, 0.0);
    }
    record.results.pairs = vec![pair, empty];
    record.results.blind_spots = vec![evil()];
    record.results.untraced = Some(evil());
    record.results.advice = vec![evil()];
    record
}

fn cell(plane: &str, planes: u32, packet_bytes: u32, work_ns: u64, cpu_ns: u64) -> PlanesCell {
    let pps = 1e9 / cpu_ns as f64 * f64::from(planes.min(2)) * 0.8;
    let ratio = |ratio: f64| Some(PlanesRatio { ratio, low: ratio * 0.97, high: ratio * 1.03 });
    PlanesCell {
        plane: plane.into(),
        planes,
        spread: "flow".into(),
        flows: 1,
        inner_flows: 120,
        packet_bytes,
        mtu: if packet_bytes > 1472 { 3000 } else { 1500 },
        work_ns,
        repeats: 3,
        packets: 60_000,
        lost: 0,
        dropped: BTreeMap::new(),
        reordered: 0,
        share: vec![1.0 / f64::from(planes); planes as usize],
        cpu_ns_per_packet: cpu_ns,
        cpu_ns_low: Some(cpu_ns - 50),
        cpu_ns_high: Some(cpu_ns + 60),
        pps,
        pps_low: Some(pps * 0.95),
        pps_high: Some(pps * 1.05),
        capacity_pps: 1e9 / cpu_ns as f64 * f64::from(planes),
        generator_waited: 0.5,
        limited_by: "planes".into(),
        generator_cpu_ns_per_packet: 1_200,
        sink_cpu_ns_per_packet: 90,
        cpu_to_one_by_one: if plane == "one-by-one" { None } else { ratio(cpu_ns as f64 / 2927.0) },
        capacity_to_one_plane: if planes == 1 { None } else { ratio(f64::from(planes) * 0.97) },
        pps_to_one_plane: if planes == 1 { None } else { ratio(1.38) },
    }
}

fn settings() -> PlanesSettings {
    PlanesSettings {
        every_combination: false,
        plane: vec!["one-by-one".into(), "batched".into(), "offload".into()],
        planes: vec![1, 4, 2],
        bytes: vec![64, 1472, 2972],
        spread: vec!["flow".into(), "hash".into(), "random".into()],
        flows: vec![1],
        work_ns: vec![0, 6_000],
        packets: 20_000,
        repeats: 3,
        over: "veth".into(),
        seed: 1,
    }
}

/// Returns the full figure, the cost per packet, and one 4-tuple with the selectors `hash` and `random`.
pub(crate) fn planes() -> PlanesRecord {
    let mut cells = vec![
        cell("one-by-one", 1, 64, 0, 2927),
        cell("batched", 1, 64, 0, 1887),
        PlanesCell { limited_by: "generator".into(), ..cell("offload", 1, 64, 0, 572) },
    ];
    let hash = PlanesCell {
        spread: "hash".into(),
        share: vec![0.0, 1.0, 0.0, 0.0],
        capacity_to_one_plane: None,
        pps_to_one_plane: None,
        ..cell("batched", 4, 64, 0, 1900)
    };
    let random = PlanesCell {
        spread: "random".into(),
        reordered: 8_412,
        lost: 12,
        dropped: BTreeMap::from([("overflow".into(), 12)]),
        ..hash.clone()
    };
    cells.extend([hash, random]);
    for bytes in [1472, 2972] {
        cells.extend([1, 2, 4].map(|planes| cell("one-by-one", planes, bytes, 6_000, 10_000)));
    }
    let results = PlanesResults {
        cells,
        skipped: vec![PlanesSkipped { plane: "uring".into(), why: "io_uring_setup(): EPERM".into() }],
        planes_help_above_ns: Some(2_100),
        advice: vec!["Planes help above 2.1 us a packet here".into()],
    };
    record("lab planes", settings(), results)
}

/// Returns one run of one cell without a counterpart: every field that may be null is null.
pub(crate) fn bare_planes() -> PlanesRecord {
    let mut record = planes();
    let cell = PlanesCell {
        cpu_ns_low: None,
        cpu_ns_high: None,
        pps_low: None,
        pps_high: None,
        cpu_to_one_by_one: None,
        capacity_to_one_plane: None,
        pps_to_one_plane: None,
        lost: 1,
        dropped: BTreeMap::from([("overflow".into(), 1)]),
        ..record.results.cells[0].clone()
    };
    (record.results.cells, record.results.planes_help_above_ns) = (vec![cell], None);
    record
}

/// Returns a run interrupted before its first cell.
pub(crate) fn no_planes() -> PlanesRecord {
    let settings = PlanesSettings { every_combination: true, over: "loopback".into(), ..settings() };
    let mut odd = cell("<script>alert(1)</script>", 1, 64, 0, 100);
    odd.share = Vec::new();
    (odd.packets, odd.pps, odd.cpu_ns_low) = (0, 0.0, None);
    let results = PlanesResults {
        cells: vec![odd],
        skipped: Vec::new(),
        planes_help_above_ns: None,
        advice: Vec::new(),
    };
    record("lab planes", settings, results)
}
