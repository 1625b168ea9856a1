use fourtuple_record::Severity;
use std::net::SocketAddr;

use fourtuple_record::snapshot::{FailedCall, Snapshot, Tuple};

use crate::attribute::left_behind;
use crate::budget::Budget;
use crate::draft::{Draft, Remedy, What};
use crate::errno;
use crate::remedies::more_ports;
use crate::rule::{Checked, Rule};
use crate::words::{caller, count, counted, process, tuple};

pub(super) const RULE: Rule = Rule {
    id: "P07",
    title: "connect() fails with EADDRNOTAVAIL",
    source: "the tracepoint at the end of connect() (raw_syscalls:sys_exit; `fourtuple trace connect`)",
    threshold: None,
    explanation: &[
        "connect() returns EADDRNOTAVAIL if it finds no port for the destination (__inet_hash_connect), or if the socket has a port already, from \
         bind() by number, and another connection has the same addresses and ports (__inet_check_established). No counter of the kernel counts \
         it: only a trace sees it, or the log of the program (`Cannot assign requested address`).",
        "The rule names the process and the destination, and compares with the ports of the tuples to this destination. If one of them is full, \
         P01 has the cause. If none is, the usual cause is bind() by number before connect(), for a tuple that is in TIME_WAIT or open.",
        "The same errno from bind() means that the address is not an address of this host (P11). Exhausted ports give EADDRINUSE from bind() to \
         port 0, and EAGAIN from connect() of UDP.",
        "What helps: what P01 names. For bind() by number: connect() without bind(), or bind() to port 0 with IP_BIND_ADDRESS_NO_PORT.",
        "What does not help: trying again at once, while all ports are in use.",
    ],
    check,
};

fn check(snapshot: &Snapshot, _: f64) -> Checked {
    let failures = snapshot.failures.seen().map_err(|reason| {
        format!("{reason}; `fourtuple trace connect --for 10s` shows failed calls of connect() by errno")
    })?;
    Ok(failures.without_port().map(|(call, destination)| draft(snapshot, call, destination)).collect())
}

fn draft(snapshot: &Snapshot, call: &FailedCall, destination: SocketAddr) -> Draft {
    let FailedCall { failed, .. } = call;
    let owner = &caller(&call.owner, call.processes);
    let seconds = snapshot.interval_ns as f64 / 1e9;
    let verdict = format!(
        "{} cannot connect to {destination}: {} of connect() failed with EADDRNOTAVAIL in {seconds:.1} s",
        process(owner),
        counted(*failed, "call")
    );
    let subject = format!("{} → {destination}", process(owner));
    let failed = What::Calls {
        call: "connect",
        errno: errno::EADDRNOTAVAIL,
        process: Some(call.owner.pid),
        address: Some(destination.to_string()),
    };
    match full_tuple(snapshot, destination) {
        Some((full, budget)) => {
            let fact = format!(
                "{} uses {} of {} ports (P01)",
                tuple(full),
                count(budget.taken().into()),
                count(budget.total.into())
            );
            let holder = full.owners.first().filter(|holder| holder.sockets > 0 && holder.pid != owner.pid);
            let holder = holder.map(|holder| {
                format!("{} has {} of them", process(holder), counted(holder.sockets.into(), "connection"))
            });
            let holder = holder.or_else(|| left_behind(snapshot, full));
            // The process that fails needs ports, not the process that has them.
            let full = Tuple { owners: vec![owner.clone()], ..full.clone() };
            more_ports(Draft::new(Severity::Critical, subject, verdict).explains(failed).because(fact).because_if(holder), snapshot, &full)
        }
        None => Draft::new(Severity::Warning, subject, verdict)
            .explains(failed)
            .because("no source has all its ports to this destination in use now: the ports are free again, or the program binds ports by number")
            .proper(Remedy::advice(
                "connect() without bind(), or bind() to port 0 with IP_BIND_ADDRESS_NO_PORT (24)",
                "connect() then chooses a port that is free for the destination",
            )),
    }
}

/// The tuple to the destination that has, or just had, no port left.
fn full_tuple(snapshot: &Snapshot, destination: SocketAddr) -> Option<(&Tuple, Budget)> {
    let tuples = &snapshot.connections.seen().ok()?.tuples;
    let of_destination = tuples.iter().filter(|tuple| tuple.destination == destination);
    of_destination
        .filter_map(|tuple| Some((tuple, Budget::of(snapshot, tuple).ok()?)))
        .find(|(_, budget)| budget.is_past(95.0))
}
