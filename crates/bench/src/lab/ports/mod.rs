//! `lab ports`: measures the cost of connect() under each port strategy, from an empty table to a full table.
//!
//! Published: Cloudflare, "connect() - why are you so slow?", figures 5, 7, 8 and its table of windows.

mod fill;

use std::num::NonZeroU16;

use fourtuple::dial::Strategy;
use fourtuple::ports::PortRange;
use fourtuple_record::measure::words::{counted, grouped};
use fourtuple_record::{PortsResults, PortsSettings, Remark, StrategyResult, format_duration};
use fourtuple_syscalls::socket::Transport;

use crate::lab::namespace::{Family, Namespace};
use crate::lab::{LabError, Watch};

/// The lowest port that net.ipv4.ip_local_port_range may begin with: lower ports are privileged
/// (`ipv4_local_port_range` refuses a range that reaches below net.ipv4.ip_unprivileged_port_start).
pub(crate) const FIRST_PORT: u16 = 1024;

/// Widths of the windows in the published table.
pub const PUBLISHED_WIDTHS: [u16; 4] = [500, 1_000, 5_000, 10_000];

/// Returns a random window as published: one try and no fallback.
pub fn as_published(width: NonZeroU16) -> Strategy {
    Strategy::RandomWindow { width, tries: NonZeroU16::MIN, then_full_range: false }
}

/// Settings that were checked, with the values that their texts name.
struct Checked<'a> {
    settings: &'a PortsSettings,
    range: PortRange,
    strategies: Vec<Strategy>,
    transport: Transport,
    family: Family,
}

/// Checks the settings, without system calls.
pub fn check(settings: &PortsSettings) -> Result<(), LabError> {
    Checked::new(settings).map(drop)
}

/// Runs every strategy, each in a namespace of its own; odd repeats run in the reverse order (A B B A).
pub fn run(settings: &PortsSettings, watch: &Watch<'_>) -> Result<(PortsResults, Vec<Remark>), LabError> {
    let checked = Checked::new(settings)?;
    let mut results = PortsResults { tuples: settings.tuples(), strategies: Vec::new(), advice: Vec::new() };
    let mut remarks = Vec::new();
    'repeats: for repeat in 1..=settings.repeats {
        let mut order: Vec<Strategy> = checked.strategies.clone();
        if repeat % 2 == 0 {
            order.reverse();
        }
        for strategy in order {
            watch.progress.begin(&part(strategy, repeat, settings.repeats), settings.dials());
            let run = Namespace::run(|namespace| fill::fill(&checked, strategy, repeat, namespace, watch));
            let run = match run {
                Ok(run) => run,
                // The results of earlier runs are kept.
                Err(error) if !results.strategies.is_empty() => {
                    remarks.push(Remark::new("failed", format!("{strategy} failed: {error}")));
                    break 'repeats;
                }
                Err(error) => return Err(error),
            };
            let cut = run.dials < settings.dials();
            if run.dials > 0 {
                results.strategies.push(run);
            }
            if cut {
                remarks.push(Remark::new(
                    "interrupted",
                    format!(
                        "interrupted during {strategy}: it is cut short, and what should follow is missing"
                    ),
                ));
                break 'repeats;
            }
        }
    }
    results.advice = advice(&results, checked.transport);
    Ok((results, remarks))
}

fn part(strategy: Strategy, repeat: u32, repeats: u32) -> String {
    if repeats == 1 { strategy.to_string() } else { format!("{strategy} ({repeat}/{repeats})") }
}

impl Checked<'_> {
    fn new(settings: &PortsSettings) -> Result<Checked<'_>, LabError> {
        let refuse = |setting, value: String, accepted: &str| {
            Err(LabError::Setting { setting, value, accepted: accepted.to_owned() })
        };
        let range = match PortRange::new(settings.low, settings.high) {
            Ok(range) if range.low() >= FIRST_PORT && range.len() >= 8 => range,
            _ => {
                return refuse(
                    "range",
                    format!("{}-{}", settings.low, settings.high),
                    "accepted are ranges of at least 8 ports from port 1024 on (the kernel takes no lower ones)",
                );
            }
        };
        if !(settings.fill > 0.0 && settings.fill <= 1.0) {
            return refuse("fill", settings.fill.to_string(), "accepted is a share above 0 and up to 1");
        }
        LabError::unless_within("sources", settings.sources, 1..=1024)?;
        let transport = match settings.protocol.as_str() {
            "tcp" => Transport::Tcp,
            "udp" => Transport::Udp,
            other => return refuse("protocol", other.to_owned(), "accepted are tcp and udp"),
        };
        let family = match settings.family {
            4 => Family::V4,
            6 => Family::V6,
            other => return refuse("family", other.to_string(), "accepted are 4 and 6"),
        };
        if transport == Transport::Udp && settings.sources > 1 {
            return refuse(
                "sources",
                settings.sources.to_string(),
                "UDP is measured from 1 source: its sockets share no ports anyway",
            );
        }
        LabError::unless_within("repeats", settings.repeats, 1..=100)?;
        let strategies = LabError::named("strategy", &settings.strategies, |name| match name.parse() {
            Ok(Strategy::RandomWindow { width, .. }) if settings.windows => Some(as_published(width)),
            named => named.ok(),
        })?;
        Ok(Checked { settings, range, strategies, transport, family })
    }
}

/// Ratio of a rate to that of the default from which advice names a strategy.
const PAYS: f64 = 1.1;

/// Returns advice: what the results show about this kernel, and what to set.
pub fn advice(results: &PortsResults, transport: Transport) -> Vec<String> {
    match transport {
        Transport::Tcp => tcp(results),
        Transport::Udp => udp(results),
    }
}

fn udp(results: &PortsResults) -> Vec<String> {
    let mut lines = failures(results);
    if let Some(run) = results.strategies.iter().find(|run| run.strategy == "kernel-default")
        && let (Some(even), Some(odd)) = (run.connect_ns.even, run.connect_ns.odd)
    {
        lines.insert(
            0,
            format!(
                "The kernel does not search UDP ports by parity: bind() and connect() take {} on average for even ports and {} for \
                 odd ports. A UDP socket holds its port towards every destination, so at most {} can exist; \
                 fourtuple::dial::UdpDialer can share a port among destinations (Sharing::Shared).",
                format_duration(even.mean),
                format_duration(odd.mean),
                counted(results.tuples, "socket")
            ),
        );
    }
    lines
}

fn tcp(results: &PortsResults) -> Vec<String> {
    let find = |name: &str| results.strategies.iter().find(|run| run.strategy == name);
    let mut lines = Vec::new();
    if let Some(run) = find("kernel-default")
        && let (Some(even), Some(odd)) = (run.connect_ns.even, run.connect_ns.odd)
    {
        let (slow, fast, ports) =
            if odd.mean > even.mean { (odd, even, "odd ports") } else { (even, odd, "even ports") };
        if slow.mean > 2 * fast.mean {
            lines.push(format!(
                "By default this kernel searches one half of the range first, the ports of one parity: connect() takes {} on \
                 average for the first {} to one destination, and {} for the others ({}).",
                format_duration(fast.mean),
                counted(fast.count, "connection"),
                format_duration(slow.mean),
                ports
            ));
        } else {
            lines.push(format!(
                "By default connect() takes {} on average on this kernel, without a slow second half of the range at this fill.",
                format_duration(run.connect_ns.all.map_or(0, |all| all.mean))
            ));
        }
    }
    // Without the default there is nothing that a strategy could be better than.
    let Some(default) = find("kernel-default") else {
        lines.extend(failures(results));
        return lines;
    };
    let best = results
        .strategies
        .iter()
        .filter(|run| run.failed() == 0 && run.connections > 0)
        .max_by(|a, b| a.rate_per_s.total_cmp(&b.rate_per_s));
    if let Some(best) = best.filter(|best| best.rate_per_s >= PAYS * default.rate_per_s) {
        lines.push(format!(
            "{} opens the same connections at {:.1} times the rate of the default, without an error.",
            best.strategy,
            best.rate_per_s / default.rate_per_s.max(1e-9)
        ));
        lines.push(
            "Programs that you do not write: `fourtuple run -- PROGRAM` starts one with such a search, and `fourtuple fix ports --pid \
             PID` gives it to one that runs."
                .to_owned(),
        );
        if find("full-range").is_some_and(is_linear) {
            lines.push(
                "Your own programs: setsockopt(fd, SOL_IP, IP_LOCAL_PORT_RANGE (51), &(uint32_t){0xFFFF0000}, 4) on every socket \
                 before connect() asks for the full range and makes the search linear; bind(source, 0) needs \
                 IP_BIND_ADDRESS_NO_PORT (24) first. In Rust: fourtuple::dial::Dialer, whose default is auto."
                    .to_owned(),
            );
        } else if find("full-range").is_some() {
            lines.push(
                "Your own programs: this kernel has IP_LOCAL_PORT_RANGE but searches by parity within it; give each socket a random \
                 window of about 500 ports, and the full range after two full windows. fourtuple::dial::Dialer does so by default \
                 (auto)."
                    .to_owned(),
            );
        }
    }
    lines.extend(failures(results));
    lines
}

/// Returns a line for each strategy that failed while ports were free, over all of its repeats.
fn failures(results: &PortsResults) -> Vec<String> {
    let mut by_strategy: Vec<(&str, Vec<&StrategyResult>)> = Vec::new();
    for run in results.strategies.iter().filter(|run| run.strategy != "kernel-default") {
        match by_strategy.iter_mut().find(|(strategy, _)| *strategy == run.strategy) {
            Some((_, runs)) => runs.push(run),
            None => by_strategy.push((&run.strategy, vec![run])),
        }
    }
    by_strategy
        .into_iter()
        .filter_map(|(strategy, runs)| {
            let failed = runs.iter().map(|run| run.failed());
            let (least, most) = (failed.clone().min()?, failed.max()?);
            let number = match least == most {
                true => grouped(most),
                false => format!("{} to {}", grouped(least), grouped(most)),
            };
            (most > 0).then(|| {
                format!(
                    "{strategy} failed {number} of {} dials although ports were free.",
                    grouped(runs[0].dials)
                )
            })
        })
        .collect()
}

/// Returns whether the first half of a run took ports of both parities; a search by parity takes only one parity first. Looks
/// at the ports, not at the connect times, which vary on a busy host.
fn is_linear(run: &StrategyResult) -> bool {
    let first_half = || run.scatter.iter().flat_map(|scatter| scatter.dots().take(run.dials as usize / 2));
    first_half().any(|dot| !dot.failed && dot.odd) && first_half().any(|dot| !dot.failed && !dot.odd)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use fourtuple_record::{ByParity, Scatter};

    use super::*;

    fn run(strategy: &str, failed: u64) -> StrategyResult {
        StrategyResult {
            strategy: strategy.to_owned(),
            chosen: None,
            repeat: 1,
            dials: 100,
            connections: 100 - failed,
            retries: 0,
            errors: BTreeMap::from([("EADDRNOTAVAIL".to_owned(), failed)]),
            elapsed_ns: 1,
            rate_per_s: 1.0,
            cpu_ns_per_dial: 1,
            connect_ns: ByParity::default(),
            by_fill: Vec::new(),
            floor_ns: 1,
            scatter: None,
        }
    }

    #[test]
    fn ports_alone_tell_linear_search_from_search_by_parity() {
        let with = |odd: fn(u64) -> bool, time: fn(u64) -> u64| {
            let mut scatter = Scatter::default();
            (0..100).for_each(|dial| scatter.push(time(dial), odd(dial), false));
            StrategyResult { scatter: Some(scatter), ..run("full-range", 0) }
        };
        assert!(is_linear(&with(|dial| dial % 3 == 0, |dial| if dial % 3 == 0 { 900_000 } else { 9_000 })));
        assert!(!is_linear(&with(|dial| dial >= 50, |_| 9_000)));
    }

    fn timed(strategy: &str, rate_per_s: f64) -> StrategyResult {
        let mut scatter = Scatter::default();
        (0..100).for_each(|dial| scatter.push(9_000, dial % 3 == 0, false));
        StrategyResult { rate_per_s, scatter: Some(scatter), ..run(strategy, 0) }
    }

    #[test]
    fn advice_needs_a_comparison_and_a_gain() {
        let of = |strategies: Vec<StrategyResult>| {
            tcp(&PortsResults { tuples: 100, strategies, advice: Vec::new() }).join("\n")
        };
        let better = of(vec![timed("kernel-default", 10.0), timed("full-range", 1_000.0)]);
        for part in [
            "full-range opens the same connections at 100.0 times",
            "fourtuple run -- ",
            "fix ports --pid",
            "(51)",
        ] {
            assert!(better.contains(part), "{part}: {better}");
        }
        assert_eq!(of(vec![timed("full-range", 1_000.0)]), "", "nothing to compare with");
        assert_eq!(of(vec![timed("kernel-default", 1_000.0), timed("full-range", 1_050.0)]), "", "no gain");
    }

    #[test]
    fn failures_have_one_line_per_strategy() {
        let strategies = vec![run("random-window:500", 7), run("auto", 0), run("random-window:500", 3)];
        let results = PortsResults { tuples: 100, strategies, advice: Vec::new() };
        let line = "random-window:500 failed 3 to 7 of 100 dials although ports were free.";
        assert_eq!(failures(&results), [line]);
    }
}
