//! The counters of TCP, UDP and IP.

use std::collections::BTreeMap;
use std::path::Path;

use fourtuple_record::snapshot::Counter;

use super::text;

/// Counters by `GROUP.NAME`.
pub(super) type Totals = BTreeMap<String, u64>;

/// Reads the counters, and compares them with those of the reading before.
pub(super) fn read(
    root: &Path,
    before: &Totals,
    is_first: bool,
    now: &mut Totals,
) -> Result<BTreeMap<String, Counter>, String> {
    // /proc/net is that of the process's first thread; this thread may be in another namespace.
    for path in ["proc/thread-self/net/netstat", "proc/thread-self/net/snmp"] {
        parse(&text(root, path)?, now);
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_belongs_to_the_name_above() {
        let mut totals = Totals::new();
        parse("TcpExt: A B C\nTcpExt: 1 2 3\nTcp: MaxConn InSegs\nTcp: -1 7\n", &mut totals);
        assert_eq!((totals["TcpExt.B"], totals["Tcp.InSegs"], totals.len()), (2, 7, 4));
        assert_eq!(since(Some(&5), 7, false), Counter { total: 7, during: 2 });
        assert_eq!(since(None, 7, true), Counter { total: 7, during: 0 });
    }
}
