use fourtuple_record::Severity;
use fourtuple_record::snapshot::Snapshot;

use crate::draft::{Draft, Remedy};
use crate::remedies::wider_range;
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted, doing};

pub(super) const RULE: Rule = Rule {
    id: "L02",
    title: "many sockets share each local port",
    source: "sock_diag(7), net.ipv4.ip_local_port_range",
    threshold: Some(Threshold { default: 1000.0, unit: "sockets for each usable port" }),
    explanation: &[
        "All sockets with the same local port are in one list (struct inet_bind_bucket; since Linux 6.1 also struct inet_bind2_bucket, \
         for port and address). connect() without a port does not walk the list. bind() with a port and SO_REUSEADDR walks it to look for \
         a conflict (inet_csk_bind_conflict), under the lock of the bucket, unless all sockets of the port were bound with SO_REUSEADDR \
         too.",
        "Measured with Linux 6.18 on a port that connect() had chosen, time of one bind() to the same address and port: 0.6 us with 1 \
         socket, 1.4 us with 100, 8.7 us with 1,000, 49 us with 3,000, 500 us with 12,000. connect() took 3 us throughout.",
        "The rule divides the outgoing connections of the namespace by the usable ports, which is the mean length of the lists. Accepted \
         connections, all of which have the port of their listener, do not count: they concern only a bind() to this port.",
        "What helps: a wider net.ipv4.ip_local_port_range; connect() that chooses the port instead of bind() with a port \
         (IP_BIND_ADDRESS_NO_PORT, IP_LOCAL_PORT_RANGE); `fourtuple fix ports` binds by port only where a tuple is nearly full. What does \
         not help: more destinations, which make the lists longer.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let connections = snapshot.connections.seen()?;
    let usable = u64::from(snapshot.ports.seen()?.usable()).max(1);
    let listed = connections.tuples.iter().flat_map(|tuple| tuple.states.values());
    let outgoing: u64 = listed.chain(connections.tuples_left_out_states.values()).sum();
    let mean = outgoing as f64 / usable as f64;
    if mean < limit {
        return Ok(Vec::new());
    }
    let verdict = format!(
        "{} {}, {} for each: a bind() to such a port walks them all",
        doing(outgoing, "outgoing connection", "share"),
        counted(usable, "port"),
        count(mean as u64)
    );
    let mut draft = Draft::new(Severity::Notice, "bind buckets", verdict);
    draft.now.extend(wider_range(snapshot, None));
    Ok(vec![
        draft
            .proper(Remedy::advice(
                "connect() without bind() to a port (IP_BIND_ADDRESS_NO_PORT); `fourtuple fix --print nginx` and others print the setting",
                "the lists are not walked",
            )),
    ])
}
