use fourtuple_record::{
    Held, LoadExpectation, LoadHost, LoadHttp2, LoadPorts, LoadRecord, LoadResults, LoadSettings, LoadStep,
    LoadTls, LoadWarmUp, Quantiles, Second,
};

use crate::document::{Block, Document, Tone};
use crate::table::{self, Cell, Table};
use crate::words::{
    self, CommandLine, NOTHING, count, duration, every, plural, present, quantity, rate, share, typed, word,
};

const SECOND_NS: u64 = 1_000_000_000;

pub(super) fn document(record: &LoadRecord) -> Document {
    let (settings, results) = (&record.settings, &record.results);
    let mut document = Document::untitled(
        "How the server performs under this load",
        command_line(settings),
        &results.advice,
    );
    document.note(Tone::Strong, asked(settings));
    document.facts(facts(settings));
    ramp(&mut document, record);
    document.heading(achieved(settings, results));
    match errors(results) {
        none if none.is_empty() => without_errors(&mut document, results),
        some => document.note(Tone::Bad, format!("errors: {some}")),
    }
    expectations(&mut document, results);
    document.push(Block::Figures(figures(settings, results)));
    statuses(&mut document, results);
    if !results.addresses.is_empty() {
        document.table(Table::of(&results.addresses).name("address", |one| one.address.clone()).number(
            "connections",
            0,
            |one| Cell::toned(count(one.connections), Tone::bad_if(one.connections == 0)),
        ));
    }
    if !results.requests.is_empty() {
        let table = Table::of(&results.requests)
            .name("method", |request| request.method.clone())
            .text("path", 0, |request| request.path.clone())
            .number("responses", 0, |request| count(request.responses));
        document.table(table.limit(REQUESTS.0, REQUESTS.1, "request"));
    }
    if !results.tls.is_empty() {
        let kind = |tls: &LoadTls| if tls.resumed { "resumed" } else { "full" };
        document.table(
            Table::of(&results.tls)
                .name("TLS", |tls| tls.version.clone())
                .text("cipher suite", 0, |tls| tls.cipher.clone())
                .text("ALPN", 1, |tls| tls.protocol.clone().unwrap_or_else(|| "none".to_owned()))
                .text("handshake", 0, kind)
                .number("connections", 0, |tls| count(tls.connections)),
        );
    }
    if let Some(http2) = &results.http2 {
        streams(&mut document, settings, results, http2);
    }
    if let Some(reason) = &results.engine_reason {
        document.note(Tone::Dim, format!("{} because {reason}", results.engine));
    }
    latency(&mut document, settings, results);
    document.terminal(|document| seconds(document, results));
    charts(&mut document, settings, results);
    show_hosts(&mut document, results);
    if let Some(ports) = &results.ports {
        budget(&mut document, ports, results);
    }
    if let Some(hold) = &results.hold {
        document.heading("Held connections");
        document.note(Tone::bad_if(hold.lost > 0), held(hold));
    }
    if let Some(threshold) = settings.threshold_ns {
        slow(&mut document, threshold, results);
    }
    document
}

/// Describes the load in one sentence.
fn asked(settings: &LoadSettings) -> String {
    let LoadSettings { target, workload, arrival, rate_per_s, connections, hold, .. } = settings;
    let method = match &settings.requests {
        Some(list) => {
            let order = if list.order == "random" { "at random" } else { "in turn" };
            format!(", {} of {} {order},", plural(list.count, "request"), list.file)
        }
        None if settings.method.is_empty() => String::new(),
        None => format!(" {}", settings.method),
    };
    let streams =
        settings.streams.map_or(String::new(), |streams| format!(" with {} each", plural(streams, "stream")));
    let arrivals = match (arrival.as_str(), rate_per_s) {
        (arrival, _) if let Some(ramp) = settings.ramp => format!(
            "open loops ({}) from {} to {} in {}",
            if arrival == "poisson" { "Poisson" } else { "even" },
            rate(ramp.from_per_s),
            rate(ramp.to_per_s),
            plural(ramp.steps.into(), "step")
        ),
        ("closed", _) | (_, None) => {
            format!("closed loop of {}{streams}", plural(*connections, "connection"))
        }
        ("poisson", Some(per_s)) => format!("open loop (Poisson) at {}", rate(*per_s)),
        (_, Some(per_s)) => format!("open loop (even) at {}", rate(*per_s)),
    };
    let held =
        if *hold > 0 { format!(" on top of {} held", plural(*hold, "connection")) } else { String::new() };
    let each = if settings.ramp.is_some() { " each" } else { "" };
    let time = settings.for_ns.map(|time| format!(" for {}{each}", duration(time)));
    let operations = settings.operations.map(|operations| format!(" {}", plural(operations, "operation")));
    let ends = present([time, operations]).join(" or");
    let comma = if ends.is_empty() { "" } else { "," };
    format!("{workload}{method} to {target}: {arrivals}{held}{comma}{ends}")
}

/// Returns the settings that the sentence omits.
fn facts(settings: &LoadSettings) -> Vec<String> {
    let LoadSettings { address, close_every, pause_ns, request_bytes, response_bytes, .. } = settings;
    let streams = settings.streams.map(|streams| format!(" with {} each", plural(streams, "stream")));
    let connections = || {
        let streams = streams.unwrap_or_default();
        format!("{}{streams} at most", plural(settings.connections, "connection"))
    };
    let closed = || match close_every {
        0 => "kept alive".to_owned(),
        1 => "closed after every request".to_owned(),
        requests => format!("closed after {}", plural(*requests, "request")),
    };
    let sends = *request_bytes > 0 || *response_bytes > 0;
    present([
        (!settings.target.contains(address)).then(|| format!("at {address}")),
        settings.rate_per_s.map(|_| connections()),
        settings.streams.map(|_| "HTTP/2".to_owned()),
        (settings.workload == "http").then(closed),
        (*pause_ns > 0).then(|| format!("pause {}", duration(*pause_ns))),
        sends.then(|| format!("{} out", plural(*request_bytes, "byte"))),
        (*response_bytes > 0).then(|| format!("{} back", plural(*response_bytes, "byte"))),
        Some(plural(settings.threads, "thread") + if settings.pinned { ", pinned" } else { "" }),
        Some(format!("engine {}", settings.engine)),
        Some(format!("strategy {}", settings.strategy)),
        settings.sources.as_ref().map(|sources| format!("from {sources}")),
        Some(format!("timeout {}", duration(settings.timeout_ns))),
        (settings.warm_up_ns > 0).then(|| format!("warm-up {}", duration(settings.warm_up_ns))),
        settings.threshold_ns.map(|slow| format!("slow is over {}", duration(slow))),
        settings.separate_ack.then(|| "separate ACK".to_owned()),
        settings.anyway.then(|| "preflight ignored".to_owned()),
        Some(format!("seed {}", settings.seed)),
    ])
}

fn command_line(settings: &LoadSettings) -> String {
    let workload = settings.workload.as_str();
    let (is_http, has_ports) = (workload == "http", !settings.target.starts_with("unix:"));
    let closes = matches!(workload, "http" | "crr" | "udp");
    let over_zero = |value: u64| Some(value).filter(|value| *value > 0);
    let arrival = &settings.arrival;
    let ramp = settings
        .ramp
        .map(|ramp| format!("{}/s..{}/s:{} --arrival {arrival}", ramp.from_per_s, ramp.to_per_s, ramp.steps));
    let rate =
        settings.rate_per_s.filter(|_| ramp.is_none()).map(|per_s| format!("{per_s}/s --arrival {arrival}"));
    let tls = settings.tls.as_ref();
    let line = CommandLine::new("load")
        .words(word(&settings.target))
        .maybe("--resolve", settings.resolve.as_ref())
        .flag("--all-addresses", settings.all_addresses)
        .maybe("--sni", tls.and_then(|tls| tls.name.as_deref()).map(word))
        .maybe("--cert", tls.and_then(|tls| tls.certificate.as_deref()).map(word))
        .maybe("--key", tls.and_then(|tls| tls.key.as_deref()).map(word))
        .flag("--no-resumption", tls.is_some_and(|tls| tls.full_handshakes))
        .maybe(
            "--alpn",
            tls.map(|tls| if tls.protocols.is_empty() { "none".into() } else { tls.protocols.join(",") }),
        )
        .set("--workload", workload)
        .maybe("--connections", over_zero(settings.connections))
        .maybe("--ramp", ramp)
        .flag("--http2", settings.streams.is_some())
        .maybe("--streams", settings.streams)
        .maybe("--rate", rate)
        .maybe("--pause", over_zero(settings.pause_ns).map(typed))
        .maybe("--close-every", closes.then(|| every(settings.close_every)))
        .maybe("--method", Some(&settings.method).filter(|method| is_http && !method.is_empty()))
        .maybe("--requests", settings.requests.as_ref().map(|list| word(&list.file)))
        .maybe("--order", settings.requests.as_ref().map(|list| &list.order))
        .maybe("--hold", over_zero(settings.hold))
        .maybe("--operations", settings.operations)
        .maybe("--for", settings.for_ns.map(typed))
        .maybe("--warm-up", over_zero(settings.warm_up_ns).map(typed))
        .set("--timeout", typed(settings.timeout_ns))
        .maybe("--threshold", settings.threshold_ns.map(typed))
        .set("--engine", &settings.engine)
        .set("--threads", settings.threads)
        .flag("--pin", settings.pinned)
        .maybe("--strategy", Some(&settings.strategy).filter(|_| workload != "udp" && has_ports))
        .maybe("--source", settings.sources.as_ref())
        .set("--close", &settings.close)
        .maybe("--request", over_zero(settings.request_bytes).filter(|_| !is_http))
        .maybe("--response", over_zero(settings.response_bytes))
        .flag("--separate-ack", settings.separate_ack)
        .flag("--anyway", settings.anyway)
        .set("--seed", settings.seed);
    settings.expect.iter().fold(line, |line, one| line.set("--expect", word(one))).finish()
}

/// Returns the achieved load (`19.8k/s`), in an open loop with the offered load.
fn achieved(settings: &LoadSettings, results: &LoadResults) -> String {
    let done = rate(results.rate_per_s);
    if settings.rate_per_s.is_none() || results.offered_per_s <= 0.0 {
        return done;
    }
    let part = (results.rate_per_s / results.offered_per_s * 1000.0).round() / 1000.0;
    format!("{done} of {} offered ({})", rate(results.offered_per_s), share(part))
}

fn figures(settings: &LoadSettings, results: &LoadResults) -> Vec<(&'static str, String)> {
    // A connection that is kept carries many operations, so that its number of system calls says nothing.
    let (unit, calls) = match settings.close_every {
        1 => ("syscalls/connection", results.syscalls_per_connection),
        _ => {
            let all = results.syscalls_per_connection * results.connections as f64;
            ("syscalls/operation", all / results.operations.max(1) as f64)
        }
    };
    // With batching a connection needs less than one system call.
    let calls = if calls == 0.0 { "0".to_owned() } else { quantity(calls) };
    let closer = match results.close.as_str() {
        "client" => "client, FIN",
        "rst" => "client, RST",
        "server" => "server, FIN",
        other => other,
    };
    present([
        Some(("operations", count(results.operations))),
        Some(("connections", count(results.connections))),
        all_ok(results).then(|| ("responses", "all 200".to_owned())),
        (results.retried > 0).then(|| ("requests retried", count(results.retried))),
        results.sent_bytes.map(|bytes| ("sent", amount(bytes, results))),
        results.received_bytes.map(|bytes| ("received", amount(bytes, results))),
        Some(("elapsed", duration(results.elapsed_ns))),
        results.warm_up.map(|warm_up| ("in the warm-up", warmed_up(warm_up))),
        Some(("CPU per operation", duration(results.client_cpu_ns_per_operation))),
        Some((unit, calls)),
        Some(("engine", results.engine.clone())),
        // A UDP server does not notice the end of a flow.
        (settings.workload != "udp").then(|| ("closed by", closer.to_owned())),
        results.strategy.as_ref().map(|strategy| ("ports chosen by", strategy.clone())),
    ])
}

/// Formats `4,790 operations`, with errors `4,790 operations, 3 errors`.
fn warmed_up(warm_up: LoadWarmUp) -> String {
    let errors = (warm_up.errors > 0).then(|| plural(warm_up.errors, "error"));
    present([Some(plural(warm_up.operations, "operation")), errors]).join(", ")
}

/// Formats a number of bytes with its rate: `1.20 MB (400 kB/s)`.
fn amount(bytes: u64, results: &LoadResults) -> String {
    let words = |bytes: f64| match bytes {
        1e6.. => format!("{} MB", quantity(bytes / 1e6)),
        _ => format!("{} kB", quantity(bytes / 1e3)),
    };
    let opening = results.hold.filter(|_| results.warm_up.is_none()).map_or(0, |hold| hold.ramp_ns);
    let seconds = results.elapsed_ns.saturating_sub(opening).max(1) as f64 / 1e9;
    format!("{} ({}/s)", words(bytes as f64), words(bytes as f64 / seconds))
}

/// Adds the steps of a ramp, and where its knee is.
fn ramp(document: &mut Document, record: &LoadRecord) {
    let results = &record.results;
    let Some(last) = results.steps.last() else { return };
    let tone = |step: &LoadStep| Tone::bad_if(step.not_reached.is_some());
    document.heading("Ramp");
    document.table(
        Table::of(&results.steps)
            .number("offered", 0, |step| rate(step.offered_per_s))
            .number("done", 0, move |step| Cell::toned(rate(step.rate_per_s), tone(step)))
            .number("p50", 3, |step| duration(step.p50_ns))
            .number("p99", 1, |step| duration(step.p99_ns))
            .number("max", 5, |step| duration(step.max_ns))
            .number("errors", 2, |step| Cell::bad_count(step.errors))
            .number("operations", 6, |step| count(step.operations))
            .number("CPU per operation", 4, |step| duration(step.client_cpu_ns_per_operation)),
    );
    let reached = results.steps.iter().rev().find(|step| step.not_reached.is_none());
    // Errors and stalls that are too few to miss the rate, or answers that are errors, may be those of a server at its limit.
    let failed = words::total(results.steps.iter().map(|step| &step.errors));
    let has_stalled = record.validity.iter().any(|remark| remark.id == "server-stalled");
    match (reached, &last.not_reached) {
        (Some(reached), None) if failed > 0 || has_stalled => {
            let stalled = has_stalled.then(|| "a server that stalled".to_owned());
            let errors = (failed > 0).then(|| plural(failed, "error"));
            let with = present([errors, stalled]).join(" and ");
            let rate = rate(reached.offered_per_s);
            document.note(Tone::Strong, format!("Every step up to {rate} was reached, with {with}."));
        }
        (Some(reached), None) => document.note(
            Tone::Good,
            format!("Every step up to {} was reached: the knee is above.", rate(reached.offered_per_s)),
        ),
        (Some(reached), Some(why)) => document.note(
            Tone::Strong,
            format!(
                "The knee: {} was reached, {} was not: {why}.",
                rate(reached.offered_per_s),
                rate(last.offered_per_s)
            ),
        ),
        (None, Some(why)) => document.note(Tone::Bad, format!("The first step was not reached: {why}.")),
        (None, None) => {}
    }
}

/// Adds the thresholds, if there are any.
fn expectations(document: &mut Document, results: &LoadResults) {
    if results.expectations.is_empty() {
        return;
    }
    let value = |unit: &str, value: f64| match unit {
        "ns" => duration(value as u64),
        "per_s" => rate(value),
        "share" => share(value),
        _ => count(value as u64),
    };
    let of =
        move |one: &LoadExpectation| one.measured.map_or("none".to_owned(), |found| value(&one.unit, found));
    let off = move |one: &LoadExpectation| match one.measured.filter(|_| !one.met) {
        Some(found) => value(&one.unit, (found - one.limit).abs()),
        None => String::new(),
    };
    let tone = |one: &LoadExpectation| Tone::bad_if(!one.met);
    document.table(
        Table::of(&results.expectations)
            .name("expected", |one| Cell::toned(one.expect.clone(), tone(one)))
            .text("", 0, |one| Cell::toned(if one.met { "met" } else { "not met" }, tone(one)))
            .number("measured", 0, of)
            .number("off by", 0, off),
    );
}

/// Adds the connections and streams of HTTP/2.
fn streams(document: &mut Document, settings: &LoadSettings, results: &LoadResults, http2: &LoadHttp2) {
    let per_s = |number: u64| rate(number as f64 / (results.elapsed_ns.max(1) as f64 / SECOND_NS as f64));
    document.heading("HTTP/2");
    document.facts(present([
        Some(format!("{} a connection at most", plural(http2.most_streams, "stream"))),
        http2.server_limit.map(|limit| format!("the server accepts {}", count(limit))),
        Some(format!("connections: {}", per_s(results.connections))),
        Some(format!("requests: {}", per_s(results.operations))),
        Some(format!("{} GOAWAY", count(http2.goaways))),
        Some(format!("{} REFUSED_STREAM", count(http2.refused_streams))),
        Some(match http2.window_waits {
            0 => "no wait for flow control".to_owned(),
            waits => format!(
                "{} for flow control, {} in all",
                plural(waits, "wait"),
                duration(http2.window_wait_ns)
            ),
        }),
    ]));
    if let (Some(limit), Some(asked)) = (http2.server_limit, settings.streams)
        && limit < asked
    {
        document.note(
            Tone::Bad,
            format!(
                "The server accepts {} on a connection (SETTINGS_MAX_CONCURRENT_STREAMS), fewer than the {} of --streams.",
                plural(limit, "stream"),
                count(asked)
            ),
        );
    }
}

/// Returns the errors with their counts, most frequent first: `12 ECONNREFUSED`.
fn errors(results: &LoadResults) -> String {
    let mut errors = Vec::from_iter(&results.errors);
    errors.sort_by_key(|(name, number)| (std::cmp::Reverse(**number), *name));
    words::errors(errors)
}

/// Says that no operation failed, and what did outside of the operations.
fn without_errors(document: &mut Document, results: &LoadResults) {
    let held = results.hold.map_or(0, |hold| hold.lost);
    let before = results.warm_up.map_or(0, |warm_up| warm_up.errors);
    let others = present([
        (held > 0).then(|| format!("the server closed {}", plural(held, "held connection"))),
        (before > 0).then(|| format!("the warm-up had {}", plural(before, "error"))),
    ]);
    match others.is_empty() {
        true => document.note(Tone::Good, "no errors"),
        false => document.note(Tone::Bad, format!("no operation failed, but {}", others.join(" and "))),
    }
}

/// Adds the responses by status code. A run in which all were 200 has them in the figures.
fn statuses(document: &mut Document, results: &LoadResults) {
    if all_ok(results) || results.statuses.is_empty() {
        return;
    }
    let all = results.statuses.iter().fold(0_u64, |sum, status| sum.saturating_add(status.count));
    let has_location = results.statuses.iter().any(|status| status.location.is_some());
    let tone = |code: u16| Tone::bad_if(code >= 300 && code != 304);
    let classes = results.status_classes.iter();
    document.facts(classes.map(|(class, number)| format!("{} {class}", count(*number))).collect());
    let table = Table::of(&results.statuses)
        .name("status", |status| Cell::toned(status.code.to_string(), tone(status.code)))
        .number("responses", 0, |status| count(status.count))
        .number("share", 0, |status| share(status.count as f64 / all.max(1) as f64));
    document.table(match has_location {
        true => table.text("location", 1, |status| status.location.clone().unwrap_or_default()),
        false => table,
    });
}

fn all_ok(results: &LoadResults) -> bool {
    matches!(results.statuses.as_slice(), [status] if status.code == 200)
}

fn latency(document: &mut Document, settings: &LoadSettings, results: &LoadResults) {
    document.heading("Latency");
    let measured = |times: Quantiles| Some(times).filter(|times| times.samples > 0);
    let (times, late) = (results.latency_ns, measured(results.late_ns));
    let parts = [
        ("late", late),
        ("search", measured(times.search)),
        ("handshake", measured(times.handshake)),
        ("TLS", measured(times.tls)),
        ("first byte", measured(times.first_byte)),
        ("total", measured(times.total)),
    ];
    if parts.iter().all(|(_, times)| times.is_none()) {
        return document.push(Block::Nothing);
    }
    let late = late.map_or("", |_| " Late: from the intended start to the actual one, part of the total.");
    let explanation = "Search: in connect(), the search for a port and the SYN. Handshake: from there until the connection \
                       is established. TLS: from there until requests can be sent. First byte: from the request to the first byte of the response. Total: from the \
                       start to the end, closing not included.";
    let rows: Vec<(&str, Quantiles)> =
        parts.into_iter().filter_map(|(name, times)| Some((name, times?))).collect();
    let maybe = |time: Option<u64>| time.map_or_else(String::new, duration);
    let table = Table::of(&rows)
        .name("|Part", |(name, _)| *name)
        .number("samples", 5, |(_, times)| count(times.samples))
        .number("mean", 6, |(_, times)| duration(times.mean))
        .number("p50", 0, |(_, times)| duration(times.p50));
    // Older records lack these percentiles.
    let table = match rows.iter().any(|(_, times)| times.p75.is_some()) {
        true => table
            .number("p75", 3, move |(_, times)| maybe(times.p75))
            .number("p90", 3, move |(_, times)| maybe(times.p90))
            .number("p95", 3, move |(_, times)| maybe(times.p95)),
        false => table,
    };
    document.table(
        table
            .number("p99", 0, |(_, times)| duration(times.p99))
            .number("p99.9", 1, |(_, times)| duration(times.p999))
            .number("max", 2, |(_, times)| duration(times.max)),
    );
    document.explain(format!("{explanation}{late}"));
    if let Some(text) = timed_out(settings, results) {
        document.note(Tone::Bad, text);
    }
}

/// Says which percentiles would be different if the operations that timed out had a time. They have none, and took longer than
/// the timeout.
fn timed_out(settings: &LoadSettings, results: &LoadResults) -> Option<String> {
    let number = results.errors.get("timeout").copied().filter(|number| *number > 0)?;
    let total = results.latency_ns.total;
    let all = total.samples.saturating_add(number);
    let is_higher = |share: f64| number as f64 > all as f64 * (1.0 - share);
    let names = present([
        is_higher(0.5).then_some("p50"),
        is_higher(0.75).then_some("p75").filter(|_| total.p75.is_some()),
        is_higher(0.9).then_some("p90").filter(|_| total.p90.is_some()),
        is_higher(0.95).then_some("p95").filter(|_| total.p95.is_some()),
        is_higher(0.99).then_some("p99"),
        is_higher(0.999).then_some("p99.9"),
        Some("max"),
    ]);
    let limit = duration(settings.timeout_ns);
    let (are, them) = if number == 1 { ("is", "it") } else { ("are", "them") };
    Some(format!(
        "{} that timed out after {limit} {are} not in these times: with {them}, {} of the total would be at least {limit}.",
        plural(number, "operation"),
        match names.as_slice() {
            [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
            names => names.join(", "),
        }
    ))
}

fn charts(document: &mut Document, settings: &LoadSettings, results: &LoadResults) {
    let shaded = shaded(results);
    if results.seconds.iter().any(|second| second.operations > 0) {
        document.chart(
            "load-latency",
            format!("Time of the operations that ended in each second: median, 99th percentile and longest.{shaded}"),
        );
    }
    if !results.distribution.is_empty() {
        document.page_heading("How the times are distributed");
        document.chart(
            "load-distribution",
            "The time that a share of the operations did not exceed. Every nine more is a tenth as many operations; the last \
             point is the longest.",
        );
    }
    if !results.seconds.is_empty() {
        document.page_heading("Throughput");
        let offered = if settings.rate_per_s.is_some() { " Dotted: the offered rate." } else { "" };
        document.chart(
            "load-throughput",
            format!("Operations, new connections and failures in each second.{offered}{shaded}"),
        );
    }
}

/// Explains the shaded bands in the charts over time.
fn shaded(results: &LoadResults) -> &'static str {
    let stalled = results.ports.as_ref().is_some_and(|ports| ports.stalled_ns.is_some());
    if stalled { " Shaded: the ports are exhausted." } else { "" }
}

/// Returns the seconds with their rates. The last second ends with the run; it is omitted if very short.
fn rates(results: &LoadResults) -> impl Iterator<Item = (&Second, f64)> {
    results.seconds.iter().filter_map(|second| {
        let length = results.elapsed_ns.saturating_sub(second.at_ns).min(SECOND_NS);
        (length >= SECOND_NS / 5 || results.seconds.len() == 1)
            .then(|| (second, second.operations as f64 * SECOND_NS as f64 / length.max(1) as f64))
    })
}

/// The columns of the sparklines.
const STEPS: usize = 20;

/// Merges `values` into at most [`STEPS`] groups of about equal size.
fn steps(values: &[f64], join: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let steps = values.len().min(STEPS);
    let edge = |step: usize| step * values.len() / steps;
    (0..steps).map(|step| join(&values[edge(step)..edge(step + 1)])).collect()
}

/// Adds sparklines of the run. A column has the mean rate of its seconds, and their worst value of other figures.
fn seconds(document: &mut Document, results: &LoadResults) {
    let (seconds, rates): (Vec<&Second>, Vec<f64>) = rates(results).unzip();
    if seconds.len() < 2 {
        return;
    }
    let most = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    let mean = |step: &[f64]| step.iter().sum::<f64>() / step.len().max(1) as f64;
    let of = |field: fn(&Second) -> u64| -> Vec<f64> {
        seconds.iter().map(|second| field(second) as f64).collect()
    };
    let row = |name, values: &[f64], join: fn(&[f64]) -> f64, words: fn(f64) -> String| {
        let picture = table::linear(steps(values, join).into_iter(), most(values));
        (name, picture, words(least(values)), words(most(values)))
    };
    let number = |value| count(value as u64);
    let mut rows = vec![row("rate", &rates, mean, rate)];
    let p99s = of(|second| second.p99_ns);
    // Seconds without completed operations have no percentiles.
    if let Some((low, high)) = table::extent(p99s.iter().copied()) {
        let picture = table::log(steps(&p99s, most).into_iter(), (low, high));
        rows.push(("p99 (log)", picture, duration(low as u64), duration(high as u64)));
    }
    let errors = of(|second| second.errors);
    if most(&errors) > 0.0 {
        rows.push(row("errors", &errors, most, number));
    }
    if seconds.iter().any(|second| second.ports_left.is_some()) {
        rows.push(row("ports left", &of(|second| second.ports_left.unwrap_or(0)), least, number));
    }
    document.heading("Second by second");
    document.table(
        Table::of(&rows)
            .name("", |(name, ..)| *name)
            .text("start to end", 0, |(name, picture, ..)| {
                Cell::toned(picture.clone(), Tone::bad_if(*name == "errors"))
            })
            .number("lowest", 2, |(.., low, _)| low.clone())
            .number("highest", 1, |(.., high)| high.clone()),
    );
}

fn budget(document: &mut Document, ports: &LoadPorts, results: &LoadResults) {
    document.heading("Ports");
    document.facts(ports_facts(ports));
    let tone = if ports.stalled_ns.is_some() { Tone::Bad } else { Tone::Good };
    document.note(tone, stall(ports));
    if results.seconds.iter().any(|second| second.ports_left.is_some()) {
        let predicted = match ports.predicted_stall_ns {
            Some(_) => " Dashed: where a stall was predicted before the first packet.",
            None => "",
        };
        document.chart(
            "load-ports",
            format!(
                "Tuples left for new connections, as far as known. Dotted: the budget.{predicted}{}",
                shaded(results)
            ),
        );
    }
}

/// Formats `budget 28,232 tuples`, `31 in use before`, ...
fn ports_facts(ports: &LoadPorts) -> Vec<String> {
    let kept = match ports.kept_ns {
        0 => "free once closed".to_owned(),
        kept => format!("kept for {} once closed", duration(kept)),
    };
    present([
        Some(format!("budget {}", plural(ports.budget, "tuple"))),
        Some(format!("{} in use before", count(ports.taken_before))),
        ports.needed.map(|needed| format!("{} needed", count(needed))),
        Some(format!("{} used", count(ports.used))),
        Some(kept),
    ])
}

/// Compares the predicted stall with the measured one.
fn stall(ports: &LoadPorts) -> String {
    let length = duration(ports.stall_length_ns);
    let predicted = ports.predicted_stall_ns.map(duration);
    match (predicted, ports.stalled_ns.map(duration)) {
        (None, None) => "No stall predicted, none seen.".to_owned(),
        (Some(predicted), None) => format!("A stall was predicted after {predicted}; none was seen."),
        (None, Some(at)) => format!("Stalled after {at} for {length} in all; it was not predicted."),
        (Some(predicted), Some(at)) => {
            format!("Stalled after {at} for {length} in all; predicted after {predicted}.")
        }
    }
}

/// Describes the held connections.
fn held(held: &Held) -> String {
    let lost = match held.lost {
        0 => "none was closed by the server".to_owned(),
        lost => format!("{} closed by the server", count(lost)),
    };
    format!("{} held, opened within {}; {lost}.", plural(held.opened, "connection"), duration(held.ramp_ns))
}

/// The requests of a list that the terminal and the page show; the record has up to 1,000.
const REQUESTS: (usize, usize) = (20, 1000);

/// The slow operations that the terminal and the page show; the record has up to 1,000.
const SLOW: (usize, usize) = (10, 100);

fn slow(document: &mut Document, threshold_ns: u64, results: &LoadResults) {
    document.heading("Slow operations");
    let over = format!("{} over {}", plural(results.slow_count, "operation"), duration(threshold_ns));
    let tone = if results.slow_count > 0 { Tone::Bad } else { Tone::Good };
    document.note(tone, over);
    if results.slow.is_empty() {
        return;
    }
    let table = Table::of(&results.slow)
        .number("at|Started after", 0, |slow| moment(slow.at_ns))
        .number("took", 0, |slow| duration(slow.total_ns))
        .text("longest|Longest part", 0, |slow| slow.longest.clone())
        .number("request no.|Request of its connection", 1, |slow| count(slow.request));
    let open = results.slow.len() <= 10;
    document.table(table.limit(SLOW.0, SLOW.1, "operation").folded("When, and what took the time", open));
}

/// Formats a time of the run with milliseconds, because slow operations come in bursts.
fn moment(ns: u64) -> String {
    format!("{}.{:03}s", ns / SECOND_NS, ns % SECOND_NS / 1_000_000)
}

/// Seconds that a picture shows at most; longer runs are shown by the worst second of each step.
const HOST_STEPS: usize = 24;

/// A host is a straggler from this multiple of the median of all 99th percentiles.
const SLOW_HOST: f64 = 2.0;

/// A host is a straggler below this share of its offered load.
const DELIVERED: f64 = 0.95;

// The hosts of a load on several hosts: stragglers, skew, and the seconds of each host on a common scale.

/// Adds the hosts, the worst first.
fn show_hosts(document: &mut Document, results: &LoadResults) {
    if results.hosts.is_empty() {
        return;
    }
    let median = median_p99(&results.hosts);
    let mut hosts: Vec<&LoadHost> = results.hosts.iter().collect();
    hosts.sort_by_key(|host| {
        (host.lost_at_ns.is_none(), !is_failed(host), std::cmp::Reverse(p99(host)), &host.name)
    });
    document.heading("Hosts");
    document.facts(host_facts(results));
    let most = highest(&hosts, |second| second.operations as f64);
    let extent = table::extent(host_seconds(&hosts).map(|second| second.p99_ns as f64));
    let rates = |host: &&LoadHost| {
        let values = host_steps(host, |second| second.operations as f64, least);
        Cell::spark(table::linear(values.iter().copied(), most), &values, most)
    };
    let tails = |host: &&LoadHost| {
        let Some((low, high)) = extent else { return NOTHING.into() };
        let values = host_steps(host, |second| second.p99_ns as f64, greatest);
        let positions: Vec<f64> = values
            .iter()
            .map(|value| if *value > 0.0 { (value / low).log2() / (high / low).log2().max(1.0) } else { 0.0 })
            .collect();
        Cell::spark(table::log(values.into_iter(), (low, high)), &positions, 1.0)
    };
    document.table(
        Table::of(&hosts)
            .name("host", |host| host.name.clone())
            .text("state", 0, |host| state(host, median))
            .number("rate", 0, |host| rate(host.rate_per_s))
            .number("offered", 4, |host| host.offered_per_s.map_or(NOTHING.to_owned(), rate))
            .text("operations per second", 2, rates)
            .number("p50", 3, |host| host.total_ns.map_or(NOTHING.to_owned(), |total| duration(total.p50)))
            .number("p99", 1, |host| host.total_ns.map_or(NOTHING.to_owned(), |total| duration(total.p99)))
            .text("p99 (log)", 3, tails)
            .number("failed", 1, |host| Cell::bad_count(failed(host)))
            .number("start|Start, late", 5, |host| host.start_error_ns.map_or(NOTHING.to_owned(), duration))
            .number("clock|Clock, error", 6, |host| duration(host.clock_bound_ns))
            .text("kernel", 7, |host| host.kernel.clone())
            .limit(24, 200, "host"),
    );
    document.explain(
        "The pictures have one scale for all hosts; a column is a second, in long runs the worst of several. A straggler has \
         a 99th percentile of twice the median of all hosts, or less than 95% of its offered load.",
    );
}

/// Describes the fleet: hosts, stragglers, lost workers, and the skew of the starts.
fn host_facts(results: &LoadResults) -> Vec<String> {
    let hosts = &results.hosts;
    let median = median_p99(hosts);
    let number = |of: &dyn Fn(&&LoadHost) -> bool| hosts.iter().filter(of).count() as u64;
    let stragglers = number(&|host| is_straggler(host, median));
    let lost = number(&|host| host.lost_at_ns.is_some());
    let failed = number(&|host| is_failed(host));
    let skew = |host: &LoadHost| Some(host.start_error_ns? + host.clock_bound_ns);
    let mut facts = vec![plural(hosts.len() as u64, "host")];
    if lost > 0 {
        facts.push(format!("{lost} lost"));
    }
    if failed > 0 {
        facts.push(format!("{failed} failed"));
    }
    match stragglers {
        0 if failed > 0 => {}
        0 => facts.push("no stragglers".to_owned()),
        some => facts.push(plural(some, "straggler")),
    }
    if let Some(skew) = hosts.iter().filter_map(skew).max() {
        facts.push(format!("started within {} of the common start", duration(skew)));
    }
    facts
}

fn state(host: &LoadHost, median: u64) -> Cell {
    match host.lost_at_ns {
        Some(at) => Cell::toned(format!("lost after {}", duration(at)), Tone::Bad),
        None if is_failed(host) => Cell::toned("failed", Tone::Bad),
        None if is_straggler(host, median) => Cell::toned("straggler", Tone::Bad),
        // A worker without a record of its own failed or was not done at the end.
        None if host.client_cpu_ns_per_operation.is_none() => Cell::toned("did not finish", Tone::Bad),
        None => "fine".into(),
    }
}

fn is_straggler(host: &LoadHost, median: u64) -> bool {
    let is_slow = p99(host) as f64 >= SLOW_HOST * median as f64 && median > 0;
    let delivers = host.offered_per_s.is_none_or(|offered| host.rate_per_s >= DELIVERED * offered);
    host.lost_at_ns.is_none() && !is_failed(host) && (is_slow || !delivers)
}

/// Returns whether every operation of a host failed.
fn is_failed(host: &LoadHost) -> bool {
    host.lost_at_ns.is_none() && host.operations == 0 && failed(host) > 0
}

fn p99(host: &LoadHost) -> u64 {
    host.total_ns.map_or(0, |total| total.p99)
}

/// Returns the median of the 99th percentiles of hosts that were not lost and did not fail, the lower one of two; 0 without any.
fn median_p99(hosts: &[LoadHost]) -> u64 {
    let whole = hosts.iter().filter(|host| host.lost_at_ns.is_none() && !is_failed(host));
    let mut all: Vec<u64> = whole.filter_map(|host| Some(host.total_ns?.p99)).collect();
    all.sort_unstable();
    all.get(all.len().saturating_sub(1) / 2).copied().unwrap_or(0)
}

fn failed(host: &LoadHost) -> u64 {
    host.errors.values().fold(0, |sum, count| sum.saturating_add(*count))
}

fn host_seconds<'a>(hosts: &'a [&LoadHost]) -> impl Iterator<Item = &'a Second> {
    hosts.iter().flat_map(|host| &host.seconds)
}

fn highest(hosts: &[&LoadHost], of: fn(&Second) -> f64) -> f64 {
    host_seconds(hosts).map(of).fold(0.0, f64::max)
}

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn greatest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

/// Returns the whole seconds of a host in at most [`HOST_STEPS`] groups of about equal size.
fn host_steps(host: &LoadHost, of: fn(&Second) -> f64, join: fn(&[f64]) -> f64) -> Vec<f64> {
    // The last second ends with the run and has fewer operations.
    let whole = host.seconds.len().saturating_sub(1).max(host.seconds.len().min(1));
    let values: Vec<f64> = host.seconds[..whole].iter().map(of).collect();
    let count = values.len().min(HOST_STEPS);
    let edge = |step: usize| step * values.len() / count;
    (0..count).map(|step| join(&values[edge(step)..edge(step + 1)])).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_stall_is_shown_with_its_prediction() {
        let ports = |predicted_stall_ns, stalled_ns| LoadPorts {
            budget: 1,
            taken_before: 0,
            needed: None,
            used: 1,
            kept_ns: 0,
            predicted_stall_ns,
            stalled_ns,
            stall_length_ns: 48 * SECOND_NS,
        };
        assert_eq!(stall(&ports(None, None)), "No stall predicted, none seen.");
        assert_eq!(
            stall(&ports(Some(12_100_000_000), Some(12_000_000_000))),
            "Stalled after 12.0s for 48.0s in all; predicted after 12.1s."
        );
        assert_eq!(
            ports_facts(&ports(None, None)),
            ["budget 1 tuple", "0 in use before", "1 used", "free once closed"]
        );
    }

    fn host(p99: u64, offered: f64, rate: f64) -> LoadHost {
        LoadHost {
            name: "h".into(),
            labels: BTreeMap::new(),
            kernel: String::new(),
            cpus: 1,
            address: String::new(),
            clock_offset_ns: 0,
            clock_bound_ns: 0,
            start_error_ns: None,
            lost_at_ns: None,
            intervals: 0,
            missing: 0,
            operations: 0,
            connections: 0,
            errors: BTreeMap::new(),
            rate_per_s: rate,
            offered_per_s: Some(offered),
            client_cpu_ns_per_operation: None,
            total_ns: Some(Quantiles { p99, ..Quantiles::default() }),
            seconds: Vec::new(),
        }
    }

    #[test]
    fn a_slow_or_late_host_is_a_straggler() {
        let hosts = [host(100, 10.0, 10.0), host(110, 10.0, 10.0), host(300, 10.0, 10.0)];
        let median = median_p99(&hosts);
        assert_eq!(median, 110);
        assert_eq!(hosts.map(|host| is_straggler(&host, median)), [false, false, true]);
        assert!(is_straggler(&host(100, 10.0, 9.0), median));
        assert!(!is_straggler(&LoadHost { lost_at_ns: Some(1_000_000_000), ..host(300, 10.0, 1.0) }, median));
        assert_eq!(median_p99(&[]), 0);
        let lost = LoadHost { lost_at_ns: Some(1_000_000_000), ..host(9, 1.0, 1.0) };
        assert_eq!(median_p99(&[lost, host(100, 1.0, 1.0)]), 100);
        let refused = LoadHost { errors: BTreeMap::from([("timeout".into(), 4)]), ..host(0, 10.0, 0.0) };
        assert_eq!(
            (state(&refused, median).text.as_str(), is_straggler(&refused, median)),
            ("failed", false)
        );
    }
}
