//! The schema in the tree says neither more nor less than the Rust types write.

use std::collections::BTreeMap;

use boon::{Compiler, SchemaIndex, Schemas};
use fourtuple_record::*;
use serde_json::{Value, json};

struct Validator {
    schemas: Schemas,
    index: SchemaIndex,
}

impl Validator {
    fn new() -> Validator {
        let mut compiler = Compiler::new();
        let schema: Value = serde_json::from_str(SCHEMA_JSON).unwrap();
        let address = schema["$id"].as_str().unwrap().to_owned();
        compiler.add_resource(&address, schema).unwrap();
        let mut schemas = Schemas::new();
        let index = compiler.compile(&address, &mut schemas).unwrap();
        Validator { schemas, index }
    }

    fn accepts(&self, record: &Value) -> bool {
        self.schemas.validate(record, self.index).is_ok()
    }

    fn require(&self, name: &str, record: &Value) {
        if let Err(error) = self.schemas.validate(record, self.index) {
            panic!("{name}: {error:#}");
        }
    }
}

fn record<S: serde::Serialize, R: serde::Serialize>(command: &str, settings: S, results: R) -> Value {
    let record = Record {
        schema: SCHEMA.into(),
        command: command.into(),
        started: "2026-03-01T12:00:00Z".into(),
        host: Host {
            kernel: "6.18.5".into(),
            cpus: 2,
            virtualization: "kvm".into(),
            sysctls: BTreeMap::from([("net.ipv4.tcp_tw_reuse".into(), "2".into())]),
            capabilities: BTreeMap::from([("ip_local_port_range".into(), "linear".into())]),
        },
        settings,
        validity: vec![Remark::new("interrupted", "stopped by Ctrl-C")],
        results,
    };
    serde_json::to_value(record).unwrap()
}

fn ports() -> (PortsSettings, PortsResults) {
    let settings = PortsSettings {
        low: 9024,
        high: 65535,
        strategies: vec!["auto".into()],
        windows: false,
        fill: 0.5,
        protocol: "tcp".into(),
        family: 4,
        sources: 1,
        repeats: 1,
        seed: u64::MAX,
    };
    let mut scatter = Scatter::default();
    scatter.push(15_000, true, false);
    let spread = Spread { count: 1, mean: 15_000, p50: 15_000, p99: 15_000, p999: 15_000, max: 15_000 };
    let result = StrategyResult {
        strategy: "auto".into(),
        chosen: Some("full-range".into()),
        repeat: 1,
        dials: 2,
        connections: 1,
        retries: 0,
        errors: BTreeMap::from([("EADDRNOTAVAIL".into(), 1)]),
        elapsed_ns: 20_000,
        rate_per_s: 50_000.0,
        cpu_ns_per_dial: 12_000,
        connect_ns: ByParity { all: Some(spread), even: None, odd: Some(spread) },
        by_fill: vec![FillPoint { fill: 1.0, connections: 1, mean_ns: 15_000, floor_ns: 0 }],
        floor_ns: 14_000,
        scatter: Some(scatter),
    };
    let bare =
        StrategyResult { chosen: None, scatter: None, connect_ns: ByParity::default(), ..result.clone() };
    (
        settings,
        PortsResults { tuples: 56_512, strategies: vec![result, bare], advice: vec!["set option 51".into()] },
    )
}

fn time_wait() -> (TimeWaitSettings, TimeWaitResults) {
    let settings = TimeWaitSettings {
        low: 49_152,
        high: 65_535,
        remedies: vec!["none-over".into()],
        patience_ns: 70_000_000_000,
    };
    let run = TimeWaitRun {
        remedy: "none-over".into(),
        transactions: 16_385,
        completed: 16_384,
        elapsed_ns: 60_000_000_000,
        rate_per_s: 20_000.5,
        predicted_stall_at: Some(16_385),
        stalled_at: Some(16_385),
        predicted_stall_ns: 59_200_000_000,
        stall_ns: 59_300_000_000,
        cut: true,
        errors: BTreeMap::from([("EADDRNOTAVAIL".into(), 5_900)]),
        time_wait: vec![TimeWaitPoint { at_ns: 0, count: 0, completed: 0 }],
    };
    let calm = TimeWaitRun { predicted_stall_at: None, stalled_at: None, ..run.clone() };
    let results = TimeWaitResults {
        ports: 16_384,
        time_wait_ns: 60_000_000_000,
        ceiling_per_s: 273.07,
        runs: vec![run, calm],
        advice: Vec::new(),
    };
    (settings, results)
}

fn accept() -> (AcceptSettings, AcceptResults) {
    let settings = AcceptSettings {
        workers: 2,
        clients: 8,
        connections: 0,
        families: vec!["unix".into()],
        policies: vec!["exclusive".into(), "rotate:16".into(), "external".into()],
        close_every: vec![0, 1],
        load: vec!["sleep".into()],
        service: "sleep".into(),
        short_ns: 200_000,
        long_ns: 20_000_000,
        long_share: 0.01,
        pause_ns: 1_000_000,
        slow_ns: 5_000_000,
        for_ns: 2_000_000_000,
        repeats: 3,
        backlog: 4096,
        seed: 1,
        server: Some("nginx -c /run/nginx.conf".into()),
    };
    let wait_ns = WaitNs {
        p50: 40_000,
        p99: 900_000,
        p999: 19_000_000,
        max: 21_000_000,
        p999_low: Some(17_000_000),
        p999_high: Some(20_000_000),
    };
    let cell = AcceptCell {
        policy: "external".into(),
        server: Some("nginx".into()),
        family: "unix".into(),
        close_every: 0,
        load: "sleep".into(),
        workers: 2,
        clients: 8,
        accepts: vec![7, 1],
        requests: vec![7_000, 1_000],
        sockets: vec![7, 1],
        busy_ns: vec![1_400_000_000, 200_000_000],
        jain: Some(0.64),
        max_over_mean: Some(1.75),
        wait_ns,
        slow_per_10k: 12.5,
        misplaced_wait_ns: 61_000,
        probe: Some(Probe { requests: 900, slow_per_10k: 33.3, wait_ns }),
        cpu_ns_per_request: 9_000,
        wakeups_per_accept: Some(1.5),
        empty_accepts_per_accept: Some(0.5),
        operations: 24_000,
        errors: BTreeMap::from([("ECONNRESET".into(), 1)]),
        repeats: 3,
    };
    let bare = AcceptCell {
        policy: "rotate:16".into(),
        server: None,
        jain: None,
        max_over_mean: None,
        wait_ns: WaitNs { p999_low: None, p999_high: None, ..wait_ns },
        probe: None,
        wakeups_per_accept: None,
        empty_accepts_per_accept: None,
        ..cell.clone()
    };
    let skipped = SkippedCell {
        policy: "reuseport".into(),
        family: "unix".into(),
        close_every: 1,
        why: "SO_REUSEPORT does not share unix sockets".into(),
    };
    let timeline = Timeline {
        policy: "exclusive".into(),
        family: "unix".into(),
        close_every: 0,
        workers: vec![vec![Span { from_ns: 5, to_ns: 90, waited_ns: 1 }], Vec::new()],
        from_ns: 0,
        to_ns: 100,
        waiting: Waiter { worker: 0, sent_ns: 10, begun_ns: 90, ended_ns: 95, idle_worker: 1 },
    };
    let break_even =
        BreakEven { fresh_connection_ns: 20_000, misplaced_wait_ns: 61_000, requests: 2000, closes: true };
    let results = AcceptResults {
        cells: vec![cell, bare],
        skipped: vec![skipped],
        timeline: Some(timeline),
        break_even: Some(break_even),
        advice: vec!["leave keep-alive on".into()],
    };
    (settings, results)
}

fn plan() -> (PlanSettings, PlanResults) {
    let settings = PlanSettings {
        low: 32_768,
        high: 60_999,
        reserved: 0,
        sources: 1,
        destinations: 1_000_000,
        arrival_per_s: Some(0.0),
        hold_ns: 0,
        closer: "them".into(),
        kernel: "linear".into(),
        strategy: "full-range".into(),
        windows: false,
        costs: "reference".into(),
    };
    let results = PlanResults {
        capacity: 28_232_000_000,
        cliff_connections: None,
        steady_tuples: Some(1),
        cliff_after_ns: None,
        exhausted_after_ns: Some(7),
        sources_needed: 1,
        failed_dials: 0,
        by_fill: vec![PlanPoint { fill: 0.5, probes: 1.9, mean_ns: 15_000 }],
        simulated: 1_000_000_000,
        advice: vec!["one address is enough".into()],
    };
    (settings, results)
}

fn compare() -> (CompareSettings, CompareResults) {
    let settings = CompareSettings {
        a: "lab ports --strategy kernel-default".into(),
        b: "lab ports --strategy full-range".into(),
        metric: "rate".into(),
        for_ns: Some(120_000_000_000),
        narrow: 0.02,
        trials: None,
        warmup: 1,
        server_a: Some("serve crr --listen 127.0.0.1:8080".into()),
        server_b: None,
        server_wait_ns: Some(10_000_000_000),
        pinned: true,
        fresh_namespace: Some(true),
        seed: 1,
    };
    let results = CompareResults {
        ratio: 1.058,
        low: Some(1.041),
        high: None,
        verdict: "too noisy to say".into(),
        trials: 2,
        pairs: 1,
        client_saturated: 2,
        samples_a: vec![52_000.5],
        samples_b: vec![55_000.0],
    };
    (settings, results)
}

fn load() -> (LoadSettings, LoadResults) {
    let settings = LoadSettings {
        target: "http://127.0.0.1:8080/".into(),
        address: "127.0.0.1:8080".into(),
        workload: "http".into(),
        arrival: "poisson".into(),
        rate_per_s: Some(500.5),
        connections: 64,
        pause_ns: 0,
        close_every: 1,
        hold: 0,
        operations: Some(1_200_000),
        for_ns: Some(60_000_000_000),
        timeout_ns: 2_000_000_000,
        threshold_ns: Some(1_000_000),
        engine: "auto".into(),
        threads: 2,
        pinned: true,
        strategy: "auto".into(),
        sources: Some("127.0.0.0/26".into()),
        close: "client".into(),
        request_bytes: 0,
        response_bytes: 0,
        method: "GET".into(),
        separate_ack: false,
        anyway: true,
        seed: 1,
    };
    let quantiles = Quantiles { samples: 2, mean: 30, p50: 20, p99: 40, p999: 40, max: 40 };
    let results = LoadResults {
        operations: 2,
        connections: 2,
        errors: BTreeMap::from([("EADDRNOTAVAIL".into(), 7), ("status-503".into(), 1)]),
        elapsed_ns: 2_000_000_000,
        rate_per_s: 1.0,
        offered_per_s: 500.5,
        client_cpu_ns_per_operation: 12_000,
        syscalls_per_connection: 0.04,
        engine: "epoll".into(),
        engine_reason: Some("io_uring: EPERM".into()),
        close: "client".into(),
        strategy: Some("full-range".into()),
        latency_ns: Latency {
            search: quantiles,
            handshake: quantiles,
            first_byte: quantiles,
            total: quantiles,
        },
        late_ns: quantiles,
        slow: vec![Slow { at_ns: 5, total_ns: 40, longest: "connect".into(), request: 1 }],
        slow_count: 1,
        seconds: vec![Second {
            at_ns: 0,
            operations: 2,
            connections: 2,
            errors: 8,
            p50_ns: 20,
            p99_ns: 40,
            max_ns: 40,
            ports_left: Some(28_229),
        }],
        distribution: vec![Quantile { share: 1.0, ns: 40 }],
        ports: Some(LoadPorts {
            budget: 28_232,
            taken_before: 1,
            needed: Some(1_200_000),
            used: 2,
            kept_ns: 60_000_000_000,
            predicted_stall_ns: Some(12_100_000_000),
            stalled_ns: Some(12_000_000_000),
            stall_length_ns: 48_000_000_000,
        }),
        hold: Some(Held { opened: 10_000, lost: 1, ramp_ns: 900_000_000 }),
        advice: vec!["use --source 127.0.0.0/26".into()],
    };
    (settings, results)
}

fn serve() -> (ServeSettings, ServeResults) {
    let settings = ServeSettings {
        listen: "127.0.0.1:0".into(),
        protocol: "crr".into(),
        policy: Some("rotate:16".into()),
        workers: 2,
        request_bytes: Some(1),
        response_bytes: Some(1),
        close: "server".into(),
        close_every: Some(1),
        service: "10%:100ms".into(),
        spin: false,
        stall_at_ns: Some(2_000_000_000),
        stall_length_ns: Some(200_000_000),
        backlog: 4096,
        defer_accept: true,
        pin: false,
        for_ns: None,
        seed: 1,
    };
    let worker = ServeWorker {
        accepted: 3,
        requests: 2,
        received_bytes: 3,
        sent_bytes: 2,
        errors: BTreeMap::from([("ECONNRESET".into(), 1)]),
    };
    let results = ServeResults {
        listen: "127.0.0.1:34567".into(),
        protocol: "crr".into(),
        policy: "reuseport".into(),
        elapsed_ns: 1_000_000_000,
        requests_per_s: 2.0,
        workers: vec![worker, ServeWorker::default()],
        jain: Some(0.5),
        max_over_mean: None,
    };
    (settings, results)
}

fn trace_connect() -> (TraceConnectSettings, TraceConnectResults) {
    let settings = TraceConnectSettings {
        protocol: "tcp".into(),
        process: Some(7),
        name: Some("wrk".into()),
        destination: Some("127.0.0.1".into()),
        port: Some(8080),
        cgroup: Some("/sys/fs/cgroup/web".into()),
        for_ns: Some(5_000_000_000),
        seed: 1,
        tier: "auto".into(),
    };
    let spread = Spread { count: 1, mean: 1_270, p50: 1_270, p99: 1_270, p999: 1_270, max: 1_270 };
    let tuple = TraceTuple {
        process: 7,
        name: "wrk".into(),
        destination: "127.0.0.1:8080".into(),
        searches: 1,
        even: 1,
        odd: 0,
        mean_ns: 1_270,
        p99_ns: 1_270,
        even_p50_ns: Some(1_270),
        odd_p50_ns: Some(287_000),
        failed: 1,
        no_port: 1,
        given_port: 0,
        established: 1,
        retries: 1,
        syn_retries: 1,
        closed_first: 1,
        closed_by_peer: 0,
        in_use: Some(14_116),
        range: Some(28_232),
        fill: Some(0.5),
    };
    let sample = TraceSample { at_ns: 5, search_ns: 1_270, source_port: Some(32_768), tuple: Some(0) };
    let results = TraceConnectResults {
        tier: "fexit".into(),
        tier_reason: Some("tp_btf: this kernel has no fib_table_lookup".into()),
        elapsed_ns: 5_000_000_000,
        searches: 1,
        searches_per_s: 0.2,
        failed: BTreeMap::from([("EADDRNOTAVAIL".into(), 1), ("closed".into(), 2)]),
        given_port: 0,
        established: 1,
        untimed: 0,
        lost: 0,
        switched: 0,
        search_ns: ByParity { all: Some(spread), even: Some(spread), odd: Some(spread) },
        failed_search_ns: Some(spread),
        handshake_ns: Some(spread),
        histogram: vec![TraceStep { from_ns: 1_248, even: 1, odd: 0 }],
        heat: TraceHeat { column_ns: 50_000_000, from_ns: vec![1_000], columns: vec![vec![1], vec![0]] },
        flame: Some(TraceFlame { samples: 4, samples_per_s: 997, in_connect: 0.5, in_search: 0.25, lost: 1 }),
        tuples: vec![tuple],
        samples: vec![sample],
    };
    (settings, results)
}

/// Of everybody, where nobody connected: everything that may be null is.
fn bare_trace_connect() -> (TraceConnectSettings, TraceConnectResults) {
    let (settings, results) = trace_connect();
    let settings = TraceConnectSettings {
        protocol: "udp".into(),
        process: None,
        name: None,
        destination: None,
        port: None,
        cgroup: None,
        for_ns: None,
        ..settings
    };
    let tuples = vec![TraceTuple {
        even_p50_ns: None,
        odd_p50_ns: None,
        in_use: None,
        range: None,
        fill: None,
        ..results.tuples[0].clone()
    }];
    let samples = vec![TraceSample { source_port: None, tuple: None, ..results.samples[0] }];
    let search_ns = ByParity::default();
    let results = TraceConnectResults {
        tier: "cgroup+tp_btf".into(),
        tier_reason: None,
        search_ns,
        failed_search_ns: None,
        handshake_ns: None,
        heat: TraceHeat { column_ns: 50_000_000, from_ns: Vec::new(), columns: Vec::new() },
        flame: None,
        tuples,
        samples,
        ..results
    };
    (settings, results)
}

fn trace_accept() -> (TraceAcceptSettings, TraceAcceptResults) {
    let settings = TraceAcceptSettings {
        process: Some(4711),
        name: Some("nginx".into()),
        listen: Some("0.0.0.0".into()),
        port: Some(8080),
        cgroup: Some("/sys/fs/cgroup/system.slice".into()),
        for_ns: Some(10_000_000_000),
    };
    let spread = Some(Spread { count: 2, mean: 7, p50: 6, p99: 8, p999: 8, max: 8 });
    let worker = TraceWorker {
        process: 4711,
        thread: 4712,
        name: "nginx".into(),
        accepts: 2,
        mean_ns: 7,
        p50_ns: 6,
        p99_ns: 8,
        max_ns: 8,
        open: 1,
        reads: 3,
        empty: 2,
        woken_for_nothing: 1,
        closed_first: 1,
    };
    let listener = TraceListener {
        address: "0.0.0.0:8080".into(),
        cookie: 77,
        namespace: 4_026_531_840,
        group: 2,
        closed: true,
        queued: 3,
        accepts: 2,
        other_accepts: 1,
        wait_ns: spread,
        handshake_ns: spread,
        retried_handshakes: 1,
        depth: Depth { mean: 1.5, max: 2, backlog: 1, full: 1 },
        overflows: 5,
        overflow_acks: 1,
        other_drops: 2,
        never_accepted: 0,
        closed_by_peer: 1,
        closed_first: 1,
        reset: 0,
        jain: Some(1.0),
        workers: vec![worker],
    };
    let results = TraceAcceptResults {
        tier: "tp_btf".into(),
        elapsed_ns: 1_000_000_000,
        accepts: 2,
        accepts_per_s: 2.0,
        wait_ns: spread,
        handshake_ns: spread,
        overflows: 5,
        empty: 2,
        woken_for_nothing: 1,
        lost: 0,
        earlier: 1,
        histogram: vec![WaitStep { from_ns: 6, count: 2 }],
        listeners: vec![listener],
    };
    (settings, results)
}

fn trace_locks() -> (TraceLocksSettings, TraceLocksResults) {
    let settings = TraceLocksSettings {
        process: Some(7),
        name: Some("wrk".into()),
        cgroup: Some("/sys/fs/cgroup/web".into()),
        for_ns: Some(5_000_000_000),
    };
    let class = LockClass {
        class: "bhash".into(),
        waits: 1,
        wait_ns: 1_270,
        sleeps: 0,
        sleep_ns: 0,
        locks: 1,
        times_ns: Some(Spread { count: 1, mean: 1_270, p50: 1_270, p99: 1_270, p999: 1_270, max: 1_270 }),
        remedy: "a range of ports for each worker".into(),
    };
    let path = LockPath {
        class: "bhash".into(),
        kind: "spin".into(),
        frames: vec!["__inet_hash_connect".into()],
        waits: 1,
        wait_ns: 1_270,
        max_ns: 1_270,
    };
    let results = TraceLocksResults {
        tier: "tp_btf".into(),
        elapsed_ns: 5_000_000_000,
        connections: 2,
        waits: 1,
        wait_ns: 1_270,
        waits_per_connection: Some(0.5),
        wait_ns_per_connection: Some(635.0),
        cpu_share: 0.001,
        lost: 0,
        elsewhere_waits: 3,
        elsewhere_wait_ns: 4_000,
        classes: vec![class],
        paths: vec![path],
        ports: vec![LockPort { port: 32_768, waits: 1, wait_ns: 1_270, max_ns: 1_270 }],
        blind_spots: vec!["waits before the queue".into()],
    };
    (settings, results)
}

/// Of everybody, where nobody accepted: everything that may be null is.
fn bare_trace_accept() -> (TraceAcceptSettings, TraceAcceptResults) {
    let (_, results) = trace_accept();
    let settings = TraceAcceptSettings {
        process: None,
        name: None,
        listen: None,
        port: None,
        cgroup: None,
        for_ns: None,
    };
    let listeners =
        vec![TraceListener { wait_ns: None, handshake_ns: None, jain: None, ..results.listeners[0].clone() }];
    let results = TraceAcceptResults { wait_ns: None, handshake_ns: None, listeners, ..results };
    (settings, results)
}

/// Of everybody, where nobody connected: everything that may be null is.
fn bare_trace_locks() -> (TraceLocksSettings, TraceLocksResults) {
    let (_, results) = trace_locks();
    let settings = TraceLocksSettings { process: None, name: None, cgroup: None, for_ns: None };
    let classes = vec![LockClass { times_ns: None, ..results.classes[0].clone() }];
    let results =
        TraceLocksResults { waits_per_connection: None, wait_ns_per_connection: None, classes, ..results };
    (settings, results)
}

/// Over a unix socket, in a closed loop: everything that may be absent is.
fn bare_load() -> (LoadSettings, LoadResults) {
    let (settings, results) = load();
    let settings = LoadSettings {
        rate_per_s: None,
        operations: None,
        for_ns: None,
        threshold_ns: None,
        sources: None,
        ..settings
    };
    let seconds = vec![Second { ports_left: None, ..results.seconds[0] }];
    let results =
        LoadResults { engine_reason: None, strategy: None, seconds, ports: None, hold: None, ..results };
    (settings, results)
}

fn lab_locks() -> (LabLocksSettings, LabLocksResults) {
    let settings = LabLocksSettings {
        changes: vec!["reuseport".into(), "sources".into(), "full-range".into()],
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
    let class = LocksClass { class: "bhash".into(), waits_per_query: 0.02, wait_ns_per_query: 31.5 };
    let side = LocksSide {
        policy: "exclusive".into(),
        sources: 4,
        strategy: "kernel-default".into(),
        low: 1_024,
        high: 65_535,
        queries: 80_000,
        queries_per_s: 20_000.5,
        queries_per_s_low: 19_000.5,
        queries_per_s_high: 21_000.5,
        cpu_ns_per_query: 80_000.5,
        cpu_ns_per_query_low: 79_000.5,
        cpu_ns_per_query_high: 81_000.5,
        waits_per_query: Some(0.02),
        wait_ns_per_query: Some(31.5),
        classes: vec![class],
        errors: BTreeMap::from([("ECONNRESET".into(), 1)]),
    };
    let pair = LocksPair {
        change: "reuseport".into(),
        before: side.clone(),
        after: LocksSide { policy: "reuseport".into(), ..side },
        pairs: 8,
        ratio: LocksRatio { value: 1.058, low: Some(1.041), high: Some(1.074) },
        verdict: "5.8% more queries per second, 4.1 to 7.4".into(),
        cpu_ratio: LocksRatio { value: 0.95, low: Some(0.93), high: Some(0.97) },
        cpu_verdict: "5.0% less CPU time per query, 3.0 to 7.0".into(),
        advice: "Give each worker a listener".into(),
    };
    let results = LabLocksResults {
        pairs: vec![pair],
        untraced: Some("BPF is refused".into()),
        blind_spots: vec!["spinlocks of a guest".into()],
        advice: vec!["Give each worker a listener".into()],
    };
    (settings, results)
}

fn forward() -> (ForwardSettings, ForwardResults) {
    let link = ForwardLink {
        listen: "0.0.0.0:4000".to_owned(),
        to: Some("192.0.2.1:4000".to_owned()),
        routes: vec!["7=192.0.2.2:4000".to_owned()],
        key: Some("4:4".to_owned()),
        spread: "flow:4:4".to_owned(),
        replies: true,
        idle_ns: 60_000_000_000,
        clients: 4096,
        bfd: Some("192.0.2.1".to_owned()),
        bfd_in_band: Some("192.0.2.1:4000".to_owned()),
    };
    let settings = ForwardSettings {
        links: vec![link],
        planes: 1,
        plane: "offload".to_owned(),
        pin: true,
        for_ns: Some(1_000_000_000),
    };
    let plane = ForwardPlane {
        received: 3,
        received_bytes: 192,
        sent: 2,
        sent_bytes: 128,
        returned: 1,
        dropped: BTreeMap::from([("no-route".to_owned(), 1)]),
        clients: 1,
        unsegmented: 1,
        cpu_ns: 900,
        share: 1.0,
    };
    let bfd = ForwardBfd {
        peer: "192.0.2.1".to_owned(),
        reception: "port".to_owned(),
        state: "up".to_owned(),
        diagnostic: "none".to_owned(),
        ups: 1,
        downs: 0,
        sent: 10,
        received: 9,
        discarded: BTreeMap::from([("version".to_owned(), 1)]),
    };
    let results = ForwardResults {
        elapsed_ns: 1_000_000_000,
        listen: vec!["0.0.0.0:4000".to_owned()],
        planes: vec![plane],
        jain: Some(1.0),
        bfd: vec![bfd],
        advice: vec!["one".to_owned()],
    };
    (settings, results)
}

/// Where locks could not be traced, and there were too few pairs: everything that may be null is.
fn bare_lab_locks() -> (LabLocksSettings, LabLocksResults) {
    let (settings, mut results) = lab_locks();
    results.untraced = None;
    let pair = &mut results.pairs[0];
    pair.ratio = LocksRatio { value: 1.0, low: None, high: None };
    pair.cpu_ratio = pair.ratio;
    (pair.before.waits_per_query, pair.before.wait_ns_per_query) = (None, None);
    (settings, results)
}

/// One way and for ever, where nothing came: everything that may be null is.
fn bare_forward() -> (ForwardSettings, ForwardResults) {
    let (settings, results) = forward();
    let link = ForwardLink { to: None, key: None, bfd: None, bfd_in_band: None, ..settings.links[0].clone() };
    let settings = ForwardSettings { links: vec![link], for_ns: None, ..settings };
    (settings, ForwardResults { jain: None, ..results })
}

fn planes() -> (PlanesSettings, PlanesResults) {
    let settings = PlanesSettings {
        every_combination: true,
        plane: vec!["offload".to_owned()],
        planes: vec![2],
        bytes: vec![64],
        spread: vec!["flow".to_owned()],
        flows: vec![1],
        work_ns: vec![6_000],
        packets: 20_000,
        repeats: 3,
        over: "veth".to_owned(),
        seed: 1,
    };
    let ratio = Some(PlanesRatio { ratio: 0.2, low: 0.18, high: 0.22 });
    let cell = PlanesCell {
        plane: "offload".to_owned(),
        planes: 2,
        spread: "flow".to_owned(),
        flows: 1,
        inner_flows: 120,
        packet_bytes: 64,
        mtu: 1500,
        work_ns: 6_000,
        repeats: 3,
        packets: 60_000,
        lost: 1,
        dropped: BTreeMap::from([("overflow".to_owned(), 1)]),
        reordered: 2,
        share: vec![0.5, 0.5],
        cpu_ns_per_packet: 6_600,
        cpu_ns_low: Some(6_500),
        cpu_ns_high: Some(6_700),
        pps: 200_000.5,
        pps_low: Some(190_000.0),
        pps_high: Some(210_000.0),
        capacity_pps: 303_000.0,
        generator_waited: 0.4,
        limited_by: "planes".to_owned(),
        generator_cpu_ns_per_packet: 900,
        sink_cpu_ns_per_packet: 100,
        cpu_to_one_by_one: ratio,
        capacity_to_one_plane: ratio,
        pps_to_one_plane: ratio,
    };
    let results = PlanesResults {
        cells: vec![cell],
        skipped: vec![PlanesSkipped { plane: "uring".to_owned(), why: "ENOSYS".to_owned() }],
        planes_help_above_ns: Some(2_000),
        advice: vec!["one".to_owned()],
    };
    (settings, results)
}

/// One run, and nothing to compare it with: everything that may be null is.
fn bare_planes() -> (PlanesSettings, PlanesResults) {
    let (settings, results) = planes();
    let cell = PlanesCell {
        cpu_ns_low: None,
        cpu_ns_high: None,
        pps_low: None,
        pps_high: None,
        cpu_to_one_by_one: None,
        capacity_to_one_plane: None,
        pps_to_one_plane: None,
        ..results.cells[0].clone()
    };
    (settings, PlanesResults { cells: vec![cell], planes_help_above_ns: None, ..results })
}

fn samples() -> Vec<(&'static str, Value)> {
    let ((ports_settings, ports_results), (time_wait_settings, time_wait_results)) = (ports(), time_wait());
    let (accept_settings, accept_results) = accept();
    let keepalive_settings = AcceptSettings { server: None, ..accept_settings.clone() };
    let keepalive_results = AcceptResults { timeline: None, break_even: None, ..accept_results.clone() };
    let (plan_settings, plan_results) = plan();
    let (compare_settings, compare_results) = compare();
    let ((load_settings, load_results), (bare_settings, bare_results)) = (load(), bare_load());
    let (serve_settings, serve_results) = serve();
    let (lab_locks_settings, lab_locks_results) = lab_locks();
    let (bare_lab_settings, bare_lab_results) = bare_lab_locks();
    let (forward_settings, forward_results) = forward();
    let (bare_forward_settings, bare_forward_results) = bare_forward();
    let (planes_settings, planes_results) = planes();
    let (bare_planes_settings, bare_planes_results) = bare_planes();
    let (trace_settings, trace_results) = trace_connect();
    let (bare_trace_settings, bare_trace_results) = bare_trace_connect();
    let (trace_accept_settings, trace_accept_results) = trace_accept();
    let (bare_accept_settings, bare_accept_results) = bare_trace_accept();
    let (locks_settings, locks_results) = trace_locks();
    let (bare_locks_settings, bare_locks_results) = bare_trace_locks();
    let lab_settings = LabSettings {
        ports: ports_settings.clone(),
        time_wait: time_wait_settings.clone(),
        accept: Some(accept_settings.clone()),
    };
    let lab_results = LabResults {
        ports: ports_results.clone(),
        time_wait: time_wait_results.clone(),
        accept: Some(accept_results.clone()),
    };
    vec![
        ("lab", record("lab", lab_settings, lab_results)),
        ("lab ports", record("lab ports", ports_settings, ports_results)),
        ("lab time-wait", record("lab time-wait", time_wait_settings, time_wait_results)),
        ("plan", record("plan", plan_settings, plan_results)),
        ("compare", record("compare", compare_settings, compare_results)),
        ("load", record("load", load_settings, load_results)),
        ("bare load", record("load", bare_settings, bare_results)),
        ("serve", record("serve", serve_settings, serve_results)),
        ("lab accept", record("lab accept", accept_settings, accept_results)),
        ("lab keepalive", record("lab keepalive", keepalive_settings, keepalive_results)),
        ("forward", record("forward", forward_settings, forward_results)),
        ("bare forward", record("forward", bare_forward_settings, bare_forward_results)),
        ("lab planes", record("lab planes", planes_settings, planes_results)),
        ("bare lab planes", record("lab planes", bare_planes_settings, bare_planes_results)),
        ("trace connect", record("trace connect", trace_settings, trace_results)),
        ("bare trace connect", record("trace connect", bare_trace_settings, bare_trace_results)),
        ("trace accept", record("trace accept", trace_accept_settings, trace_accept_results)),
        ("bare trace accept", record("trace accept", bare_accept_settings, bare_accept_results)),
        ("lab locks", record("lab locks", lab_locks_settings, lab_locks_results)),
        ("bare lab locks", record("lab locks", bare_lab_settings, bare_lab_results)),
        ("trace locks", record("trace locks", locks_settings, locks_results)),
        ("bare trace locks", record("trace locks", bare_locks_settings, bare_locks_results)),
    ]
}

/// Every place in `value` as a JSON pointer, the objects and what is in them.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, value)| {
            let name = name.replace('~', "~0").replace('/', "~1");
            places(value, &format!("{at}/{name}"), found);
        }),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, item)| places(item, &format!("{at}/{index}"), found));
        }
        _ => {}
    }
}

fn all_places(value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    places(value, "", &mut found);
    found
}

/// Objects whose keys are data.
fn is_map(place: &str) -> bool {
    ["/sysctls", "/capabilities", "/errors", "/results/failed", "/dropped", "/discarded"]
        .iter()
        .any(|map| place.ends_with(map))
}

const OPTIONAL: [&str; 6] =
    ["accept", "arrival_per_s", "chosen", "scatter", "predicted_stall_at", "stalled_at"];

/// Those of a server, which a load has always.
const OPTIONAL_OF_SERVE: [&str; 6] =
    ["policy", "request_bytes", "response_bytes", "close_every", "stall_at_ns", "stall_length_ns"];

#[test]
fn every_kind_of_record_is_valid_and_is_read_back() {
    let validator = Validator::new();
    for (name, sample) in samples() {
        validator.require(name, &sample);
        Saved::parse(&sample.to_string()).unwrap();
    }
}

#[test]
fn every_field_is_required_unless_it_may_be_absent() {
    let validator = Validator::new();
    for (name, sample) in samples() {
        for place in all_places(&sample) {
            let Some((parent, field)) = place.rsplit_once('/') else { continue };
            let mut broken = sample.clone();
            let Some(Value::Object(object)) = broken.pointer_mut(parent) else { continue };
            object.remove(&field.replace("~1", "/").replace("~0", "~"));
            let of_serve = name == "serve" && parent == "/settings" && OPTIONAL_OF_SERVE.contains(&field);
            // Records of before UDP was traced have none.
            let of_trace = name.ends_with("trace connect") && place == "/settings/protocol";
            let fine = is_map(parent) || OPTIONAL.contains(&field) || of_serve || of_trace;
            assert_eq!(validator.accepts(&broken), fine, "{name} without {place}");
        }
    }
}

#[test]
fn a_trace_of_before_udp_is_one_of_tcp() {
    let (settings, results) = bare_trace_connect();
    let mut old = record("trace connect", settings, results);
    old["settings"].as_object_mut().unwrap().remove("protocol");
    let Saved::TraceConnect(read) = Saved::parse(&old.to_string()).unwrap() else { panic!("{old}") };
    assert_eq!(read.settings.protocol, "tcp");
}

#[test]
fn no_object_takes_a_field_that_the_types_do_not_have() {
    let validator = Validator::new();
    for (name, sample) in samples() {
        for place in all_places(&sample) {
            if is_map(&place) {
                continue;
            }
            let mut broken = sample.clone();
            let Some(Value::Object(object)) = broken.pointer_mut(&place) else { continue };
            object.insert("zzz".into(), json!(1));
            assert!(!validator.accepts(&broken), "{name} with zzz in {place:?}");
        }
    }
}

#[test]
fn no_number_is_negative_and_no_value_is_of_another_type() {
    let validator = Validator::new();
    for (name, sample) in samples() {
        for place in all_places(&sample).iter().filter(|place| !place.is_empty()) {
            let mut broken = sample.clone();
            let value = broken.pointer_mut(place).unwrap();
            *value = match value {
                Value::Number(_) => json!(-1),
                Value::Bool(_) => json!("yes"),
                // Some may be null or a text.
                Value::Null => json!(["yes"]),
                _ => json!(17),
            };
            assert!(!validator.accepts(&broken), "{name} with {} in {place}", broken.pointer(place).unwrap());
        }
    }
}

#[test]
fn other_versions_commands_and_mixtures_are_refused() {
    let validator = Validator::new();
    let samples = samples();
    let ports =
        samples.iter().find(|(name, _)| *name == "lab ports").map(|(_, sample)| sample.clone()).unwrap();
    for (field, value) in [("schema", "fourtuple/2"), ("command", "lab udp"), ("started", "yesterday")] {
        let mut broken = ports.clone();
        broken[field] = json!(value);
        assert!(!validator.accepts(&broken), "{field} {value}");
    }
    // The two labs of accepting have the same results.
    let of_own = |name: &str| !name.starts_with("bare") && name != "lab keepalive";
    let whole: Vec<_> = samples.iter().filter(|(name, _)| of_own(name)).map(|(_, sample)| sample).collect();
    for (one, other) in whole.iter().zip(whole.iter().cycle().skip(1)) {
        let mut mixed = (*one).clone();
        mixed["results"] = other["results"].clone();
        assert!(!validator.accepts(&mixed), "{} with the results of {}", one["command"], other["command"]);
    }
    let mut broken = ports;
    broken["results"]["strategies"][0]["elapsed_ns"] = json!(1.5);
    assert!(!validator.accepts(&broken), "a duration with a fraction");
}
