use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Owner, Snapshot, Tuple};

use crate::budget::{Budget, state};
use crate::draft::{Draft, Remedy};
use crate::remedies::{more_sources, printed, wider_range};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, doing, percent, process, tuple};

pub(super) const RULE: Rule = Rule {
    id: "P12",
    title: "several processes share the ports of a source and destination",
    source: "sock_diag(7) (inet_diag), descriptors in /proc/PID/fd, net.ipv4.ip_local_port_range",
    threshold: Some(Threshold { default: 50.0, unit: "% of the usable ports" }),
    explanation: &[
        "The ports of a source address and a destination belong to the network namespace, not to a process. Workers of a server, sidecars and \
         agents that connect from the same address to the same destination share them: the first one to leak connections or to close first \
         at a high rate takes the ports of all, and all get EADDRNOTAVAIL.",
        "The rule has a finding if two or more processes have a tenth of the sockets each and together use a share past the threshold. TIME_WAIT \
         sockets have no process and count for the whole.",
        "What helps: a source address for each process or group of processes; connections that are used again in the process with most of them; a network \
         namespace with an address of its own.",
        "What does not help: a port range for each process with IP_LOCAL_PORT_RANGE, which divides the ports and adds none. It does keep one process \
         from taking the ports of another.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let mut drafts = Vec::new();
    for tuple in &snapshot.connections.seen()?.tuples {
        let held: u64 = tuple.owners.iter().map(|owner| u64::from(owner.sockets)).sum();
        let is_large = |owner: &&Owner| u64::from(owner.sockets) * 10 >= held;
        let large: Vec<&Owner> = tuple.owners.iter().filter(is_large).collect();
        // Processes that inherited descriptors hold the same sockets.
        let open: u64 = tuple.states.values().sum::<u64>() - state(tuple, "time-wait");
        if held == 0 || held > open + open / 10 {
            continue;
        }
        let budget = Budget::of(snapshot, tuple)?;
        if large.len() >= 2 && budget.is_past(limit) {
            drafts.push(draft(snapshot, tuple, &budget, &large));
        }
    }
    Ok(drafts)
}

fn draft(snapshot: &Snapshot, subject: &Tuple, budget: &Budget, large: &[&Owner]) -> Draft {
    let share = |owner: &&Owner| format!("{} {}", process(owner), count(owner.sockets.into()));
    let named: Vec<String> = large.iter().take(3).map(share).collect();
    let more = if large.len() > 3 { format!(" and {} more", large.len() - 3) } else { String::new() };
    let verdict = format!(
        "{} the {} ports of {}: {}{more}; {} are in use",
        doing(large.len() as u64, "process", "share"),
        count(budget.total.into()),
        tuple(subject),
        named.join(", "),
        percent(budget.taken().into(), budget.total.into())
    );
    let mut draft = Draft::new(Severity::Notice, tuple(subject), verdict);
    draft.now.extend(more_sources(snapshot, subject));
    draft.now.extend(wider_range(snapshot, Some(subject)));
    draft.proper.extend(printed(snapshot, subject));
    draft.proper(Remedy::advice(
        "a source address for each process, or a network namespace of its own",
        "each source address has the whole range to the destination",
    ))
}
