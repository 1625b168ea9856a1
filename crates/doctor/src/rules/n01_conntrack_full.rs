use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Conntrack, Part, Snapshot};

use crate::accepting::time;
use crate::command::Setting;
use crate::draft::{Draft, Remedy, What};
use crate::errno;
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted, percent};

pub(super) const RULE: Rule = Rule {
    id: "N01",
    title: "the table of tracked connections is full",
    source: "net.netfilter.nf_conntrack_count, net.netfilter.nf_conntrack_max, /proc/net/stat/nf_conntrack",
    threshold: Some(Threshold { default: 90.0, unit: "% of net.netfilter.nf_conntrack_max" }),
    explanation: &[
        "Connection tracking (nf_conntrack) has an entry for each connection that passes a rule of the firewall with state, or NAT. If \
         the table has net.netfilter.nf_conntrack_max entries, the kernel removes an unconfirmed or closing entry of the same hash chain \
         (early_drop) or drops the packet (__nf_conntrack_alloc: \"nf_conntrack: table full, dropping packet\" in the kernel log). \
         connect() then waits for a SYN to be sent again.",
        "Entries outlive their connections: 120 s after a close (nf_conntrack_tcp_timeout_time_wait), 5 days for an established \
         connection whose end was not seen (nf_conntrack_tcp_timeout_established), 30 s for a UDP request.",
        "What helps: a greater net.netfilter.nf_conntrack_max (about 0.3 KiB for an entry; the sysctl belongs to the initial network \
         namespace), with net.netfilter.nf_conntrack_buckets not far below it; shorter timeouts; no tracking for traffic that needs none \
         (nft: notrack; iptables: -t raw -j CT --notrack).",
        "What does not help: more ports or another port range; the table counts connections of all ports, forwarded ones too.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let conntrack = snapshot.conntrack.seen()?;
    // A host without nf_conntrack has no limit; 0 is also the value of "unlimited".
    if conntrack.limit == 0 {
        return Ok(Vec::new());
    }
    let during = |name: &str| conntrack.counters.get(name).map_or(0, |counter| counter.during);
    // Collisions (N02) count as drops as well.
    let dropped = during("drop").saturating_sub(during("insert_failed"));
    let early = during("early_drop");
    let is_near = conntrack.count as f64 >= conntrack.limit as f64 * limit / 100.0;
    if !is_near {
        return Ok(Vec::new());
    }
    let severity = if dropped + early > 0 { Severity::Critical } else { Severity::Warning };
    let mut verdict = format!(
        "{} of {} entries of nf_conntrack are in use, {}",
        count(conntrack.count),
        count(conntrack.limit),
        percent(conntrack.count, conntrack.limit)
    );
    if dropped + early > 0 {
        verdict += &format!(
            "; {} of new connections dropped and {} evicted in {}",
            counted(dropped, "packet"),
            counted(early, "entry"),
            time(snapshot.interval_ns)
        );
    }
    let draft = Draft::new(severity, "nf_conntrack", verdict)
        .explains_up_to(What::Counter("conntrack.drop"), dropped)
        .explains(What::Counter("conntrack.early_drop"))
        .explains(What::Counter("TcpExt.TCPSynRetrans"))
        .explains(What::calls("connect", errno::ETIMEDOUT))
        .explains(What::calls("send", errno::EPERM));
    Ok(vec![draft.now(wider(conntrack)).proper(Remedy::advice(
        "no tracking for traffic that needs no firewall state: a rule with `notrack` (nft) or `-t raw -j CT --notrack` (iptables)",
        "the connections take no entry",
    ))])
}

fn wider(conntrack: &Conntrack) -> Remedy {
    let limit = conntrack.limit * 2;
    let old = Some(conntrack.limit.to_string());
    let setting = Setting { old, ..Setting::new("net.netfilter.nf_conntrack_max", limit.to_string()) };
    let effect = format!("{}; in a container, to be set on the host", counted(limit, "entry"));
    Remedy::sysctls(vec![setting], effect).with(move |snapshot| {
        if let Part::Seen(conntrack) = &mut snapshot.conntrack {
            conntrack.limit = limit;
        }
    })
}
