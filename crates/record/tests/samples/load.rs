//! Made-up runs of load: one exhausts the ports, one succeeds, one holds connections, and edge cases.

use std::collections::BTreeMap;

use fourtuple_record::*;

use super::{Noise, SECOND, record};

fn settings(target: &str, workload: &str) -> LoadSettings {
    LoadSettings {
        target: target.into(),
        address: target.trim_start_matches("http://").trim_end_matches('/').into(),
        resolve: None,
        all_addresses: false,
        streams: None,
        workload: workload.into(),
        arrival: "closed".into(),
        rate_per_s: None,
        connections: 64,
        pause_ns: 0,
        close_every: u64::from(workload == "http"),
        hold: 0,
        operations: None,
        for_ns: Some(75 * SECOND),
        timeout_ns: 2 * SECOND,
        threshold_ns: None,
        engine: "auto".into(),
        threads: 2,
        pinned: true,
        strategy: "auto".into(),
        sources: None,
        close: "client".into(),
        request_bytes: 0,
        response_bytes: 0,
        method: if workload == "http" { "GET".into() } else { String::new() },
        separate_ack: false,
        anyway: false,
        seed: 1,
        warm_up_ns: 0,
        ramp: None,
        requests: None,
        tls: None,
        expect: Vec::new(),
    }
}

fn quantiles(samples: u64, p50: u64) -> Quantiles {
    let [p75, p90, p95] = [13, 20, 31].map(|tenths| Some(p50 * tenths / 10));
    Quantiles {
        samples,
        mean: p50 * 11 / 10,
        p50,
        p75,
        p90,
        p95,
        p99: p50 * 5,
        p999: p50 * 14,
        max: p50 * 130,
    }
}

/// Returns a run of `seconds` at `rate(second)`; the median time of an operation is 95us.
fn results(seconds: u64, rate: impl Fn(u64) -> u64) -> LoadResults {
    let mut noise = Noise(seconds);
    let seconds: Vec<Second> = (0..seconds)
        .map(|second| {
            let operations = (rate(second) as f64 * (0.98 + 0.04 * noise.next())) as u64;
            let p50_ns = if operations > 0 { 90_000 + (noise.next() * 9_000.0) as u64 } else { 0 };
            let max_ns = (p50_ns as f64 * (8.0 + 120.0 * noise.next().powi(4))) as u64;
            Second {
                at_ns: second * SECOND,
                operations,
                connections: operations,
                errors: 0,
                p50_ns,
                p99_ns: (p50_ns as f64 * (4.5 + noise.next())) as u64,
                max_ns,
                ports_left: None,
            }
        })
        .collect();
    let operations: u64 = seconds.iter().map(|second| second.operations).sum();
    let elapsed_ns = seconds.len() as u64 * SECOND;
    // An exponential distribution with a heavier tail.
    let distribution = (0..150)
        .map(|step| {
            let rest = 0.5_f64.powf(f64::from(step) / 8.0);
            Quantile {
                share: 1.0 - rest,
                ns: (60_000.0 + 50_000.0 * -rest.ln() + 900.0 / rest.sqrt() * 4.0) as u64,
            }
        })
        .chain([Quantile { share: 1.0, ns: 12_350_000 }])
        .collect();
    LoadResults {
        operations,
        connections: operations,
        retried: 31,
        elapsed_ns,
        rate_per_s: operations as f64 / elapsed_ns as f64 * 1e9,
        offered_per_s: operations as f64 / elapsed_ns as f64 * 1e9,
        client_cpu_ns_per_operation: 12_140,
        syscalls_per_connection: 0.041,
        engine: "uring".into(),
        close: "client".into(),
        strategy: Some("full-range".into()),
        latency_ns: Latency {
            search: quantiles(operations / 64, 14_300),
            handshake: quantiles(operations, 22_000),
            first_byte: quantiles(operations, 41_000),
            total: quantiles(operations, 95_000),
            tls: Quantiles::default(),
        },
        seconds,
        distribution,
        addresses: vec![LoadAddress { address: "127.0.0.1:8080".into(), connections: operations }],
        ..LoadResults::default()
    }
}

/// Returns an open loop over HTTP that exhausts the ports after 12 seconds and continues when TIME_WAIT ends.
pub(crate) fn stalled() -> LoadRecord {
    let mut settings = settings("http://127.0.0.1:8080/", "http");
    settings.arrival = "poisson".into();
    (settings.rate_per_s, settings.threshold_ns, settings.anyway) =
        (Some(2_400.0), Some(SECOND / 1_000), true);
    let mut results = results(75, |second| match second {
        0..=10 => 2_400,
        11 => 1_700,
        12..=59 => 0,
        _ => 2_380,
    });
    results.engine = "epoll".into();
    results.engine_reason = Some("io_uring_setup: EPERM (kernel.io_uring_disabled is 2)".into());
    results.syscalls_per_connection = 7.02;
    results.offered_per_s = 2_400.0;
    results.errors =
        BTreeMap::from([("ECONNRESET".into(), 3), ("EADDRNOTAVAIL".into(), 114_873), ("timeout".into(), 12)]);
    results.error_details =
        BTreeMap::from([("malformed".into(), "not a status line of HTTP/1: \"SSH-2.0\"".into())]);
    let redirected = LoadStatus { code: 301, count: 12, location: Some("/dir/".into()) };
    let rest = LoadStatus { code: 200, count: results.operations - 12, location: None };
    results.statuses = vec![rest, redirected];
    results.status_classes = classes(&results.statuses);
    (results.sent_bytes, results.received_bytes) = (Some(9_412_000), Some(47_060_000));
    settings.warm_up_ns = 2 * SECOND;
    results.warm_up =
        Some(LoadWarmUp { for_ns: 2 * SECOND, operations: 4_790, connections: 4_790, errors: 0 });
    settings.expect = vec!["p99<20ms".into(), "errors<0.1%".into()];
    results.expectations =
        [("p99<20ms", "ns", 2e7, 475e3, true), ("errors<0.1%", "share", 0.001, 0.42, false)]
            .map(|(expect, unit, limit, measured, met)| LoadExpectation {
                expect: expect.into(),
                unit: unit.into(),
                limit,
                measured: Some(measured),
                met,
            })
            .into();
    results.late_ns = quantiles(results.operations, 1_900);
    let mut left = 28_232_u64 - 31;
    for (index, second) in results.seconds.iter_mut().enumerate() {
        left = match index {
            12..=59 => 0,
            60.. => 28_201 - 2_400 * (index as u64 % 8),
            _ => left.saturating_sub(second.connections),
        };
        second.ports_left = Some(left);
        second.errors = if (12..60).contains(&index) { 2_393 } else { 0 };
    }
    results.slow = (0..40)
        .map(|number| Slow {
            at_ns: 11 * SECOND + number * 17_000_000,
            total_ns: 1_200_000 + number * 300_000,
            longest: ["connect", "late", "response"][number as usize % 3].into(),
            request: 1,
        })
        .collect();
    results.slow_count = 40;
    results.ports = Some(LoadPorts {
        budget: 28_232,
        taken_before: 31,
        needed: Some(180_000),
        used: 28_201,
        kept_ns: 60 * SECOND,
        predicted_stall_ns: Some(11_750_000_000),
        stalled_ns: Some(11_800_000_000),
        stall_length_ns: 48_200_000_000,
    });
    results.advice = vec![
        "The ports ran out after 11.8s: 28,232 tuples, each kept for 60s in TIME_WAIT, carry 470 connections a second \
         for ever. Use --source 127.0.0.0/29 or --close server."
            .into(),
    ];
    let mut record = record("load", settings, results);
    record.validity.push(Remark::new("ports-exhausted", "no connection could be opened for 48.2s of 75.0s"));
    record
}

/// Requests over a Unix socket in a closed loop: no ports, no stall.
pub(crate) fn steady() -> LoadRecord {
    let mut settings = settings("unix:/run/my app.sock", "crr");
    (settings.address, settings.for_ns) = ("/run/my app.sock".into(), Some(10 * SECOND));
    (settings.request_bytes, settings.response_bytes) = (128, 1_024);
    let mut results = results(10, |second| 48_000 + 500 * (second % 3));
    (results.strategy, results.latency_ns.search) = (None, Quantiles::default());
    record("load", settings, results)
}

/// Returns a run with ten thousand held connections with some churn, until Ctrl-C.
pub(crate) fn hold() -> LoadRecord {
    let mut settings = settings("tcp://[::1]:9000", "hold");
    (settings.arrival, settings.rate_per_s) = ("even".into(), Some(100.0));
    (settings.hold, settings.for_ns, settings.sources) = (10_000, None, Some("::1".into()));
    (settings.operations, settings.threshold_ns) = (Some(1_000_000), Some(5_000_000));
    let mut results = results(3, |_| 100);
    results.elapsed_ns -= SECOND * 19 / 20;
    results.seconds[2].operations = 5;
    results.offered_per_s = 100.0;
    results.hold = Some(Held { opened: 10_000, lost: 17, ramp_ns: 412_000_000 });
    results.ports = Some(LoadPorts {
        budget: 28_232,
        taken_before: 0,
        needed: None,
        used: 10_205,
        kept_ns: 0,
        predicted_stall_ns: Some(600 * SECOND),
        stalled_ns: None,
        stall_length_ns: 0,
    });
    for second in &mut results.seconds {
        second.ports_left = Some(18_027);
    }
    record("load", settings, results)
}

/// Returns a closed loop without a time limit, on an address without ports: every field that may be null is null.
pub(crate) fn bare_load() -> LoadRecord {
    let mut record = steady();
    (record.settings.operations, record.settings.for_ns) = (Some(480_000), None);
    record.settings.threshold_ns = None;
    record
}

/// Returns a ramp over TLS with a list of requests, whose third rate was not reached.
pub(crate) fn ramp() -> LoadRecord {
    // A page contains nothing that is fetched, and a test looks for the scheme in lower case.
    let mut settings = settings("HTTPS://app.test/", "http");
    (settings.address, settings.resolve) = ("192.0.2.1:443".into(), Some("app.test:443:192.0.2.1".into()));
    (settings.arrival, settings.rate_per_s) = ("poisson".into(), Some(20_000.0));
    (settings.for_ns, settings.warm_up_ns, settings.method) = (Some(3 * SECOND), SECOND, String::new());
    settings.ramp = Some(LoadRamp { from_per_s: 1_000.0, to_per_s: 20_000.0, steps: 4 });
    settings.requests =
        Some(LoadRequests { file: "requests.jsonl".into(), count: 2, order: "random".into() });
    settings.tls = Some(LoadTlsSettings {
        name: Some("www.app.test".into()),
        certificate: Some("client.pem".into()),
        key: Some("client.key".into()),
        full_handshakes: true,
        protocols: vec!["http/1.1".into()],
    });
    let mut results = results(3, |_| 2_705);
    results.offered_per_s = 2_710.0;
    results.latency_ns.tls = quantiles(results.connections, 1_900_000);
    results.warm_up = Some(LoadWarmUp { for_ns: SECOND, operations: 2_699, connections: 64, errors: 1 });
    let step = |offered_per_s: f64, done: f64| LoadStep {
        offered_per_s,
        rate_per_s: done,
        operations: (done * 3.0) as u64,
        connections: 64,
        errors: u64::from(done < offered_per_s),
        warm_up_operations: done as u64,
        p50_ns: 95_000,
        p99_ns: 475_000,
        max_ns: 12_350_000,
        client_cpu_ns_per_operation: 12_140,
        not_reached: (done < offered_per_s)
            .then(|| "all 64 connections were busy for 98% of the time".into()),
    };
    results.steps = vec![step(1_000.0, 1_000.0), step(2_710.0, 2_710.0), step(7_370.0, 3_120.0)];
    let request = |method: &str, path: &str, responses| LoadRequestCount {
        method: method.into(),
        path: path.into(),
        responses,
    };
    results.requests = vec![request("GET", "/cart", 4_020), request("PUT", "/cart/7?a=b", 4_095)];
    results.tls = vec![LoadTls {
        version: "TLS 1.3".into(),
        cipher: "TLS_AES_256_GCM_SHA384".into(),
        protocol: Some("http/1.1".into()),
        resumed: false,
        connections: results.connections,
    }];
    record("load", settings, results)
}

/// Returns a run over HTTP/2 whose server accepts fewer streams than wanted.
pub(crate) fn http2() -> LoadRecord {
    let mut settings = settings("http://127.0.0.1:8080/", "http");
    (settings.streams, settings.connections, settings.close_every) = (Some(100), 4, 0);
    let mut results = results(10, |_| 90_000);
    (results.connections, results.engine) = (4, "h2".into());
    results.http2 = Some(LoadHttp2 {
        most_streams: 32,
        server_limit: Some(32),
        goaways: 1,
        refused_streams: 0,
        window_waits: 1,
        window_wait_ns: 41_000_000,
    });
    record("load", settings, results)
}

/// Returns a run without a response.
pub(super) fn empty() -> LoadRecord {
    let mut results = results(0, |_| 0);
    (results.rate_per_s, results.offered_per_s) = (0.0, 0.0);
    (results.latency_ns, results.distribution) = (Latency::default(), Vec::new());
    results.errors = BTreeMap::from([("ECONNREFUSED".into(), 64)]);
    record("load", settings("http://127.0.0.1:9/", "http"), results)
}

/// Returns a hostile record that attacks the page and the terminal.
pub(crate) fn hostile_load() -> LoadRecord {
    let evil = "</script><script>alert(1)</script><!-- \" ' & \x1b[2J\u{202e} ";
    let mut record = stalled();
    for text in [
        &mut record.settings.target,
        &mut record.settings.address,
        &mut record.settings.workload,
        &mut record.settings.method,
        &mut record.results.engine,
        &mut record.results.close,
    ] {
        *text = evil.into();
    }
    (record.settings.sources, record.results.engine_reason) = (Some(evil.into()), Some(evil.into()));
    record.results.errors.insert(evil.into(), u64::MAX);
    record.results.slow[0].longest = evil.into();
    let ramp = ramp();
    (record.results.steps, record.results.tls, record.results.requests) =
        (ramp.results.steps, ramp.results.tls, ramp.results.requests);
    record.results.steps[2].not_reached = Some(evil.into());
    record.results.tls[0].cipher = evil.into();
    record.results.requests[0].path = evil.into();
    record.results.expectations[0].expect = evil.into();
    record.results.expectations[1].measured = Some(f64::MAX);
    record.results.status_classes.insert(evil.into(), u64::MAX);
    (record.settings.expect[0], record.settings.ramp) = (evil.into(), ramp.settings.ramp);
    (record.settings.requests, record.settings.tls) = (ramp.settings.requests, ramp.settings.tls);
    record.settings.requests.as_mut().unwrap().file = evil.into();
    record.results.slow[0].at_ns = u64::MAX;
    (record.results.rate_per_s, record.results.offered_per_s) = (f64::MAX, f64::MIN_POSITIVE);
    record.results.elapsed_ns = u64::MAX;
    record.results.seconds[3].operations = u64::MAX;
    record.results.seconds[4].at_ns = u64::MAX;
    record.results.seconds[5].max_ns = u64::MAX;
    record.results.distribution = vec![Quantile { share: 0.5, ns: 0 }, Quantile { share: 1.0, ns: u64::MAX }];
    record
}

/// Returns a run on three hosts: one is slow, and one was lost after 2 seconds.
pub(crate) fn fleet() -> LoadRecord {
    let mut settings = settings("http://127.0.0.1:8080/", "http");
    (settings.arrival, settings.rate_per_s, settings.for_ns) =
        ("poisson".into(), Some(9_000.0), Some(4 * SECOND));
    let mut merged = results(4, |second| if second < 2 { 9_000 } else { 6_000 });
    merged.distribution.drain(1..149);
    merged.hosts = (0..3_u64)
        .map(|number| {
            let lost = number == 2;
            let own = results(if lost { 2 } else { 4 }, |_| 3_000);
            let mut seconds = own.seconds;
            if number == 1 {
                seconds.iter_mut().for_each(|second| second.p99_ns *= 6);
            }
            LoadHost {
                name: format!("rack1-host{number}"),
                labels: BTreeMap::from([("zone".into(), "eu".into())]),
                kernel: if number == 1 { "5.15.0" } else { "6.12.0" }.into(),
                cpus: 8,
                address: "127.0.0.1:8080".into(),
                clock_offset_ns: [0, 37_000_000_000, -2_000_000_000_000][number as usize],
                clock_bound_ns: 120_000 * (number + 1),
                start_error_ns: (!lost).then_some(61_000),
                lost_at_ns: lost.then_some(2 * SECOND),
                intervals: seconds.len() as u64,
                missing: 0,
                operations: own.operations,
                connections: own.connections,
                errors: if lost { BTreeMap::from([("timeout".into(), 4)]) } else { BTreeMap::new() },
                rate_per_s: own.rate_per_s,
                offered_per_s: Some(3_000.0),
                client_cpu_ns_per_operation: (!lost).then_some(12_000),
                total_ns: (!lost).then(|| quantiles(own.operations, 95_000 * (1 + 5 * (number % 2)))),
                seconds,
            }
        })
        .collect();
    let mut record = record("load", settings, merged);
    record.validity.push(Remark::new(
        "worker-lost",
        "rack1-host2: the worker was lost after 2.00s; its seconds before count, and its load was not replaced",
    ));
    record
}
