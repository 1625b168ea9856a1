use std::collections::BTreeMap;

use fourtuple_record::Severity;
use fourtuple_record::snapshot::{HeldPort, Snapshot};

use crate::budget::Budget;
use crate::draft::{Draft, Remedy, What};
use crate::errno;
use crate::remedies::wider_range;
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, percent, process};

pub(super) const RULE: Rule = Rule {
    id: "P06",
    title: "bind() holds ports of the range",
    source: "sock_diag(7) (inet_diag, state BOUND_INACTIVE since Linux 6.8), descriptors in /proc/PID/fd",
    threshold: Some(Threshold { default: 10.0, unit: "% of the range" }),
    explanation: &[
        "A socket that called bind() with a port or with port 0, and neither connect() nor listen(), holds its port. connect() of every program in the \
         network namespace passes over the port for all destinations (the test of fastreuse in __inet_hash_connect), also if the socket is \
         bound to another address. One program can so take the ports of all others.",
        "Programs that look for a free port with bind() and keep the socket, pools of sockets that are bound in advance, and connects that never \
         happen after bind() are the usual causes. Before Linux 6.18 a port stays closed until all its sockets are gone, also when the \
         socket that called bind() is closed and connections share its port.",
        "What helps: bind() right before connect(), with IP_BIND_ADDRESS_NO_PORT (24), so that connect() chooses the port; closing the sockets; a \
         restart of the program. `fourtuple run --via bound` sets the option for programs that cannot be changed.",
        "What does not help: SO_REUSEADDR of the other programs, because connect() does not look at it in its search.",
        "UDP sockets have ports of their own and are not counted.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let range = snapshot.ports.seen()?.usable();
    let connections = snapshot.connections.seen()?;
    let bound: Vec<&HeldPort> = connections.held.iter().filter(|held| held.kind == "bound").collect();
    let number = u64::from(connections.held_bound);
    if number == 0 || (number as f64) < f64::from(range) * limit / 100.0 {
        return Ok(Vec::new());
    }
    let mut processes: BTreeMap<(String, u32), u64> = BTreeMap::new();
    for held in &bound {
        let key = held
            .owner
            .as_ref()
            .map_or_else(|| ("unknown processes".to_owned(), 0), |owner| (process(owner), owner.pid));
        *processes.entry(key).or_default() += 1;
    }
    let mut processes: Vec<((String, u32), u64)> = processes.into_iter().collect();
    processes.sort_by_key(|(_, ports)| std::cmp::Reverse(*ports));
    let most = processes.first().map_or_else(String::new, |((name, _), _)| format!(", most by {name}"));
    let verdict = format!(
        "bind() holds {} of {} ports without a connection{most}: no connect() of this host can take them",
        count(number),
        count(range.into())
    );
    let share = number * 100 / u64::from(range.max(1));
    let largest = connections.tuples.first().map(|tuple| Budget::of(snapshot, tuple)).transpose()?;
    let hurts = share >= 50 || largest.is_some_and(|budget| budget.is_past(90.0));
    let severity = if hurts { Severity::Warning } else { Severity::Notice };
    let mut draft = Draft::new(severity, "bind()", verdict)
        .explains(What::calls("bind", errno::EADDRINUSE))
        .explains(What::calls("connect", errno::EADDRNOTAVAIL));
    for ((name, _), ports) in processes.iter().take(5) {
        let example =
            bound.iter().find(|held| held.owner.as_ref().is_none_or(|owner| process(owner) == *name));
        let example =
            example.map_or_else(String::new, |held| format!(", such as {}:{}", held.address, held.port));
        let share = percent(*ports, bound.len() as u64);
        draft = draft.because(format!(
            "{name}: {} of the {} listed ports ({share}){example}",
            count(*ports),
            bound.len()
        ));
    }
    draft.now.extend(wider_range(snapshot, connections.tuples.first()));
    Ok(vec![
        draft
            .proper(Remedy::advice(
                "in the program: setsockopt(fd, IPPROTO_IP, 24 /* IP_BIND_ADDRESS_NO_PORT */, &(int){1}, 4) before bind(), and connect() right after",
                "connect() chooses the port and shares it with other destinations",
            ))
            .proper(Remedy::advice(
                "restart the program with `fourtuple run --via bound -- PROGRAM`",
                "frees the ports; bind() to port 0 then takes no port before connect()",
            )),
    ])
}
