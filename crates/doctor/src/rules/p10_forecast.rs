use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Snapshot, Tuple};

use crate::attribute::Growth;
use crate::budget::Budget;
use crate::draft::{Draft, What};
use crate::remedies::more_ports;
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, process, time, tuple};

pub(super) const RULE: Rule = Rule {
    id: "P10",
    title: "the ports of a source and destination will run out",
    source: "two readings of sock_diag(7), remaining times of TIME_WAIT sockets, net.ipv4.ip_local_port_range",
    threshold: Some(Threshold { default: 600.0, unit: "s until the last port" }),
    explanation: &[
        "The forecast has two inputs: the growth of the ports in use between two readings, and the rate at which this side closes first, from the \
         remaining times of its TIME_WAIT sockets. A rate of R per second leads to R * 60 ports in TIME_WAIT after 60 s and no more (R times \
         net.ipv4.tcp_tw_reuse_delay where connect() may take them again). So growth by TIME_WAIT ends at this plateau, and the rule has a \
         finding only if the plateau is above the usable ports. Growth of open connections has no such end.",
        "Growth by TIME_WAIT counts from a quarter of the usable ports on, growth of open connections from half of them on, because pools that \
         fill at a start are not exhaustion. From 90% on P01 has the finding.",
        "What helps: what P01 names, in time. For open connections that only grow, look for a leak in the program: connections that are \
         never closed (T07: connections that the peer closed).",
        "What does not help: a higher limit of descriptors, which only moves the failure to the ports.",
    ],
    check,
};

/// The shares from which on growth by TIME_WAIT and growth of open connections count, in percent.
const CLOSING: f64 = 25.0;
const OPENING: f64 = 50.0;
/// The share from which on P01 has the finding, in percent.
const NEAR: f64 = 90.0;

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let mut drafts = Vec::new();
    for tuple in &snapshot.connections.seen()?.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        if let Some(seconds) = until_full(tuple, &budget).filter(|seconds| *seconds <= limit) {
            drafts.push(draft(snapshot, tuple, &budget, seconds));
        }
    }
    Ok(drafts)
}

/// Returns the seconds until no port is left, or `None` if the ports last.
fn until_full(tuple: &Tuple, budget: &Budget) -> Option<f64> {
    let left = f64::from(budget.total.checked_sub(budget.taken())?);
    if left <= 0.0 || budget.is_past(NEAR) {
        return None;
    }
    let growth = tuple.growth_per_s;
    if budget.time_wait * 2 > budget.in_use {
        // No port becomes free before the first sockets have been in TIME_WAIT for 60 s.
        let rate = if growth > 0.0 { growth } else { budget.closes_per_s };
        (budget.is_outrun() && budget.is_past(CLOSING)).then(|| left / rate)
    } else {
        (growth > 0.0 && budget.is_past(OPENING)).then(|| left / growth)
    }
}

fn draft(snapshot: &Snapshot, subject: &Tuple, budget: &Budget, seconds: f64) -> Draft {
    let mut verdict = format!(
        "{} uses {} of {} ports, and the last one is taken in about {}",
        tuple(subject),
        count(budget.taken().into()),
        count(budget.total.into()),
        time(seconds)
    );
    let owner = subject.owners.first().map_or_else(|| "this host".to_owned(), process);
    if budget.is_outrun() {
        verdict += &format!("; {owner} {}", budget.closed());
    } else {
        verdict += &format!("; {owner} opens {:.1}/s more than it closes", subject.growth_per_s);
        if let Some(leak) = Growth::of(snapshot, subject, budget).and_then(|growth| growth.leak()) {
            verdict += &format!(" and {leak}");
        }
    }
    let draft = Draft::new(Severity::Warning, tuple(subject), verdict).explains(What::Growth(tuple(subject)));
    more_ports(draft, snapshot, subject)
}
