use fourtuple_record::Severity;
use fourtuple_record::snapshot::{EphemeralPorts, Snapshot, Tuple};

use crate::budget::{Budget, is_relieved};
use crate::command::Cure;
use crate::draft::{Draft, Remedy};
use crate::remedies::{lasting_sysctls, most_ports, wider_range};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted, tuple};

pub(super) const RULE: Rule = Rule {
    id: "P03",
    title: "the port range is too small",
    source: "net.ipv4.ip_local_port_range, sock_diag(7) (inet_diag)",
    threshold: Some(Threshold { default: 14_116.0, unit: "usable ports (half of the kernel's default)" }),
    explanation: &[
        "net.ipv4.ip_local_port_range is the set of ports from which connect() and bind() to port 0 choose. The kernel's default is 32768 to 60999, \
         28,232 ports. Some images and hardening guides set less, and each network namespace, that is each container, has its own value.",
        "The rule has a finding if fewer ports than the threshold are usable and a source and a destination use, or will use, half of them. It \
         also has one for a range of any size, if a client closes so many connections per second that 60 s of TIME_WAIT need more ports than \
         there are, while the widest range would be enough.",
        "What helps: the range 1024 to 65535, with the ports of local servers in net.ipv4.ip_local_reserved_ports, so that connect() does not \
         take the port of a server while the server restarts (inet_is_local_reserved_port). The change acts at once and needs no restart. In \
         Kubernetes net.ipv4.ip_local_port_range is a safe sysctl of a pod (`fourtuple fix --print kubernetes`).",
        "What does not help: a change of the sysctl on the host if the program runs in a container with a network namespace of its own. A \
         program can set a range of its own within the sysctl with IP_LOCAL_PORT_RANGE, but not a wider one.",
    ],
    check,
};

/// The share of the ports that makes a small range matter, in percent.
const MATTERS: f64 = 50.0;
/// The share of the ports from which on a rate counts, in percent.
const STARTED: f64 = 25.0;
/// The default of the kernel.
const DEFAULT: &str = "32768 60999";

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let ports = snapshot.ports.seen()?;
    let mut largest: Option<(f64, &Tuple, Budget)> = None;
    for tuple in snapshot.connections.seen()?.tuples.iter().filter(|tuple| !is_relieved(snapshot, tuple)) {
        let budget = Budget::of(snapshot, tuple)?;
        let plateau = if budget.is_outrun() { budget.plateau() } else { 0.0 };
        let demand = plateau.max(budget.taken().into());
        if largest.as_ref().is_none_or(|(most, ..)| demand > *most) {
            largest = Some((demand, tuple, budget));
        }
    }
    let Some((demand, tuple, budget)) = largest else { return Ok(Vec::new()) };
    let total = f64::from(budget.total);
    let is_small = f64::from(ports.usable()) < limit && demand * 100.0 >= total * MATTERS;
    let is_outrun =
        budget.is_outrun() && budget.is_past(STARTED) && demand <= f64::from(most_ports(snapshot));
    let is_finding = is_small || is_outrun;
    Ok(is_finding.then(|| draft(snapshot, ports, demand, tuple, &budget)).into_iter().collect())
}

fn draft(
    snapshot: &Snapshot,
    ports: &EphemeralPorts,
    demand: f64,
    subject: &Tuple,
    budget: &Budget,
) -> Draft {
    let range = format!("{}-{}", ports.low, ports.high);
    let verdict = if demand > f64::from(budget.taken()) {
        format!(
            "the range {range} has {}; {} needs {} at its rate of {:.0} closes/s and {:.0} s until a port is free again",
            counted(ports.usable().into(), "usable port"),
            tuple(subject),
            count(demand.ceil() as u64),
            budget.closes_per_s,
            budget.wait_s
        )
    } else {
        format!(
            "the range {range} has {}; {} uses {} of them",
            counted(ports.usable().into(), "usable port"),
            tuple(subject),
            count(budget.taken().into())
        )
    };
    let is_short = demand > f64::from(budget.total);
    let severity = if is_short || budget.is_full() { Severity::Warning } else { Severity::Notice };
    let mut draft = Draft::new(severity, "net.ipv4.ip_local_port_range", verdict)
        .because(format!("the kernel's default is {DEFAULT}: 28,232 ports"));
    match wider_range(snapshot, Some(subject)) {
        Some(remedy) => draft = draft.now(remedy),
        None if ports.range() < 28_232 => {
            let remedy = Remedy::sysctl(
                "net.ipv4.ip_local_port_range",
                DEFAULT,
                "the kernel's default, for new connections at once",
            );
            draft = draft.now(remedy.tried(Cure::Range));
        }
        None => {}
    }
    draft.proper(lasting_sysctls()).proper(Remedy::advice(
        "in Kubernetes: `fourtuple fix --print kubernetes`",
        "the range as a sysctl of the pod",
    ))
}
