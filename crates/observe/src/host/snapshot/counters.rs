//! The counters of TCP, UDP and IP, and of queueing disciplines.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::path::Path;

use fourtuple_record::snapshot::{
    Conntrack, Counter, Translated, UdpSocketView, UdpSockets, UnansweredQueries,
};
use fourtuple_syscalls::pidfd::Pidfd;
use fourtuple_syscalls::sock_diag::{self, Detail};
use fourtuple_syscalls::{option, procfs, qdisc};

use crate::host::snapshot::processes::Sockets;
use crate::host::snapshot::{LISTED, reason, text};
use crate::host::sysctl;

/// Counters by `GROUP.NAME`.
pub(super) type Totals = BTreeMap<String, u64>;

/// Returns all counters of the calling thread's network namespace that the kernel has in /proc/net, by `GROUP.NAME`, and the packets and
/// drops of queueing disciplines, `qdisc.DEVICE.KIND.drops`.
///
/// # Errors
///
/// The file and the error as text.
pub(crate) fn counter_totals(root: &Path) -> Result<BTreeMap<String, u64>, String> {
    let mut now = Totals::new();
    // /proc/net belongs to the process's first thread; this thread may be in another namespace.
    for path in ["proc/thread-self/net/netstat", "proc/thread-self/net/snmp"] {
        parse(&text(root, path)?, &mut now);
    }
    // A kernel without IPv6 has no such file.
    parse_ipv6(&text(root, "proc/thread-self/net/snmp6").unwrap_or_default(), &mut now);
    parse_softnet(&text(root, "proc/thread-self/net/softnet_stat").unwrap_or_default(), &mut now);
    let table = |table: &str| text(root, &format!("proc/thread-self/net/stat/{table}"));
    // Only the initial network namespace has these files.
    for neighbours in ["arp_cache", "ndisc_cache"] {
        parse_table(neighbours, "table_fulls", &table(neighbours).unwrap_or_default(), &mut now);
    }
    // Each namespace has this one, but the packets may have come to any of them.
    if table("arp_cache").is_ok() {
        parse_table("rt_cache", "in_martian_dst", &table("rt_cache").unwrap_or_default(), &mut now);
    }
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

/// Adds a column of the lines for each processor, in hexadecimal: neighbours for which the table had no place (neigh_stat_seq_show), packets
/// for an address that cannot be (rt_cpu_seq_show). They belong to the whole host.
fn parse_table(table: &str, name: &str, text: &str, into: &mut Totals) {
    let mut lines = text.lines();
    let column = lines.next().and_then(|names| names.split_whitespace().position(|other| other == name));
    let Some(column) = column else { return };
    let value = |line: &str| u64::from_str_radix(line.split_whitespace().nth(column)?, 16).ok();
    into.insert(format!("{table}.{name}"), lines.filter_map(value).sum());
}

/// What the next reading needs of UDP sockets.
#[derive(Debug, Default)]
pub(super) struct Before {
    /// Drops of each socket, by cookie.
    drops: HashMap<u64, u64>,
    /// DNS queries without an answer that were found since the reading.
    queries: Vec<UnansweredQueries>,
}

/// Looks for DNS queries without an answer after a reading, and remembers those that have begun since.
pub(super) fn look_for_queries(sockets: &Sockets, since: &mut Before) {
    let mut all = Vec::new();
    // A kernel that lists no sockets has listed none to the reading either.
    let _ = sock_diag::each_udp_detail(|detail| all.push(detail));
    since.queries = unanswered_queries(sockets, &all, since);
    for query in all.iter().filter(|detail| detail.remote.port() == DNS) {
        since.drops.entry(query.cookie).or_insert(drops_of(query).unwrap_or(0));
    }
}

fn drops_of(detail: &Detail) -> Option<u64> {
    detail.memory.map(|memory| u64::from(memory.drops))
}

/// Port of DNS servers.
const DNS: u16 = 53;

pub(super) fn read_udp(
    sockets: &Sockets,
    before: &Before,
    is_first: bool,
    now: &mut Before,
) -> Result<UdpSockets, String> {
    let mut all: Vec<Detail> = Vec::new();
    let mut by_port: HashMap<u16, u32> = HashMap::new();
    sock_diag::each_udp_detail(|detail| {
        *by_port.entry(detail.local.port()).or_default() += 1;
        all.push(detail);
    })
    .map_err(|error| format!("sock_diag(7): {}", reason(&error)))?;
    let during = |detail: &Detail| {
        drops_of(detail).map_or(0, |total| since(before.drops.get(&detail.cookie), total, is_first).during)
    };
    let total = all.len() as u64;
    now.drops.extend(all.iter().filter_map(|detail| Some((detail.cookie, drops_of(detail)?))));
    let mut queries = unanswered_queries(sockets, &all, before);
    let found = |queries: &[UnansweredQueries], server| queries.iter().any(|found| found.server == server);
    let earlier: Vec<_> = before.queries.iter().filter(|earlier| !found(&queries, earlier.server)).collect();
    queries.extend(earlier.into_iter().cloned());
    all.retain(|detail| detail.queue > 0 || drops_of(detail) > Some(0) || by_port[&detail.local.port()] > 1);
    let is_alone = |detail: &Detail| by_port[&detail.local.port()] == 1;
    all.sort_by_key(|detail| (Reverse(during(detail)), is_alone(detail), detail.local, detail.cookie));
    let left_out = all.len().saturating_sub(LISTED) as u64;
    all.truncate(LISTED);
    let view = |detail: &Detail| UdpSocketView {
        local: detail.local,
        remote: (detail.remote.port() != 0).then_some(detail.remote),
        interface: detail.interface,
        cookie: detail.cookie,
        queued_bytes: detail.queue.into(),
        limit_bytes: detail.memory.map(|memory| memory.receive_limit.into()),
        drops: drops_of(detail).map(|total| since(before.drops.get(&detail.cookie), total, is_first)),
        user: detail.user,
        owners: sockets.owners(detail.inode),
    };
    Ok(UdpSockets { total, sockets: all.iter().map(view).collect(), left_out, queries })
}

/// Returns the connected sockets to DNS servers that have waited since they were seen before. A socket that a forwarder keeps for its next
/// query has received something, which sock_diag does not tell: a copy of the descriptor does. A process that may not be traced is left out.
fn unanswered_queries(sockets: &Sockets, all: &[Detail], before: &Before) -> Vec<UnansweredQueries> {
    /// Sockets that are looked at.
    const MAX_LOOKED_AT: usize = 64;
    /// Queries of a DNS server, which asks servers of the whole Internet, of which some are down at any time.
    const MIN_OF_SERVER: usize = 3;
    let is_old = |detail: &&Detail| detail.remote.port() == DNS && before.drops.contains_key(&detail.cookie);
    let mut opened: HashMap<u32, (Option<Pidfd>, HashMap<u32, i32>)> = HashMap::new();
    let mut waiting: BTreeMap<SocketAddr, Vec<u32>> = BTreeMap::new();
    for detail in all.iter().filter(is_old).take(MAX_LOOKED_AT) {
        let Some(pid) = sockets.holder(detail.inode) else { continue };
        let (pidfd, descriptors) = opened.entry(pid).or_insert_with(|| {
            let listed = procfs::sockets(sockets.root(), pid).into_iter().flatten();
            (Pidfd::of_process(pid).ok(), listed.map(|(descriptor, inode)| (inode, descriptor)).collect())
        });
        let (Some(pidfd), Some(descriptor)) = (pidfd, descriptors.get(&detail.inode)) else { continue };
        let copy = pidfd.duplicate(*descriptor);
        if copy.and_then(|copy| option::has_received(copy.as_fd())).is_ok_and(|received| !received) {
            waiting.entry(detail.remote).or_default().push(detail.inode);
        }
    }
    let servers = all.iter().filter(|detail| detail.local.port() == DNS);
    let servers: HashSet<u32> = servers.flat_map(|detail| sockets.holders(detail.inode)).copied().collect();
    let is_of_server = |inode: &u32| sockets.holder(*inode).is_some_and(|pid| servers.contains(&pid));
    waiting.retain(|_, inodes| inodes.len() >= MIN_OF_SERVER || !inodes.iter().all(is_of_server));
    let queries = |(server, inodes): (SocketAddr, Vec<u32>)| UnansweredQueries {
        server,
        sockets: inodes.len() as u32,
        owner: sockets.owner_of_most(&inodes),
    };
    waiting.into_iter().map(queries).collect()
}

/// Reads the table of nf_conntrack. A host without the module tracks nothing: its table is empty and has no limit.
pub(super) fn read_conntrack(
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
        parse_conntrack(&counters, now);
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
    // A port is of a closed connection if each of its entries is.
    let mut found: BTreeMap<(IpAddr, SocketAddr, &str), BTreeMap<u16, bool>> = BTreeMap::new();
    for line in table.lines() {
        let Some((key, port)) = translated(line) else { continue };
        *found.entry(key).or_default().entry(port).or_insert(true) &= line.contains(" TIME_WAIT ");
    }
    let listed = found.into_iter().filter_map(|((source, destination, protocol), ports)| {
        let (low, high) = (*ports.first_key_value()?.0, *ports.last_key_value()?.0);
        let closed = ports.values().filter(|is_closed| **is_closed).count() as u32;
        let (protocol, ports) = (protocol.to_owned(), ports.len() as u32);
        Some(Translated { source, destination, protocol, ports, low, high, closed })
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
fn parse_conntrack(text: &str, into: &mut BTreeMap<String, u64>) {
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
        parse_table(
            "arp_cache",
            "table_fulls",
            "entries  allocs table_fulls\n3 0000719a 0000000f\n3 1 00000001\n",
            &mut totals,
        );
        parse_table("ndisc_cache", "table_fulls", "entries allocs\n3 1\n", &mut totals);
        assert_eq!(totals.remove("arp_cache.table_fulls"), Some(16));
        assert_eq!((totals["TcpExt.B"], totals["Tcp.InSegs"], totals.len()), (2, 7, 4));
        assert_eq!(since(Some(&5), 7, false), Counter { total: 7, during: 2 });
        assert_eq!(since(None, 7, true), Counter { total: 7, during: 0 });
    }

    #[test]
    fn translated_sources_are_summed() {
        let of_state = |state: &str, from: &str, port: u16, to: &str| {
            format!(
                "ipv4     2 tcp      6 117 {state} src={from} dst=10.0.0.2 sport=4{port} dport=4000 src=10.0.0.2 dst={to} sport=4000 dport={port} mark=0 use=2\n"
            )
        };
        let line = |from: &str, port: u16, to: &str| of_state("SYN_SENT", from, port, to);
        let table = of_state("TIME_WAIT", "172.30.0.2", 30_001, "10.0.0.1")
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
            closed: 1,
        };
        assert_eq!(sources(&table), [expected]);
    }

    #[test]
    fn counters_are_summed_over_the_processors() {
        let mut counters = BTreeMap::new();
        parse_conntrack(
            "entries  clashres insert_failed\n0000000a  00000001 0000000f\n0000000a  00000000 00000001\n",
            &mut counters,
        );
        assert_eq!((counters["clashres"], counters["insert_failed"], counters.len()), (1, 16, 2));
    }
}
