use fourtuple_record::Severity;
use fourtuple_record::snapshot::Snapshot;

use crate::accepting::time;
use crate::draft::{Draft, Remedy, What};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::count;

pub(super) const RULE: Rule = Rule {
    id: "N02",
    title: "tracked connections collide",
    source: "insert_failed and clashres of /proc/net/stat/nf_conntrack",
    threshold: Some(Threshold { default: 1.0, unit: "collisions in the interval" }),
    explanation: &[
        "nf_conntrack inserts an entry when the first packet of a connection leaves the host (__nf_conntrack_confirm). If another entry \
         with the same tuple was inserted in the meantime, the packet is dropped (insert_failed), unless both belong to the same flow \
         (nf_ct_resolve_clash counts it in clashres; the packet passes).",
        "Two cases are frequent: a resolver sends the queries for A and AAAA at once from one UDP socket through DNAT, which costs a \
         timeout of 5 s; and SNAT (masquerade) gives two connections the same source port in parallel.",
        "What helps against the first: a DNS cache on the host, or `options single-request-reopen` in resolv.conf (glibc). Against the \
         second: masquerade with random ports (iptables: --random-fully; nft: masquerade random,fully-random), more source addresses for \
         SNAT.",
        "What does not help: a greater nf_conntrack_max; clashres alone needs no action.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let conntrack = snapshot.conntrack.seen()?;
    if conntrack.limit == 0 {
        return Ok(Vec::new());
    }
    let Some(failed) = conntrack.counters.get("insert_failed") else {
        return Err("this kernel has no /proc/net/stat/nf_conntrack (CONFIG_NF_CONNTRACK_PROCFS)".to_owned());
    };
    if (failed.during as f64) < limit {
        return Ok(Vec::new());
    }
    let resolved = ["clashres", "clash_resolve"].iter().filter_map(|name| conntrack.counters.get(*name));
    let resolved: u64 = resolved.map(|counter| counter.during).sum();
    let verdict = format!(
        "nf_conntrack dropped {} packets in {} because another connection had the same tuple",
        count(failed.during),
        time(snapshot.interval_ns)
    );
    let draft = Draft::new(Severity::Warning, "nf_conntrack collisions", verdict)
        .because(format!("{} more collisions were resolved without a drop (clashres)", count(resolved)))
        .explains(What::Counter("conntrack.insert_failed"))
        .explains_up_to(What::Counter("conntrack.drop"), failed.during)
        .explains(What::Counter("TcpExt.TCPSynRetrans"))
        .explains(What::calls("send", "EPERM"))
        .because(format!("since boot: {} drops of this kind", count(failed.total)))
        .now(Remedy::unproven(
            "grep -q single-request-reopen /etc/resolv.conf || echo 'options single-request-reopen' >> /etc/resolv.conf",
            "glibc sends the queries for A and AAAA from two sockets, if DNS queries collide",
        ))
        .proper(Remedy::advice(
            "a DNS cache on the host; masquerade with random ports (iptables: --random-fully; nft: masquerade random,fully-random)",
            "fewer connections get the same tuple at the same time",
        ));
    Ok(vec![draft])
}
