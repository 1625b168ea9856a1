//! The counters of TCP, UDP and IP, and of queueing disciplines.

use std::collections::BTreeMap;
use std::path::Path;

use fourtuple_record::snapshot::Counter;
use fourtuple_syscalls::qdisc;

use crate::snapshot::reading::text;

/// Counters by `GROUP.NAME`.
pub(super) type Totals = BTreeMap<String, u64>;

/// Returns all counters of the calling thread's network namespace that the kernel has in /proc/net, by `GROUP.NAME`, and the packets and
/// drops of queueing disciplines, `qdisc.DEVICE.KIND.drops`.
///
/// # Errors
///
/// The file and the error as text.
pub fn counter_totals(root: &Path) -> Result<BTreeMap<String, u64>, String> {
    let mut now = Totals::new();
    // /proc/net belongs to the process's first thread; this thread may be in another namespace.
    for path in ["proc/thread-self/net/netstat", "proc/thread-self/net/snmp"] {
        parse(&text(root, path)?, &mut now);
    }
    // A kernel without IPv6 has no such file.
    parse_ipv6(&text(root, "proc/thread-self/net/snmp6").unwrap_or_default(), &mut now);
    parse_softnet(&text(root, "proc/thread-self/net/softnet_stat").unwrap_or_default(), &mut now);
    // Needs no right; a host that refuses netlink shows no sockets either.
    for (device, qdisc) in qdisc::all().unwrap_or_default() {
        let name = |what: &str| format!("qdisc.{device}.{}.{what}", qdisc.kind);
        now.extend([(name("packets"), qdisc.packets), (name("drops"), qdisc.drops)]);
    }
    Ok(now)
}

/// Reads the counters, and compares them with the reading before.
pub(super) fn read(
    root: &Path,
    before: &Totals,
    is_first: bool,
    now: &mut Totals,
) -> Result<BTreeMap<String, Counter>, String> {
    *now = counter_totals(root)?;
    Ok(now.iter().map(|(name, &total)| (name.clone(), since(before.get(name), total, is_first))).collect())
}

/// Returns a counter with its events since the reading before.
pub(super) fn since(before: Option<&u64>, total: u64, is_first: bool) -> Counter {
    let during = if is_first { 0 } else { total.saturating_sub(before.copied().unwrap_or(0)) };
    Counter { total, during }
}

/// Parses pairs of lines: the names of a group, then the values of the group.
fn parse(text: &str, into: &mut Totals) {
    let mut lines = text.lines();
    while let (Some(names), Some(values)) = (lines.next(), lines.next()) {
        let Some((group, names)) = names.split_once(':') else { continue };
        let Some((_, values)) = values.split_once(':') else { continue };
        for (name, value) in names.split_whitespace().zip(values.split_whitespace()) {
            // Tcp.MaxConn is -1.
            into.extend(value.parse().ok().map(|value| (format!("{group}.{name}"), value)));
        }
    }
}

/// Parses lines of a name and a value: `Udp6InErrors 3` is `Udp6.InErrors`, `Ip6InDiscards 1` is `Ip6.InDiscards`.
fn parse_ipv6(text: &str, into: &mut Totals) {
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some(name), Some(Ok(value))) = (words.next(), words.next().map(str::parse)) else { continue };
        let group = ["Udp6", "Ip6", "Icmp6"].into_iter().find(|group| name.starts_with(group));
        let Some(group) = group else { continue };
        into.insert(format!("{group}.{}", &name[group.len()..]), value);
    }
}

/// Adds the columns of a line for each processor, in hexadecimal (softnet_seq_show): packets that met a full queue, and packets that the
/// flow limit dropped. They belong to the whole host.
fn parse_softnet(text: &str, into: &mut Totals) {
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        for (column, name) in [(1, "dropped"), (10, "flow_limit_count")] {
            let value = words.get(column).and_then(|word| u64::from_str_radix(word, 16).ok());
            if let Some(value) = value {
                *into.entry(format!("softnet.{name}")).or_default() += value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_belongs_to_the_name_above() {
        let mut totals = Totals::new();
        parse("TcpExt: A B C\nTcpExt: 1 2 3\nTcp: MaxConn InSegs\nTcp: -1 7\n", &mut totals);
        parse_ipv6("Ip6InReceives  \t9\nUdp6InErrors\t3\n", &mut totals);
        assert_eq!((totals.remove("Udp6.InErrors"), totals.remove("Ip6.InReceives")), (Some(3), Some(9)));
        parse_softnet("10 2 0 0 0 0 0 0 0 0 1\n10 1f 0 0 0 0 0 0 0 0 0\n", &mut totals);
        assert_eq!(
            (totals.remove("softnet.dropped"), totals.remove("softnet.flow_limit_count")),
            (Some(33), Some(1))
        );
        assert_eq!((totals["TcpExt.B"], totals["Tcp.InSegs"], totals.len()), (2, 7, 4));
        assert_eq!(since(Some(&5), 7, false), Counter { total: 7, during: 2 });
        assert_eq!(since(None, 7, true), Counter { total: 7, during: 0 });
    }
}
