//! Connection tracking.

use std::collections::BTreeMap;
use std::path::Path;

use fourtuple_record::snapshot::Conntrack;

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
    Ok(Conntrack { count, limit, counters: counters.collect() })
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
    fn counters_are_summed_over_the_processors() {
        let mut counters = BTreeMap::new();
        parse(
            "entries  clashres insert_failed\n0000000a  00000001 0000000f\n0000000a  00000000 00000001\n",
            &mut counters,
        );
        assert_eq!((counters["clashres"], counters["insert_failed"], counters.len()), (1, 16, 2));
    }
}
