use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Snapshot, Tuple};

use crate::budget::{Budget, delay_s, is_relieved, reuse_delay_s};
use crate::command::{Content, Setting};
use crate::draft::{Draft, Remedy};
use crate::remedies::{keep_connections, reuse};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{percent, rate, tuple};

pub(super) const RULE: Rule = Rule {
    id: "T03",
    title: "net.ipv4.tcp_tw_reuse would give ports back",
    source: "sock_diag(7) (inet_diag), net.ipv4.tcp_tw_reuse, net.ipv4.tcp_tw_reuse_delay, net.ipv4.tcp_timestamps",
    threshold: Some(Threshold { default: 50.0, unit: "% of the usable ports" }),
    explanation: &[
        "With net.ipv4.tcp_tw_reuse = 1 connect() may take a port whose connection to the same destination is in TIME_WAIT, once a second has \
         passed since the last packet, if that connection had TCP timestamps (tcp_twsk_unique). The default is 2: over loopback only. \
         0 forbids it.",
        "The delay is 1 s, since Linux 6.14 net.ipv4.tcp_tw_reuse_delay in milliseconds. The ceiling of a client that closes first then is the number of \
         ports per second instead of per minute.",
        "It is safe for clients: the new connection begins with a greater timestamp, and PAWS (RFC 7323) refuses segments of the old one. The peer \
         must have timestamps too; nearly all systems have. A NAT device that rewrites timestamps, or a load balancer without them, prevents it.",
        "The rule has a finding if a source and a destination that connect() may not reuse have more TIME_WAIT sockets than half of their ports in use, \
         and the ports in use are past the threshold. It also has one if the delay is longer than 1 s and the ports last no longer for it.",
        "What does not help: the sysctl on a server for its accepted connections, as it concerns connect() only; net.ipv4.tcp_tw_recycle, which \
         is gone since Linux 4.12. The search still passes over each port in TIME_WAIT and costs more there: see P02 and P09.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let mode = snapshot.number("net.ipv4.tcp_tw_reuse")?;
    if snapshot.number("net.ipv4.tcp_timestamps")? == 0 {
        // T04.
        return Ok(Vec::new());
    }
    let mut drafts = Vec::new();
    for tuple in &snapshot.connections.seen()?.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        // Without timestamps: T04.
        let is_waiting = budget.time_wait * 2 > budget.in_use
            && budget.is_past(limit)
            && !budget.is_plain()
            && !is_relieved(snapshot, tuple);
        let is_on = reuse_delay_s(snapshot, tuple).is_some();
        if is_waiting && (!is_on || delay_s(snapshot) > 1.0) {
            drafts.push(draft(snapshot, tuple, &budget, mode, is_on));
        }
    }
    Ok(drafts)
}

fn draft(snapshot: &Snapshot, subject: &Tuple, budget: &Budget, mode: u64, is_on: bool) -> Draft {
    let waiting = percent(budget.time_wait.into(), budget.total.into());
    let severity = if budget.is_past(90.0) { Severity::Warning } else { Severity::Notice };
    if is_on {
        let delay = delay_s(snapshot);
        let verdict = format!(
            "net.ipv4.tcp_tw_reuse_delay is {delay} s: {} has {waiting} of its ports in TIME_WAIT, and connect() takes them again only after this time",
            tuple(subject)
        );
        let effect = format!(
            "1 s, the default: up to {} instead of {}",
            rate(budget.total.into()),
            rate(budget.ceiling_per_s())
        );
        return Draft::new(severity, tuple(subject), verdict).now(Remedy::sysctl(
            "net.ipv4.tcp_tw_reuse_delay",
            "1000",
            effect,
        ));
    }
    let meaning = if mode == 2 { "2 (loopback only)" } else { "0 (never)" };
    let verdict = format!(
        "net.ipv4.tcp_tw_reuse is {meaning}: {} has {waiting} of its ports in TIME_WAIT; with 1 connect() takes them again after {} s",
        tuple(subject),
        delay_s(snapshot)
    );
    let mut draft = Draft::new(severity, tuple(subject), verdict).because(match subject.time_wait_plain {
        Some(_) => "the connections had TCP timestamps, which both sides need",
        None => "net.ipv4.tcp_timestamps is on here; the peer needs TCP timestamps too",
    });
    draft.now.extend(reuse(snapshot, subject));
    draft
        .proper(Remedy::kept(
            "92-tw-reuse",
            Content::Settings(vec![Setting::new("net.ipv4.tcp_tw_reuse", "1")]),
            "the same after a restart of the host",
        ))
        .proper(keep_connections(subject))
}
