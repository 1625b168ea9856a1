//! Connection tracking.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use fourtuple_record::snapshot::{Conntrack, Counter, Translated};

use crate::snapshot::counters::since;
use crate::snapshot::reading::text;
use crate::sysctl;

/// Reads the table of nf_conntrack. A host without the module tracks nothing: its table is empty and has no limit.
pub(super) fn read(
    root: &Path,
    before: &BTreeMap<String, u64>,
    is_first: bool,
    now: &mut BTreeMap<String, u64>,
) -> Result<Conntrack, String> {
    let number = |name| sysctl(root, name).and_then(|text| text.parse::<u64>().ok());
    if !root.join("proc/sys/net/netfilter/nf_conntrack_count").exists() {
        return Ok(Conntrack::default());
    }
    let count =
        number("net.netfilter.nf_conntrack_count").ok_or("cannot read net.netfilter.nf_conntrack_count")?;
    let limit =
        number("net.netfilter.nf_conntrack_max").ok_or("cannot read net.netfilter.nf_conntrack_max")?;
    // A kernel without CONFIG_NF_CONNTRACK_PROCFS has no counters.
    if let Ok(counters) = text(root, "proc/thread-self/net/stat/nf_conntrack") {
        parse(&counters, now);
    }
    let counters = now.iter().map(|(name, &total)| (name.clone(), since(before.get(name), total, is_first)));
    let counters: BTreeMap<String, Counter> = counters.collect();
    let failed = counters.get("insert_failed").is_some_and(|counter| counter.during > 0);
    // A pass over the table takes about 2 us an entry.
    let translated = failed.then(|| text(root, "proc/thread-self/net/nf_conntrack").ok()).flatten();
    Ok(Conntrack { count, limit, counters, translated: translated.map(|table| sources(&table)) })
}

/// Maximum number of source addresses and destinations that are listed.
const MAX_TRANSLATED: usize = 5;

/// Returns the source addresses of SNAT and the destinations with the most ports, from the lines of the table.
fn sources(table: &str) -> Vec<Translated> {
    let mut found: BTreeMap<(IpAddr, SocketAddr, &str), BTreeSet<u16>> = BTreeMap::new();
    for line in table.lines() {
        let Some((key, port)) = translated(line) else { continue };
        found.entry(key).or_default().insert(port);
    }
    let listed = found.into_iter().filter_map(|((source, destination, protocol), ports)| {
        let (low, high) = (*ports.first()?, *ports.last()?);
        let protocol = protocol.to_owned();
        Some(Translated { source, destination, protocol, ports: ports.len() as u32, low, high })
    });
    let mut listed: Vec<Translated> = listed.collect();
    listed.sort_by_key(|found| (Reverse(found.ports), found.source, found.destination));
    listed.truncate(MAX_TRANSLATED);
    listed
}

/// Parses a line. A connection has the tuple of its packets and the tuple of the answers: with SNAT the answers go to another address
/// than the packets come from.
fn translated(line: &str) -> Option<((IpAddr, SocketAddr, &str), u16)> {
    let protocol = line.split_whitespace().nth(2).filter(|protocol| matches!(*protocol, "tcp" | "udp"))?;
    let values = |name: &str| {
        let mut words =
            line.split_whitespace().filter_map(move |word| word.strip_prefix(name)?.strip_prefix('='));
        Some((words.next()?, words.next()?))
    };
    let (source, server) = values("src")?;
    let (_, answer_to) = values("dst")?;
    let (_, server_port) = values("sport")?;
    let (_, answer_port) = values("dport")?;
    let key =
        (answer_to.parse().ok()?, SocketAddr::new(server.parse().ok()?, server_port.parse().ok()?), protocol);
    (source != answer_to).then_some((key, answer_port.parse().ok()?))
}

/// Parses a line of names and a line of hexadecimal numbers for each processor.
fn parse(text: &str, into: &mut BTreeMap<String, u64>) {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap_or_default().split_whitespace().collect();
    for line in lines {
        for (name, value) in names.iter().zip(line.split_whitespace()) {
            let value = u64::from_str_radix(value, 16).unwrap_or(0);
            // The number of entries is the same on each line and no counter.
            if *name != "entries" {
                *into.entry((*name).to_owned()).or_default() += value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn translated_sources_are_summed() {
        let line = |from: &str, port: u16, to: &str| {
            format!(
                "ipv4     2 tcp      6 117 SYN_SENT src={from} dst=10.0.0.2 sport=4{port} dport=4000 src=10.0.0.2 dst={to} sport=4000 dport={port} mark=0 use=2\n"
            )
        };
        let table = line("172.30.0.2", 30_001, "10.0.0.1")
            + &line("172.30.0.3", 30_009, "10.0.0.1")
            + &line("172.30.0.3", 30_009, "10.0.0.1")
            + &line("10.0.0.1", 41_000, "10.0.0.1")
            + "ipv4 2 icmp 1 29 src=10.0.0.1 dst=10.0.0.2 type=8 code=0 id=7 src=10.0.0.2 dst=10.0.0.1 type=0 code=0 id=7\n";
        let expected = Translated {
            source: [10, 0, 0, 1].into(),
            destination: ([10, 0, 0, 2], 4000).into(),
            protocol: "tcp".to_owned(),
            ports: 2,
            low: 30_001,
            high: 30_009,
        };
        assert_eq!(sources(&table), [expected]);
    }

    #[test]
    fn counters_are_summed_over_the_processors() {
        let mut counters = BTreeMap::new();
        parse(
            "entries  clashres insert_failed\n0000000a  00000001 0000000f\n0000000a  00000000 00000001\n",
            &mut counters,
        );
        assert_eq!((counters["clashres"], counters["insert_failed"], counters.len()), (1, 16, 2));
    }
}
