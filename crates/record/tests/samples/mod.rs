//! Sample records with the figures of kernel 6.18 on two cores (56,512 ports, loopback). The schema tests use them,
//! and by path the tests of `report`.
#![allow(dead_code, reason = "every test file uses its own part of the samples")]

mod accept;
mod doctor;
mod fix;
mod fleet;
mod forward;
mod guard;
mod lab;
mod load;
mod trace;

use std::collections::BTreeMap;

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
pub(crate) use lab::{
    bare_planes, hostile, hostile_lab_locks, lab, lab_locks, no_planes, planes, ports, strategy, time_wait,
    untraced_lab_locks,
};
pub(crate) use load::{bare_load, fleet, hold, hostile_load, ramp, stalled, steady};
pub(crate) use trace::{
    bare_trace_accept, bare_trace_connect, bare_trace_locks, empty_trace, empty_trace_accept,
    filtered_trace_accept, filtered_trace_connect, trace_accept, trace_connect, trace_locks,
};

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
