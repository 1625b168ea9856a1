use fourtuple_record::Severity;
use fourtuple_record::snapshot::Snapshot;

use crate::attribute::is_local;
use crate::budget::{Budget, reuse_delay_s};
use crate::draft::{Draft, Remedy};
use crate::remedies::keep_connections;
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{self, count, percent};

pub(super) const RULE: Rule = Rule {
    id: "T04",
    title: "net.ipv4.tcp_tw_reuse has no effect without timestamps",
    source: "net.ipv4.tcp_timestamps, net.ipv4.tcp_tw_reuse, sock_diag(7) (inet_diag), tw_ts_recent_stamp (BPF iterator over TCP sockets)",
    threshold: Some(Threshold { default: 10.0, unit: "% of the usable ports" }),
    explanation: &[
        "connect() takes a port in TIME_WAIT again only if the old connection had TCP timestamps (tw_ts_recent_stamp in tcp_twsk_unique). With \
         net.ipv4.tcp_timestamps = 0 no connection of the namespace has them, and net.ipv4.tcp_tw_reuse = 1 does nothing.",
        "Timestamps were switched off for CPU time or against the disclosure of the uptime. Since Linux 4.10 their start is random for each pair of \
         addresses (secure_tcp_ts_off), and their cost is 12 bytes a segment. Without them PAWS (RFC 7323) is missing too, which protects \
         fast connections from old segments.",
        "The rule has a finding if reuse is allowed for a source and a destination whose TIME_WAIT sockets are past the threshold.",
        "Both sides need timestamps: many load balancers and appliances have none, and some NAT devices and firewalls remove the option. The \
         TIME_WAIT sockets tell (tw_ts_recent_stamp, by a BPF iterator as root), or the open connections of the same source and destination \
         (tcpi_options). If neither can be read, the rule goes by TcpExt.TWRecycled: it is 0 if no port in TIME_WAIT was ever taken again.",
        "What helps: net.ipv4.tcp_timestamps = 1, the default, on both sides. It acts on new connections.",
        "What does not help: a lower net.ipv4.tcp_tw_reuse_delay.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let mode = snapshot.number("net.ipv4.tcp_tw_reuse")?;
    if snapshot.number("net.ipv4.tcp_timestamps")? != 0 {
        return of_peers(snapshot, limit);
    }
    for tuple in &snapshot.connections.seen()?.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        let is_loopback = tuple.source.is_loopback() || tuple.destination.ip().is_loopback();
        let is_allowed = mode == 1 || mode == 2 && is_loopback;
        let is_past = f64::from(budget.time_wait) >= f64::from(budget.total) * limit / 100.0;
        if is_allowed && is_past && budget.time_wait > 0 {
            let verdict = format!(
                "net.ipv4.tcp_tw_reuse is {mode} but net.ipv4.tcp_timestamps is 0: connect() takes no port in TIME_WAIT again, and {} has {} of its ports there",
                words::tuple(tuple),
                percent(budget.time_wait.into(), budget.total.into())
            );
            let severity = if budget.is_past(90.0) { Severity::Warning } else { Severity::Notice };
            return Ok(vec![
                Draft::new(severity, "net.ipv4.tcp_timestamps", verdict)
                    .now(Remedy::sysctl(
                        "net.ipv4.tcp_timestamps",
                        "1",
                        "new connections have timestamps, and their ports can be taken again after 1 s",
                    ))
                    .proper(Remedy::advice(
                        "remove net.ipv4.tcp_timestamps = 0 from /etc/sysctl.conf and /etc/sysctl.d",
                        "the default is 1",
                    )),
            ]);
        }
    }
    Ok(Vec::new())
}

/// Tuples whose peer, or a device on the way to it, has no timestamps, although this host has them and would reuse their ports.
fn of_peers(snapshot: &Snapshot, limit: f64) -> Checked {
    let mut drafts = Vec::new();
    for tuple in &snapshot.connections.seen()?.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        let is_past = f64::from(budget.time_wait) >= f64::from(budget.total) * limit / 100.0;
        // Without timestamps in the past: those sockets are gone in a minute.
        if is_local(snapshot, tuple)
            || budget.time_wait == 0
            || !is_past
            || !budget.is_plain()
            || reuse_delay_s(snapshot, tuple).is_none()
        {
            continue;
        }
        let seems = if tuple.time_wait_plain.is_some() { "uses" } else { "seems to use" };
        let verdict = format!(
            "{} {seems} no TCP timestamps: connect() takes none of the {} ports in TIME_WAIT again before 60 s have passed, in spite of net.ipv4.tcp_tw_reuse = {}",
            words::tuple(tuple),
            count(budget.plain.into()),
            snapshot.number("net.ipv4.tcp_tw_reuse")?
        );
        let severity = if budget.is_past(90.0) { Severity::Warning } else { Severity::Notice };
        let guess = tuple.time_wait_plain.is_none();
        drafts.push(
            Draft::new(severity, words::tuple(tuple), verdict)
                .because("net.ipv4.tcp_timestamps is 1 here, so the peer, or a device on the way, lacks them")
                .because_if(guess.then(|| {
                    "no port in TIME_WAIT was ever taken again (TcpExt.TWRecycled is 0); the sockets themselves are visible to root only".to_owned()
                }))
                .proper(Remedy::advice(
                    format!("switch on TCP timestamps at {}, or at the load balancer or firewall before it", tuple.destination),
                    "ports in TIME_WAIT can then be taken again after 1 s",
                ))
                .proper(keep_connections(tuple)),
        );
    }
    Ok(drafts)
}
