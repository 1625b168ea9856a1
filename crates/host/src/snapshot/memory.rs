//! TCP as a whole.

use std::path::Path;

use fourtuple_record::snapshot::TcpMemory;

use crate::snapshot::reading::text;

pub(super) fn read(root: &Path) -> Result<TcpMemory, String> {
    let sockstat = text(root, "proc/thread-self/net/sockstat")?;
    let line = sockstat.lines().find_map(|line| line.strip_prefix("TCP: "));
    let line = line.ok_or("/proc/net/sockstat: no line about TCP")?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let value = |name: &str| words.chunks_exact(2).find(|pair| pair[0] == name)?[1].parse().ok();
    let limits = text(root, "proc/sys/net/ipv4/tcp_mem").unwrap_or_default();
    let limits: Vec<u64> = limits.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    Ok(TcpMemory {
        orphans: value("orphan").unwrap_or(0),
        time_wait: value("tw").unwrap_or(0),
        pages: value("mem").unwrap_or(0),
        limits_pages: <[u64; 3]>::try_from(limits).unwrap_or_default(),
    })
}
