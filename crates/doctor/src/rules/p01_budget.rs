use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Snapshot, Tuple};

use crate::attribute::{Growth, left_behind};
use crate::budget::{Budget, is_relieved, state};
use crate::draft::{Draft, Remedy, What};
use crate::errno;
use crate::remedies::{lasting_sysctls, more_ports};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted, percent, process, tuple};

pub(super) const RULE: Rule = Rule {
    id: "P01",
    title: "the ports of a source and destination run out",
    source: "sock_diag(7) (inet_diag), net.ipv4.ip_local_port_range, net.ipv4.ip_local_reserved_ports, net.ipv4.tcp_tw_reuse",
    threshold: Some(Threshold { default: 90.0, unit: "% of the usable ports" }),
    explanation: &[
        "A connection is identified by source address, source port, destination address and destination port. Connections from one source \
         address to one destination differ in the source port only, so that at most one connection per port of \
         net.ipv4.ip_local_port_range can exist at a time. With none left, connect() fails with EADDRNOTAVAIL (__inet_hash_connect).",
        "Ports in net.ipv4.ip_local_reserved_ports and ports that bind() or listen() holds are closed to every connect() and are not counted as \
         usable.",
        "The side that closes first keeps the connection in TIME_WAIT for 60 s (TCP_TIMEWAIT_LEN, a constant). With N usable ports, a client that \
         closes first can therefore open N / 60 connections per second to one destination, for ever. The verdict has this rate, and \
         the connections that this side closed first, from the remaining times of the TIME_WAIT sockets.",
        "Ports in TIME_WAIT do not count where connect() may take them again: with net.ipv4.tcp_tw_reuse = 1, or over loopback with 2 (the \
         default), after net.ipv4.tcp_tw_reuse_delay (1 s), if both sides have TCP timestamps (tcp_twsk_unique; T04).",
        "Ports whose connections are open and idle, while their number grows, are a leak: the verdict says so, from the times since the last data \
         (tcpi_last_data_sent, tcpi_last_data_recv). More ports, and more descriptors, then only postpone the failure.",
        "What helps: connections that are used again; more source addresses (`fourtuple fix ports --source`); more addresses or ports of the \
         destination; a server that closes first; net.ipv4.tcp_tw_reuse = 1 on the client. A wider range helps by the ratio of the widths.",
        "What does not help: net.ipv4.tcp_fin_timeout, which is the time in FIN_WAIT_2; a shorter search for a port, which finds no port that \
         is not there; more processes or threads, which share the ports.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let mut drafts = Vec::new();
    for tuple in &snapshot.connections.seen()?.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        if budget.is_past(limit) {
            drafts.push(draft(snapshot, tuple, &budget));
        }
    }
    Ok(drafts)
}

fn draft(snapshot: &Snapshot, subject: &Tuple, budget: &Budget) -> Draft {
    let Budget { total, in_use, time_wait, .. } = *budget;
    let mut verdict =
        format!("{} uses {} of {} ports", tuple(subject), count(in_use.into()), count(total.into()));
    if time_wait > 0 {
        verdict += &format!(", {} of them in TIME_WAIT", percent(time_wait.into(), in_use.into()));
    }
    if budget.closes_per_s > 0.0 {
        let closer = subject.owners.first().map_or_else(|| "this host".to_owned(), process);
        verdict += &format!("; {closer} {}", budget.closed());
    } else if let Some(leak) = Growth::of(snapshot, subject, budget).and_then(|growth| growth.leak()) {
        let owner = subject.owners.first().map_or_else(|| "a process".to_owned(), process);
        verdict += &format!("; {owner} {leak}");
    } else if let Some(owner) = subject.owners.first() {
        verdict += &match owner.sockets {
            // Only a trace has seen the process.
            0 => format!("; {} calls connect()", process(owner)),
            sockets => format!("; {} has {} of the connections", process(owner), count(sockets.into())),
        };
    }
    // New connections have other sources.
    let is_relieved = is_relieved(snapshot, subject);
    let severity = match (is_relieved, budget.is_full()) {
        (true, _) => Severity::Notice,
        (false, true) => Severity::Critical,
        (false, false) => Severity::Warning,
    };
    let held = (budget.held > 0).then(|| {
        format!(
            "bind() and listen() hold {} of the range (P05, P06)",
            counted(budget.held.into(), "more port")
        )
    });
    let mut draft = Draft::new(severity, tuple(subject), verdict)
        .because(format!("sockets: {}", states(subject)))
        .because_if(left_behind(snapshot, subject))
        .because_if(held)
        .because_if(
            (subject.growth_per_s >= 1.0)
                .then(|| format!("{} per second", counted(subject.growth_per_s.round() as u64, "more port"))),
        );
    if budget.is_full() && !is_relieved {
        draft =
            draft.because("the next connect() fails with EADDRNOTAVAIL (EADDRINUSE from bind() to port 0)");
    }
    let destination = subject.destination.to_string();
    let failed = |errno| {
        let address = Some(destination.clone());
        What::Calls { call: "connect", errno, process: None, address }
    };
    let draft = draft
        .explains(failed(errno::EADDRNOTAVAIL))
        .explains(failed(errno::EADDRINUSE))
        .explains(What::Growth(tuple(subject)));
    let draft = more_ports(draft, snapshot, subject).proper(lasting_sysctls());
    if subject.owners.is_empty() {
        return draft.now(Remedy::own(
            "trace connect --for 10s",
            format!("names the processes that connect to {}", subject.destination),
        ));
    }
    draft
}

/// Returns `28,000 time-wait, 231 established`.
fn states(tuple: &Tuple) -> String {
    let mut states: Vec<&str> = tuple.states.keys().map(String::as_str).collect();
    states.sort_by_key(|name| std::cmp::Reverse(state(tuple, name)));
    states.iter().map(|name| format!("{} {name}", count(state(tuple, name)))).collect::<Vec<_>>().join(", ")
}
