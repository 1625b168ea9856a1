//! Sample records with the figures of kernel 6.18 on two cores (56,512 ports, loopback). The schema tests use them,
//! and by path the tests of `report`.
#![allow(dead_code, reason = "every test file uses its own part of the samples")]

mod accept;
mod doctor;
mod fix;
mod fleet;
mod forward;
mod guard;
mod lab_locks;
mod load;
mod planes;
mod trace_locks;

use std::collections::BTreeMap;

use fourtuple_record::snapshot::{FailedCall, Failures, Part};
use fourtuple_record::*;

pub(crate) use accept::{accept, bare_keepalive, hostile_keepalive, keepalive, refused};
pub(crate) use doctor::{blind_doctor, doctor, hostile_doctor, live_doctor};
pub(crate) use fix::{
    bare_fix_accept, bare_fix_ports, bare_run, cgroup_run, fix_accept, fix_ports, hostile_fix_accept,
    hostile_fix_ports, hostile_run, preloaded_run, rotated_fix_accept,
};
pub(crate) use fleet::{
    fleet_doctor, fleet_lab_ports, fleet_plan, fleet_serve, fleet_trace_connect, hostile_fleet,
};
pub(crate) use forward::{bare_forward, forward};
pub(crate) use guard::{bare_guard, guard, hostile_guard};
pub(crate) use lab_locks::{hostile_lab_locks, lab_locks, untraced_lab_locks};
pub(crate) use load::{bare_load, fleet, hold, hostile_load, ramp, stalled, steady};
pub(crate) use planes::{bare_planes, no_planes, planes};
pub(crate) use trace_locks::{bare_trace_locks, trace_locks};

pub(crate) const LOW: u16 = 9024;
pub(crate) const HIGH: u16 = 65535;
pub(crate) const PORTS: u64 = 56_512;

/// A multiplicative congruential generator: the same dots on every machine.
pub(crate) struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a time around `mean`, skewed as latencies are, with a rare outlier.
    fn time(&mut self, mean: f64) -> u64 {
        let skewed = (self.next() + self.next() + self.next() - 1.5).exp2();
        let outlier = if self.next() < 0.001 { 8.0 + 20.0 * self.next() } else { 1.0 };
        (mean * 0.97 * skewed * outlier) as u64
    }
}

pub(crate) fn host() -> Host {
    Host {
        name: "web-1".into(),
        kernel: "6.18.5".into(),
        cpus: 2,
        virtualization: "kvm".into(),
        sysctls: BTreeMap::from([
            ("net.ipv4.ip_local_port_range".into(), "32768 60999".into()),
            ("net.ipv4.tcp_tw_reuse".into(), "2".into()),
        ]),
        capabilities: BTreeMap::from([("ip_local_port_range".into(), "linear".into())]),
    }
}

fn record<S, R>(command: &str, settings: S, results: R) -> Record<S, R> {
    Record {
        schema: SCHEMA.into(),
        command: command.into(),
        started: "2026-03-01T12:00:00Z".into(),
        host: host(),
        settings,
        validity: Vec::new(),
        results,
    }
}

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
        connect_ns: ByParity { all: spread(&mut all), even: spread(&mut even), odd: spread(&mut odd) },
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

fn spread(times: &mut [u64]) -> Option<Distribution> {
    times.sort_unstable();
    let count = times.len();
    let rank = |per_mille: usize| times[(count * per_mille).div_ceil(1000).max(1) - 1];
    (count > 0).then(|| Distribution {
        count: count as u64,
        mean: times.iter().sum::<u64>() / count as u64,
        p50: rank(500),
        p99: rank(990),
        p999: rank(999),
        max: times[count - 1],
    })
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

/// Returns the full experiment of Cloudflare, "connect() - why are you so slow?", at its size.
pub(crate) fn full_ports() -> PortsRecord {
    let names = [
        "kernel-default",
        "select-test-repeat",
        "random-window:500",
        "random-window:1000",
        "random-window:5000",
        "random-window:10000",
        "full-range",
        "auto",
    ];
    ports(&names, 1, PORTS)
}

const SECOND: u64 = 1_000_000_000;

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

pub(crate) fn plan() -> PlanRecord {
    let settings = PlanSettings {
        low: LOW,
        high: HIGH,
        reserved: 12,
        sources: 2,
        destinations: 1_000,
        arrival_per_s: Some(850_000.0),
        hold_ns: 4 * SECOND,
        closer: "us".into(),
        time_wait_ns: 60 * SECOND,
        kernel: "parity".into(),
        strategy: "kernel-default".into(),
        windows: false,
        costs: "calibrated".into(),
    };
    let by_fill = (1..=16).map(|part| {
        let fill = f64::from(part) / 16.0;
        let probes = if fill <= 0.5 { 1.0 / (1.03 - 2.0 * fill).max(0.03) } else { 28_250.0 + 90.0 * fill };
        PlanPoint { fill, probes, mean_ns: 14_100 + (probes * 165.0) as u64 }
    });
    let results = PlanResults {
        capacity: 113_000_000,
        cliff_connections: Some(56_500_000),
        steady_tuples: Some(54_400_000),
        cliff_after_ns: None,
        exhausted_after_ns: None,
        sources_needed: 2,
        failed_dials: 0,
        by_fill: by_fill.collect(),
        others: vec![PlanOther {
            strategy: "random-window:500".into(),
            cliff_connections: None,
            cliff_after_ns: None,
            sources_needed: 1,
            last_mean_ns: Some(18_400),
        }],
        over_time: [(0, 0), (64 * SECOND, 54_400_000), (80 * SECOND, 54_400_000)]
            .map(|(at_ns, tuples)| PlanMoment { at_ns, tuples })
            .to_vec(),
        simulated: 113_000_000,
        advice: vec![
            "Two source addresses are enough, with 3.7% to spare before connect() turns slow.".into(),
        ],
    };
    record("plan", settings, results)
}

/// Returns a plan without a cliff, whose ports run out.
fn bare_plan() -> PlanRecord {
    let mut record = plan();
    (record.results.cliff_connections, record.results.exhausted_after_ns) = (None, Some(133 * SECOND));
    (record.settings.arrival_per_s, record.results.steady_tuples) = (None, None);
    (record.results.others, record.results.over_time) = (Vec::new(), Vec::new());
    record
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

pub(crate) fn compare() -> CompareRecord {
    let mut noise = Noise(11);
    let mut samples = |middle: f64| (0..32).map(|_| middle * (0.97 + 0.06 * noise.next())).collect();
    let settings = CompareSettings {
        a: "lab ports --range 32768-40959 --strategy select-test-repeat".into(),
        b: "lab ports --range 32768-40959 --strategy full-range".into(),
        metric: "rate".into(),
        for_ns: Some(120 * SECOND),
        narrow: 0.02,
        trials: None,
        warmup: 1,
        server_a: None,
        server_b: None,
        server_wait_ns: None,
        pinned: false,
        fresh_namespace: Some(true),
        seed: 1,
    };
    let results = CompareResults {
        ratio: 1.058,
        low: Some(1.041),
        high: Some(1.074),
        verdict: "B is 5.8% faster, 4.1 to 7.4".into(),
        trials: 64,
        pairs: 32,
        client_saturated: 0,
        samples_a: samples(52_000.0),
        samples_b: samples(55_000.0),
    };
    record("compare", settings, results)
}

/// Returns a comparison of two loads, each with a server; in some trials the client was the bottleneck.
pub(crate) fn compared_loads() -> CompareRecord {
    let mut record = compare();
    let load = "load tcp://127.0.0.1:8080 --operations 20000 --close rst";
    (record.settings.a, record.settings.b) = (load.into(), load.into());
    let server = "serve crr --listen 127.0.0.1:8080 --workers 1";
    record.settings.server_a = Some(server.into());
    record.settings.server_b = Some(format!("{server} --service 2us --spin"));
    (record.settings.server_wait_ns, record.settings.pinned) = (Some(10 * SECOND), true);
    record.results.client_saturated = 3;
    record
}

/// Returns a comparison of saved records with too few trials: every field that may be null is null.
fn bare_compare() -> CompareRecord {
    let mut record = compare();
    (record.settings.for_ns, record.settings.fresh_namespace) = (None, None);
    (record.results.low, record.results.high) = (None, None);
    record
}

/// Returns a comparison with one trial per side, and numbers that no command measures.
fn odd_compare() -> CompareRecord {
    let mut record = compare();
    record.settings =
        CompareSettings { for_ns: None, fresh_namespace: None, metric: "p99".into(), ..record.settings };
    let results = &mut record.results;
    (results.low, results.high, results.ratio) = (None, None, f64::MAX);
    (results.samples_a, results.samples_b) = (vec![f64::MAX, 0.0], Vec::new());
    record
}

/// Returns a record with the ladder of EPOLLEXCLUSIVE: eight workers on a Unix socket, 8,000 connections.
pub(crate) fn serve() -> ServeRecord {
    let settings = ServeSettings {
        listen: "unix:/run/four tuple".into(),
        protocol: "crr".into(),
        policy: Some("exclusive".into()),
        workers: 8,
        request_bytes: Some(1),
        response_bytes: Some(1),
        close: "server".into(),
        close_every: Some(1),
        service: "exp:50us".into(),
        spin: true,
        stall_at_ns: Some(2_000_000_000),
        stall_length_ns: Some(200_000_000),
        idle_ns: Some(60_000_000_000),
        backlog: 4096,
        defer_accept: false,
        pin: true,
        for_ns: Some(10_000_000_000),
        seed: 1,
    };
    let worker = |requests: u64| ServeWorker {
        accepted: requests,
        requests,
        received_bytes: requests,
        sent_bytes: requests,
        errors: if requests == 4 { BTreeMap::from([("request-cut".into(), 3)]) } else { BTreeMap::new() },
    };
    let results = ServeResults {
        listen: settings.listen.clone(),
        protocol: "crr".into(),
        policy: "exclusive".into(),
        elapsed_ns: 10_000_000_000,
        requests_per_s: 800.0,
        workers: [4325, 2848, 0, 682, 141, 4, 0, 0].map(worker).to_vec(),
        jain: Some(0.2936),
        max_over_mean: Some(4.325),
    };
    record("serve", settings, results)
}

/// Returns a server with one worker and no end: every field that may be null is null.
fn bare_serve() -> ServeRecord {
    let mut record = serve();
    let errors = BTreeMap::from([("ECONNRESET".into(), 1)]);
    record.results.workers = vec![ServeWorker { errors, ..ServeWorker::default() }];
    (record.results.jain, record.results.max_over_mean, record.settings.for_ns) = (None, None, None);
    record
}

/// Returns a server without clients, with names that no server writes.
fn odd_serve() -> ServeRecord {
    let mut record = serve();
    record.results.workers = vec![ServeWorker { requests: u64::MAX, ..ServeWorker::default() }; 2];
    (record.results.jain, record.results.max_over_mean) = (None, None);
    record.results.policy = "</script>".into();
    record.settings.close = "never".into();
    record.settings.close_every = None;
    record
}

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
fn filtered_trace_connect() -> TraceConnectRecord {
    let mut record = trace_connect();
    (record.settings.process, record.settings.cgroup) = (Some(7), Some("/sys/fs/cgroup/web".into()));
    record.results.tier = "fexit".into();
    record.results.tier_reason = Some("tp_btf: this kernel has no fib_table_lookup".into());
    record
}

/// Returns a record with every filter.
fn filtered_trace_accept() -> TraceAcceptRecord {
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
fn empty_trace() -> TraceConnectRecord {
    let mut record = trace_connect();
    record.settings = TraceConnectSettings {
        protocol: "tcp".into(),
        process: None,
        name: None,
        destination: None,
        port: None,
        netns: None,
        cgroup: None,
        for_ns: None,
        tier: "</script>".into(),
        seed: 1,
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
fn empty_trace_accept() -> TraceAcceptRecord {
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

/// Returns every kind of record, with and without its optional fields, as the commands write them.
pub(crate) fn valid() -> Vec<(&'static str, Saved)> {
    let strategies = ["kernel-default", "random-window:500", "random-window:10000", "auto"];
    let mut repeats = ports(&["kernel-default", "random-window:500"], 3, 1_000);
    repeats.validity.push(Remark::new(
        "interrupted",
        "stopped by Ctrl-C after 41% of the dials; what was measured is below",
    ));
    let nothing = StrategyResult {
        connect_ns: ByParity::default(),
        by_fill: Vec::new(),
        scatter: None,
        ..strategy("auto", 1, 8)
    };
    let mut unmeasured = ports(&[], 1, 8);
    unmeasured.results.strategies.push(nothing);
    vec![
        ("ports", Saved::Ports(ports(&strategies, 1, 5_000))),
        ("repeats", Saved::Ports(repeats)),
        ("unmeasured", Saved::Ports(unmeasured)),
        ("time-wait", Saved::TimeWait(time_wait())),
        ("plan", Saved::Plan(plan())),
        ("bare plan", Saved::Plan(bare_plan())),
        ("lab", Saved::Lab(lab())),
        ("compare", Saved::Compare(compare())),
        ("compared loads", Saved::Compare(compared_loads())),
        ("bare compare", Saved::Compare(bare_compare())),
        ("serve", Saved::Serve(serve())),
        ("bare serve", Saved::Serve(bare_serve())),
        ("forward", Saved::Forward(forward())),
        ("bare forward", Saved::Forward(bare_forward())),
        ("fix ports", Saved::FixPorts(fix_ports())),
        ("bare fix ports", Saved::FixPorts(bare_fix_ports())),
        ("fix accept", Saved::FixAccept(fix_accept())),
        ("bare fix accept", Saved::FixAccept(bare_fix_accept())),
        ("rotated fix accept", Saved::FixAccept(rotated_fix_accept())),
        ("guard status", Saved::GuardStatus(guard())),
        ("bare guard status", Saved::GuardStatus(bare_guard())),
        ("doctor", Saved::Doctor(doctor())),
        ("live doctor", Saved::Doctor(live_doctor())),
        ("blind doctor", Saved::Doctor(blind_doctor())),
        ("run", Saved::Run(preloaded_run())),
        ("bare run", Saved::Run(bare_run())),
        ("run in a cgroup", Saved::Run(cgroup_run())),
        ("trace connect", Saved::TraceConnect(trace_connect())),
        ("filtered trace connect", Saved::TraceConnect(filtered_trace_connect())),
        ("bare trace connect", Saved::TraceConnect(bare_trace_connect())),
        ("trace accept", Saved::TraceAccept(trace_accept())),
        ("filtered trace accept", Saved::TraceAccept(filtered_trace_accept())),
        ("bare trace accept", Saved::TraceAccept(bare_trace_accept())),
        ("trace locks", Saved::TraceLocks(trace_locks())),
        ("bare trace locks", Saved::TraceLocks(bare_trace_locks())),
        ("stalled load", Saved::Load(stalled())),
        ("steady load", Saved::Load(steady())),
        ("load of a fleet", Saved::Load(fleet())),
        ("hold", Saved::Load(hold())),
        ("bare load", Saved::Load(bare_load())),
        ("ramp of a load", Saved::Load(ramp())),
        ("lab accept", Saved::LabAccept(accept())),
        ("refused accept", Saved::LabAccept(refused())),
        ("lab keepalive", Saved::LabKeepalive(keepalive())),
        ("bare lab keepalive", Saved::LabKeepalive(bare_keepalive())),
        ("lab planes", Saved::LabPlanes(planes())),
        ("bare lab planes", Saved::LabPlanes(bare_planes())),
        ("lab locks", Saved::LabLocks(lab_locks())),
        ("untraced lab locks", Saved::LabLocks(untraced_lab_locks())),
        ("http2 load", Saved::Load(load::http2())),
        ("fleet doctor", Saved::Fleet(fleet_doctor())),
        ("fleet lab ports", Saved::Fleet(fleet_lab_ports())),
        ("fleet trace connect", Saved::Fleet(fleet_trace_connect())),
        ("fleet plan", Saved::Fleet(fleet_plan())),
        ("fleet serve", Saved::Fleet(fleet_serve())),
    ]
}

/// Returns all of [`valid`], then records that no command writes: empty, odd, hostile.
pub(crate) fn all() -> Vec<(&'static str, Saved)> {
    let mut empty = ports(&[], 1, 1);
    empty.results.tuples = 0;
    let mut records = valid();
    records.extend([
        ("empty", Saved::Ports(empty)),
        ("odd compare", Saved::Compare(odd_compare())),
        ("odd serve", Saved::Serve(odd_serve())),
        ("empty trace", Saved::TraceConnect(empty_trace())),
        ("empty trace accept", Saved::TraceAccept(empty_trace_accept())),
        ("empty load", Saved::Load(load::empty())),
        ("no planes", Saved::LabPlanes(no_planes())),
        ("hostile", Saved::Ports(hostile())),
        ("hostile keepalive", Saved::LabKeepalive(hostile_keepalive())),
        ("hostile fix ports", Saved::FixPorts(hostile_fix_ports())),
        ("hostile fix accept", Saved::FixAccept(hostile_fix_accept())),
        ("hostile guard status", Saved::GuardStatus(hostile_guard())),
        ("hostile doctor", Saved::Doctor(hostile_doctor())),
        ("hostile run", Saved::Run(hostile_run())),
        ("hostile lab locks", Saved::LabLocks(hostile_lab_locks())),
        ("hostile load", Saved::Load(hostile_load())),
        ("hostile fleet", Saved::Fleet(hostile_fleet())),
    ]);
    records
}
