use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Snapshot, Translated};

use crate::accepting::time;
use crate::attribute::processes_to;
use crate::command::Scope;
use crate::draft::{Draft, Remedy, What};
use crate::errno;
use crate::rule::{Checked, Rule, Threshold};
use crate::symptom::failed_calls;
use crate::words::{count, counted, doing, process};

pub(super) const RULE: Rule = Rule {
    id: "N02",
    title: "tracked connections collide",
    source: "insert_failed and clashres of /proc/net/stat/nf_conntrack, /proc/net/nf_conntrack",
    threshold: Some(Threshold { default: 1.0, unit: "collisions in the interval" }),
    explanation: &[
        "nf_conntrack inserts an entry when the first packet of a connection leaves the host (__nf_conntrack_confirm). If another entry \
         with the same tuple was inserted in the meantime, the packet is dropped (insert_failed), unless both belong to the same flow \
         (nf_ct_resolve_clash counts it in clashres; the packet passes).",
        "Two cases are frequent: a resolver sends the queries for A and AAAA at once from one UDP socket through DNAT, which costs a \
         timeout of 5 s; and SNAT (masquerade) gives two connections the same source port in parallel.",
        "SNAT has as many ports to one destination as its rule allows. If all are in use, each new connection collides: the rule says so, from the \
         table (/proc/net/nf_conntrack), and names the address, the destination, the ports, and the processes of the namespace that connect to it. Connections that the host forwards have no \
         process here.",
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
        "nf_conntrack dropped {} in {} because another connection had the same tuple",
        counted(failed.during, "packet"),
        time(snapshot.interval_ns)
    );
    let draft = |verdict: String| {
        Draft::new(Severity::Warning, "nf_conntrack collisions", verdict)
            .because(format!(
                "{} resolved without a drop (clashres)",
                doing(resolved, "more collision", "were")
            ))
            .explains(What::Counter("conntrack.insert_failed"))
            .explains_up_to(What::Counter("conntrack.drop"), failed.during)
            .explains(What::Counter("TcpExt.TCPSynRetrans"))
            .explains(What::calls("send", errno::EPERM))
            .because(format!("since boot: {} of this kind", counted(failed.total, "drop")))
    };
    if let Some(full) = conntrack.translated.iter().flatten().find(|found| is_exhausted(found)) {
        let known = processes_to(snapshot, full.destination);
        let mut draft = draft(exhaustion(full, failed.during, snapshot.interval_ns));
        for (owner, how) in known.iter().take(3) {
            draft = draft.because(format!("{}: {how}", process(owner)));
        }
        if known.is_empty() {
            draft = draft.because(format!(
                "no visible process of this namespace has to do with {}: the connections seem to be forwarded",
                full.destination
            ));
        }
        return Ok(vec![exhausted(draft, full)]);
    }
    // A datagram that is dropped before it leaves the host gives EPERM to its sender.
    let calls = snapshot.failures.seen().into_iter().flat_map(|failures| &failures.calls);
    let refused = calls.filter(|call| call.call == "send" && call.errno == errno::EPERM).take(3);
    let draft = refused.fold(draft(verdict), |draft, call| draft.because(failed_calls(call, call.failed)));
    let draft = draft
        .now(Remedy::privileged(Scope::Host, "grep -q single-request-reopen /etc/resolv.conf || echo 'options single-request-reopen' >> /etc/resolv.conf",
            "glibc sends the queries for A and AAAA from two sockets, if DNS queries collide",
        ))
        .proper(Remedy::advice(
            "a DNS cache on the host; masquerade with random ports (iptables: --random-fully; nft: masquerade random,fully-random)",
            "fewer connections get the same tuple at the same time",
        ));
    Ok(vec![draft])
}

/// Fewer ports are not a range of SNAT.
const MIN_PORTS: u32 = 32;

/// Returns whether SNAT uses nearly all ports between the lowest and the highest one.
fn is_exhausted(found: &Translated) -> bool {
    let span = u32::from(found.high - found.low) + 1;
    found.ports >= MIN_PORTS && found.ports * 20 >= span * 19
}

fn exhaustion(full: &Translated, failed: u64, interval_ns: u64) -> String {
    format!(
        "SNAT has no port left: {} → {} uses {} of the {} {} ports {}-{}; nf_conntrack dropped {} in {}",
        full.source,
        full.destination,
        count(full.ports.into()),
        count(u64::from(full.high - full.low) + 1),
        full.protocol,
        full.low,
        full.high,
        counted(failed, "packet"),
        time(interval_ns)
    )
}

fn exhausted(draft: Draft, full: &Translated) -> Draft {
    let Translated { source, destination, protocol, .. } = full;
    let list = format!(
        "conntrack -L -p {protocol} --reply-dst {source} --dst {} --dport {}",
        destination.ip(),
        destination.port()
    );
    draft
        .because("the connections behind SNAT share one port for each connection to a destination; a SYN without a port is dropped silently")
        .now(Remedy::privileged(Scope::Namespace, list, "lists the connections with their states: TIME_WAIT entries stay for 120 s"))
        .now(Remedy::sysctl(
            "net.netfilter.nf_conntrack_tcp_timeout_time_wait",
            "30",
            "entries of closed connections give their ports back after 30 s instead of 120 s; no effect on open connections",
        ).unproven())
        .proper(Remedy::advice(
            format!("more source addresses for SNAT (nft: `snat to {source}-LAST`, iptables: `--to-source {source}-LAST`)"),
            "each address has all ports of the rule to each destination",
        ))
        .proper(Remedy::advice(
            "a wider port range in the rule (`masquerade to :1024-65535`), and connections that are used again behind SNAT",
            "more connections to one destination at a time",
        ))
}
