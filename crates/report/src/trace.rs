//! A trace in the words that the terminal and the page share.

use std::collections::BTreeMap;

use fourtuple_record::{Spread, TraceConnectResults, TraceConnectSettings, TraceTuple};

use crate::envelope::{plural, quoted, typed};
use crate::number::{count, duration, rate, share};

/// The tier of UDP.
pub(crate) const UDP_TIER: &str = "cgroup+tp_btf";

/// Which connects, in words.
pub(crate) fn details(settings: &TraceConnectSettings) -> Vec<String> {
    let TraceConnectSettings { protocol, process, name, destination, port, cgroup, for_ns, seed: _, tier } =
        settings;
    let mut words = Vec::new();
    words.extend(process.map(|process| format!("process {process}")));
    words.extend(name.as_ref().map(|name| format!("threads called {name}")));
    words.extend(destination.as_ref().map(|destination| format!("to {destination}")));
    words.extend(port.map(|port| format!("to port {port}")));
    words.extend(cgroup.as_ref().map(|cgroup| format!("cgroup {cgroup}")));
    if words.is_empty() {
        words.push(format!("every {} connect() of this host", protocol.to_uppercase()));
    } else if protocol != "tcp" {
        words.insert(0, protocol.to_uppercase());
    }
    words.extend(for_ns.map(|time| format!("for {} at most", duration(time))));
    words.extend((tier != "auto").then(|| format!("with tier {tier}")));
    words
}

/// What asks for the same again.
pub(crate) fn command_line(settings: &TraceConnectSettings) -> String {
    let TraceConnectSettings { protocol, process, name, destination, port, cgroup, for_ns, seed, tier } =
        settings;
    let option =
        |flag: &str, value: Option<String>| value.map_or(String::new(), |value| format!(" {flag} {value}"));
    format!(
        "fourtuple trace connect{}{}{}{}{}{}{}{} --seed {seed}",
        option("--protocol", (protocol != "tcp").then(|| protocol.clone())),
        option("--pid", process.map(|process| process.to_string())),
        option("--comm", name.as_deref().map(quoted)),
        option("--dst", destination.clone()),
        option("--port", port.map(|port| port.to_string())),
        option("--cgroup", cgroup.as_deref().map(quoted)),
        option("--for", for_ns.map(typed)),
        option("--tier", (tier != "auto").then(|| tier.clone())),
    )
}

/// How it was seen, and for how long.
pub(crate) fn facts(results: &TraceConnectResults) -> Vec<String> {
    let tier = match results.tier.as_str() {
        "tp_btf" => "tier tp_btf (stable tracepoints, by BTF)".to_owned(),
        "fexit" => "tier fexit (beginning and return of __inet_hash_connect)".to_owned(),
        "cgroup+tp_btf" => {
            "tier cgroup+tp_btf (programs of the root cgroup, and stable tracepoints by BTF)".to_owned()
        }
        other => format!("tier {other}"),
    };
    let mut facts = vec![tier];
    facts.extend(results.tier_reason.iter().map(|reason| format!("not the first tier: {reason}")));
    facts.push(format!("traced for {}", duration(results.elapsed_ns)));
    facts
}

/// The counts, with their names. What did not occur is left out, but for what was lost.
pub(crate) fn figures(results: &TraceConnectResults) -> Vec<(&'static str, String)> {
    let mut figures = vec![
        ("searches that found a port", count(results.searches)),
        ("searches per second", rate(results.searches_per_s)),
    ];
    // UDP establishes nothing.
    if results.tier != UDP_TIER {
        figures.push(("connections established", count(results.established)));
    }
    if results.given_port > 0 {
        figures.push(("connects from a bound port (no search)", count(results.given_port)));
    }
    if results.untimed > 0 {
        figures.push(("connections over IPv6 without a time", count(results.untimed)));
    }
    if results.switched > 0 && results.searches > 0 {
        let part = share(results.switched as f64 / results.searches as f64);
        figures.push((
            "searches with a context switch in between",
            format!("{} ({part})", count(results.switched)),
        ));
    }
    figures.push(("lost", count(results.lost)));
    figures
}

/// What was sampled for a flame graph, in words; absent without one.
pub(crate) fn flame(results: &TraceConnectResults) -> Option<String> {
    let flame = results.flame?;
    let mut words = format!(
        "Flame graph: of the time that these programs ran, {} was in connect() and {} in the search for a port ({}",
        share(flame.in_connect),
        share(flame.in_search),
        plural(flame.samples, "sample"),
    );
    if flame.lost > 0 {
        words += &format!(", {} lost", count(flame.lost));
    }
    Some(words + ")")
}

/// `EADDRNOTAVAIL 3, closed 1`; empty without failures.
pub(crate) fn failures(failed: &BTreeMap<String, u64>) -> String {
    let words: Vec<String> =
        failed.iter().map(|(name, number)| format!("{name} {}", count(*number))).collect();
    words.join(", ")
}

/// The times that there are, with their names.
pub(crate) fn times(results: &TraceConnectResults) -> Vec<(&'static str, Spread)> {
    let search = &results.search_ns;
    [
        ("search, all ports", search.all),
        ("search, even ports", search.even),
        ("search, odd ports", search.odd),
        ("search, found none", results.failed_search_ns),
        ("handshake", results.handshake_ns),
    ]
    .into_iter()
    .filter_map(|(name, times)| Some((name, times?)))
    .collect()
}

/// Searches by time, four steps to a factor of ten: shortest time, even, odd. Without gaps between the ends.
pub(crate) fn histogram(results: &TraceConnectResults) -> Vec<(u64, u64, u64)> {
    let step_of = |ns: u64| ((ns.max(1) as f64).log10() * 4.0 + 1e-9).floor() as i32;
    let mut steps: BTreeMap<i32, (u64, u64)> = BTreeMap::new();
    for step in &results.histogram {
        let sums = steps.entry(step_of(step.from_ns)).or_default();
        *sums = (sums.0.saturating_add(step.even), sums.1.saturating_add(step.odd));
    }
    let (Some((&first, _)), Some((&last, _))) = (steps.first_key_value(), steps.last_key_value()) else {
        return Vec::new();
    };
    (first..=last)
        .map(|step| {
            let (even, odd) = steps.get(&step).copied().unwrap_or_default();
            (10_f64.powf(f64::from(step) / 4.0).round() as u64, even, odd)
        })
        .collect()
}

/// `14,900 of 15,000 (99.3%)`, or a dash.
pub(crate) fn fill(tuple: &TraceTuple) -> String {
    match (tuple.in_use, tuple.range, tuple.fill) {
        (Some(used), Some(range), Some(fill)) => {
            format!("{} of {} ({})", count(used.into()), count(range.into()), share(fill))
        }
        _ => "-".to_owned(),
    }
}

/// What stands below the tables of processes and destinations that were cut.
pub(crate) fn more(shown: usize, all: usize) -> Option<String> {
    (all > shown).then(|| format!("and {} more, which the JSON has", plural((all - shown) as u64, "pair")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_in_particular_is_everybody() {
        let settings = TraceConnectSettings {
            protocol: "tcp".into(),
            process: None,
            name: None,
            destination: None,
            port: None,
            cgroup: None,
            for_ns: None,
            seed: 1,
            tier: "auto".into(),
        };
        assert_eq!(details(&settings), ["every TCP connect() of this host"]);
        assert_eq!(command_line(&settings), "fourtuple trace connect --seed 1");
        let settings = TraceConnectSettings { tier: "fexit".into(), ..settings };
        assert_eq!(details(&settings), ["every TCP connect() of this host", "with tier fexit"]);
        assert_eq!(command_line(&settings), "fourtuple trace connect --tier fexit --seed 1");
        let settings = TraceConnectSettings { protocol: "udp".into(), tier: "auto".into(), ..settings };
        assert_eq!(details(&settings), ["every UDP connect() of this host"]);
        assert_eq!(command_line(&settings), "fourtuple trace connect --protocol udp --seed 1");
        let settings = TraceConnectSettings { process: Some(7), ..settings };
        assert_eq!(details(&settings), ["UDP", "process 7"]);
    }
}
