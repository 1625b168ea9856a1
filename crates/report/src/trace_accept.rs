//! A trace of accepts in the words that the terminal and the page share.

use std::collections::BTreeMap;

use fourtuple_record::{Spread, TraceAcceptResults, TraceAcceptSettings, TraceListener};

use crate::envelope::{plural, quoted, typed};
use crate::number::{NOTHING, count, duration, quantity, rate};

/// Which accepts, in words.
pub(crate) fn details(settings: &TraceAcceptSettings) -> Vec<String> {
    let TraceAcceptSettings { process, name, listen, port, cgroup, for_ns } = settings;
    let mut words = Vec::new();
    words.extend(process.map(|process| format!("process {process}")));
    words.extend(name.as_ref().map(|name| format!("threads called {name}")));
    words.extend(listen.as_ref().map(|listen| format!("listeners at {listen}")));
    words.extend(port.map(|port| format!("at port {port}")));
    words.extend(cgroup.as_ref().map(|cgroup| format!("cgroup {cgroup}")));
    if words.is_empty() {
        words.push("every TCP accept() of this host".to_owned());
    }
    words.extend(for_ns.map(|time| format!("for {} at most", duration(time))));
    words
}

/// What asks for the same again.
pub(crate) fn command_line(settings: &TraceAcceptSettings) -> String {
    let TraceAcceptSettings { process, name, listen, port, cgroup, for_ns } = settings;
    let option =
        |flag: &str, value: Option<String>| value.map_or(String::new(), |value| format!(" {flag} {value}"));
    format!(
        "fourtuple trace accept{}{}{}{}{}{}",
        option("--pid", process.map(|process| process.to_string())),
        option("--comm", name.as_deref().map(quoted)),
        option("--listen", listen.clone()),
        option("--port", port.map(|port| port.to_string())),
        option("--cgroup", cgroup.as_deref().map(quoted)),
        option("--for", for_ns.map(typed)),
    )
}

/// How it was seen, and for how long.
pub(crate) fn facts(results: &TraceAcceptResults) -> Vec<String> {
    let tier = match results.tier.as_str() {
        "tp_btf" => "tier tp_btf (stable tracepoints, by BTF)".to_owned(),
        other => format!("tier {other}"),
    };
    vec![tier, format!("traced for {}", duration(results.elapsed_ns))]
}

/// The counts, with their names. What did not occur is left out, but for what was lost.
pub(crate) fn figures(results: &TraceAcceptResults) -> Vec<(&'static str, String)> {
    let mut figures = vec![
        ("connections accepted", count(results.accepts)),
        ("accepts per second", rate(results.accepts_per_s)),
    ];
    let perhaps = [
        ("accepted from before the trace", results.earlier),
        ("accept() that found nothing (EAGAIN)", results.empty),
        ("threads woken for nothing", results.woken_for_nothing),
    ];
    figures.extend(
        perhaps.into_iter().filter(|(_, number)| *number > 0).map(|(name, number)| (name, count(number))),
    );
    figures.push(("lost", count(results.lost)));
    figures
}

/// The times that there are, with their names.
pub(crate) fn times(results: &TraceAcceptResults) -> Vec<(&'static str, Spread)> {
    [("handshake (SYN-ACK to ACK)", results.handshake_ns), ("wait in the accept queue", results.wait_ns)]
        .into_iter()
        .filter_map(|(name, times)| Some((name, times?)))
        .collect()
}

/// Accepts by time of wait, four steps to a factor of ten: shortest time, accepts. Without gaps between the ends.
pub(crate) fn histogram(results: &TraceAcceptResults) -> Vec<(u64, u64)> {
    let step_of = |ns: u64| ((ns.max(1) as f64).log10() * 4.0 + 1e-9).floor() as i32;
    let mut steps: BTreeMap<i32, u64> = BTreeMap::new();
    for step in &results.histogram {
        let sum = steps.entry(step_of(step.from_ns)).or_default();
        *sum = sum.saturating_add(step.count);
    }
    let (Some((&first, _)), Some((&last, _))) = (steps.first_key_value(), steps.last_key_value()) else {
        return Vec::new();
    };
    (first..=last)
        .map(|step| {
            let number = steps.get(&step).copied().unwrap_or_default();
            (10_f64.powf(f64::from(step) / 4.0).round() as u64, number)
        })
        .collect()
}

/// A listener with what tells it from others at the same address.
pub(crate) fn title(listener: &TraceListener) -> String {
    let mut title = listener.address.clone();
    if listener.group > 0 {
        // As `ss -e` has it.
        title.push_str(&format!(" sk:{:x}, of a group of {}", listener.cookie, listener.group));
    }
    title.push_str(&format!(", netns {}", listener.namespace));
    if listener.closed {
        title.push_str(", closed");
    }
    title
}

/// What is known of a listener, in short sentences. What did not occur is left out.
pub(crate) fn of_listener(listener: &TraceListener) -> Vec<String> {
    let depth = &listener.depth;
    let mut words = vec![
        format!("{} accepted of {} queued", count(listener.accepts), count(listener.queued)),
        format!(
            "depth of the queue {} on average, {} at most, backlog {}",
            quantity(depth.mean),
            count(depth.max.into()),
            count(depth.backlog.into())
        ),
    ];
    let perhaps = [
        (depth.full, "times full"),
        (listener.other_accepts, "accepted by others"),
        (listener.retried_handshakes, "handshakes with a repeated SYN-ACK"),
        (listener.other_drops, "packets dropped for other reasons"),
        (listener.never_accepted, "gone before they were accepted"),
        (listener.closed_first, "closed by the workers first (TIME_WAIT here)"),
        (listener.closed_by_peer, "closed by the peer first"),
        (listener.reset, "reset"),
    ];
    words.extend(
        perhaps
            .into_iter()
            .filter(|(number, _)| *number > 0)
            .map(|(number, what)| format!("{} {what}", count(number))),
    );
    if listener.workers.len() > 1 {
        words.push(format!("Jain's index of the workers {}", index(listener.jain)));
    }
    words
}

/// `3 packets dropped ...`; nothing where none were.
pub(crate) fn overflow(listener: &TraceListener) -> Option<String> {
    (listener.overflows > 0).then(|| {
        format!(
            "{} dropped because the queue was full ({} of them final ACKs): accept() is too slow, or the backlog too short",
            plural(listener.overflows, "packet"),
            count(listener.overflow_acks)
        )
    })
}

/// Three decimals, as for servers.
fn index(jain: Option<f64>) -> String {
    match jain {
        Some(jain) if jain.is_finite() => format!("{jain:.3}"),
        _ => NOTHING.to_owned(),
    }
}

/// What stands below rows that were cut.
pub(crate) fn more(shown: usize, all: usize, what: &str) -> Option<String> {
    (all > shown).then(|| format!("and {} more, which the JSON has", plural((all - shown) as u64, what)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_in_particular_is_everybody() {
        let settings = TraceAcceptSettings {
            process: None,
            name: None,
            listen: None,
            port: None,
            cgroup: None,
            for_ns: None,
        };
        assert_eq!(details(&settings), ["every TCP accept() of this host"]);
        assert_eq!(command_line(&settings), "fourtuple trace accept");
    }
}
