//! A run of load in the words and the steps that the terminal and the page share.

use fourtuple_record::{Held, LoadPorts, LoadResults, LoadSettings, Quantiles, Second};

use crate::envelope::{plural, quoted, typed};
use crate::number::{count, duration, quantity, rate, share};

/// What was asked, in one sentence.
pub(crate) fn asked(settings: &LoadSettings) -> String {
    let LoadSettings { target, workload, arrival, rate_per_s, connections, hold, .. } = settings;
    let method = if settings.method.is_empty() { String::new() } else { format!(" {}", settings.method) };
    let loop_ = match (arrival.as_str(), rate_per_s) {
        ("closed", _) | (_, None) => format!("closed loop of {}", plural(*connections, "connection")),
        ("poisson", Some(per_s)) => format!("open loop (Poisson) at {}", rate(*per_s)),
        (_, Some(per_s)) => format!("open loop (even) at {}", rate(*per_s)),
    };
    let held =
        if *hold > 0 { format!(" on top of {} held", plural(*hold, "connection")) } else { String::new() };
    let ends: Vec<String> = [
        settings.for_ns.map(|time| format!(" for {}", duration(time))),
        settings.operations.map(|operations| format!(" {}", plural(operations, "operation"))),
    ]
    .into_iter()
    .flatten()
    .collect();
    let ends = if ends.is_empty() { String::new() } else { format!(",{}", ends.join(" or")) };
    format!("{workload}{method} to {target}: {loop_}{held}{ends}")
}

/// The rest of what was asked, in short facts.
pub(crate) fn details(settings: &LoadSettings) -> Vec<String> {
    let mut words = Vec::new();
    if !settings.target.contains(&settings.address) {
        words.push(format!("at {}", settings.address));
    }
    if settings.rate_per_s.is_some() {
        words.push(format!("{} at most", plural(settings.connections, "connection")));
    }
    if settings.workload == "http" {
        words.push(match settings.close_every {
            0 => "kept alive".to_owned(),
            1 => "closed after every request".to_owned(),
            requests => format!("closed after {} requests", count(requests)),
        });
    }
    if settings.pause_ns > 0 {
        words.push(format!("{} of rest between", duration(settings.pause_ns)));
    }
    if settings.request_bytes > 0 || settings.response_bytes > 0 {
        words.push(format!("{} out", plural(settings.request_bytes, "byte")));
    }
    if settings.response_bytes > 0 {
        words.push(format!("{} back", plural(settings.response_bytes, "byte")));
    }
    words.push(plural(settings.threads, "thread") + if settings.pinned { ", pinned" } else { "" });
    words.push(format!("engine {}", settings.engine));
    words.push(format!("strategy {}", settings.strategy));
    words.extend(settings.sources.iter().map(|sources| format!("from {sources}")));
    words.push(format!("timeout {}", duration(settings.timeout_ns)));
    words.extend(settings.threshold_ns.map(|slow| format!("slow is over {}", duration(slow))));
    if settings.separate_ack {
        words.push("ACK by itself".to_owned());
    }
    if settings.anyway {
        words.push("in spite of the preflight".to_owned());
    }
    words.push(format!("seed {}", settings.seed));
    words
}

/// The command line that asks for the same again.
pub(crate) fn command_line(settings: &LoadSettings) -> String {
    let mut words = vec![
        "fourtuple load".to_owned(),
        if is_plain(&settings.target) { settings.target.clone() } else { quoted(&settings.target) },
        format!("--workload {}", settings.workload),
    ];
    if settings.connections > 0 {
        words.push(format!("--connections {}", settings.connections));
    }
    if let Some(per_s) = settings.rate_per_s {
        words.push(format!("--rate {per_s}/s --arrival {}", settings.arrival));
    }
    if settings.pause_ns > 0 {
        words.push(format!("--pause {}", typed(settings.pause_ns)));
    }
    if matches!(settings.workload.as_str(), "http" | "crr" | "udp") {
        let every =
            if settings.close_every == 0 { "never".to_owned() } else { settings.close_every.to_string() };
        words.push(format!("--close-every {every}"));
    }
    let is_http = settings.workload == "http";
    if is_http {
        words.push(format!("--method {}", settings.method));
    }
    if settings.hold > 0 {
        words.push(format!("--hold {}", settings.hold));
    }
    words.extend(settings.operations.map(|operations| format!("--operations {operations}")));
    words.extend(settings.for_ns.map(|time| format!("--for {}", typed(time))));
    words.push(format!("--timeout {}", typed(settings.timeout_ns)));
    words.extend(settings.threshold_ns.map(|slow| format!("--threshold {}", typed(slow))));
    words.push(format!("--engine {} --threads {}", settings.engine, settings.threads));
    if settings.pinned {
        words.push("--pin".to_owned());
    }
    if settings.workload != "udp" && !settings.target.starts_with("unix:") {
        words.push(format!("--strategy {}", settings.strategy));
    }
    words.extend(settings.sources.iter().map(|sources| format!("--source {sources}")));
    words.push(format!("--close {}", settings.close));
    if settings.request_bytes > 0 && !is_http {
        words.push(format!("--request {}", settings.request_bytes));
    }
    if settings.response_bytes > 0 {
        words.push(format!("--response {}", settings.response_bytes));
    }
    if settings.separate_ack {
        words.push("--separate-ack".to_owned());
    }
    if settings.anyway {
        words.push("--anyway".to_owned());
    }
    words.push(format!("--seed {}", settings.seed));
    words.join(" ")
}

/// Whether a shell takes `text` as it is.
fn is_plain(text: &str) -> bool {
    text.chars().all(|letter| letter.is_ascii_alphanumeric() || "/:.-_@%+,=".contains(letter))
}

/// `19.8k/s`, beside what was offered in an open loop.
pub(crate) fn achieved(settings: &LoadSettings, results: &LoadResults) -> String {
    let done = rate(results.rate_per_s);
    if settings.rate_per_s.is_none() || results.offered_per_s <= 0.0 {
        return done;
    }
    let part = (results.rate_per_s / results.offered_per_s * 1000.0).round() / 1000.0;
    format!("{done} of {} offered ({})", rate(results.offered_per_s), share(part))
}

/// The answers that are one number each, with their names; errors are not among them.
pub(crate) fn key_figures(settings: &LoadSettings, results: &LoadResults) -> Vec<(&'static str, String)> {
    let mut figures = vec![
        ("operations", count(results.operations)),
        ("connections", count(results.connections)),
        ("elapsed", duration(results.elapsed_ns)),
        ("CPU per operation", duration(results.client_cpu_ns_per_operation)),
        ("syscalls/connection", calls(results.syscalls_per_connection)),
        ("engine", results.engine.clone()),
    ];
    // Flows of UDP have no end that the other side hears of.
    if settings.workload != "udp" {
        figures.push(("closed by", closer(&results.close).to_owned()));
    }
    figures.extend(results.strategy.iter().map(|strategy| ("ports chosen by", strategy.clone())));
    figures
}

/// With batches a connection costs less than one: `0.04`, where it is none: `0`.
fn calls(per_connection: f64) -> String {
    if per_connection == 0.0 { "0".to_owned() } else { quantity(per_connection) }
}

fn closer(close: &str) -> &str {
    match close {
        "client" => "client, FIN",
        "rst" => "client, RST",
        "server" => "server, FIN",
        other => other,
    }
}

/// `12 ECONNREFUSED`, the most frequent first.
pub(crate) fn errors(results: &LoadResults) -> Vec<String> {
    let mut errors: Vec<(&String, u64)> =
        results.errors.iter().map(|(name, number)| (name, *number)).collect();
    errors.sort_by_key(|(name, number)| (std::cmp::Reverse(*number), *name));
    errors.into_iter().map(|(name, number)| format!("{} {name}", count(number))).collect()
}

/// The parts of an operation that were timed, in the order in which they happen.
pub(crate) fn parts(results: &LoadResults) -> Vec<(&'static str, Quantiles)> {
    let latency = results.latency_ns;
    let parts = [
        ("late", results.late_ns),
        ("search", latency.search),
        ("handshake", latency.handshake),
        ("first byte", latency.first_byte),
        ("total", latency.total),
    ];
    parts.into_iter().filter(|(_, times)| times.samples > 0).collect()
}

/// `28,232 tuples`, `31 taken before`, ...
pub(crate) fn ports_words(ports: &LoadPorts) -> Vec<String> {
    let mut words = vec![
        format!("budget {}", plural(ports.budget, "tuple")),
        format!("{} taken before", count(ports.taken_before)),
    ];
    words.extend(ports.needed.map(|needed| format!("{} needed", count(needed))));
    words.push(format!("{} used", count(ports.used)));
    words.push(match ports.kept_ns {
        0 => "free once closed".to_owned(),
        kept => format!("kept for {} once closed", duration(kept)),
    });
    words
}

/// Whether the ports were to run out, and whether they did.
pub(crate) fn stall(ports: &LoadPorts) -> String {
    let length = duration(ports.stall_length_ns);
    match (ports.predicted_stall_ns, ports.stalled_ns) {
        (None, None) => "No stall predicted, none seen.".to_owned(),
        (Some(predicted), None) => {
            format!("A stall was predicted after {}; none was seen.", duration(predicted))
        }
        (None, Some(at)) => {
            format!("Stalled after {} for {length} in all; it was not predicted.", duration(at))
        }
        (Some(predicted), Some(at)) => {
            format!(
                "Stalled after {} for {length} in all; predicted after {}.",
                duration(at),
                duration(predicted)
            )
        }
    }
}

/// A moment of the run, to the millisecond: slow operations come in bursts.
pub(crate) fn moment(ns: u64) -> String {
    format!("{}.{:03}s", ns / SECOND_NS, ns % SECOND_NS / 1_000_000)
}

/// What became of the connections of `hold`.
pub(crate) fn held(held: &Held) -> String {
    let lost = match held.lost {
        0 => "none was lost".to_owned(),
        lost => format!("{} lost to the other side", count(lost)),
    };
    format!("{} held, opened within {}; {lost}.", plural(held.opened, "connection"), duration(held.ramp_ns))
}

const SECOND_NS: u64 = 1_000_000_000;

/// Seconds with their rate: the last one is cut by the end of the run, and left out when hardly begun.
pub(crate) fn rates(results: &LoadResults) -> impl Iterator<Item = (&Second, f64)> {
    results.seconds.iter().filter_map(|second| {
        let length = results.elapsed_ns.saturating_sub(second.at_ns).min(SECOND_NS);
        (length >= SECOND_NS / 5 || results.seconds.len() == 1)
            .then(|| (second, second.operations as f64 * SECOND_NS as f64 / length.max(1) as f64))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_quoted_when_a_shell_would_take_it_apart() {
        assert!(is_plain("http://127.0.0.1:8080/a_b-c.html"));
        for target in ["http://[::1]/?a=1", "unix:/run/my app", "http://h/$x", "http://h/a&b"] {
            assert!(!is_plain(target), "{target}");
        }
    }

    #[test]
    fn a_stall_is_told_with_its_prediction() {
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
            ports_words(&ports(None, None)),
            ["budget 1 tuple", "0 taken before", "1 used", "free once closed"]
        );
    }
}
