use fourtuple_record::Severity;
use fourtuple_record::snapshot::Snapshot;

use crate::draft::{Draft, What};
use crate::rule::{Checked, Rule};
use crate::rules::t01_buckets::{lasting, raise};
use crate::words::{count, counted};

pub(super) const RULE: Rule = Rule {
    id: "T02",
    title: "TIME_WAIT is cut short",
    source: "/proc/net/netstat (TcpExt.TCPTimeWaitOverflow), /proc/net/sockstat (tw), net.ipv4.tcp_max_tw_buckets",
    threshold: None,
    explanation: &[
        "TcpExt.TCPTimeWaitOverflow counts connections that skipped TIME_WAIT, because the namespace had net.ipv4.tcp_max_tw_buckets such sockets \
         already or no memory for one (tcp_time_wait).",
        "The socket is gone at once. A FIN that the peer sends again is answered with RST, which programs see as ECONNRESET after a complete exchange. \
         Late segments can reach a new connection with the same addresses and ports. As the ports are free sooner, the overflow hides exhausted \
         ports (P01), sometimes on purpose.",
        "The rule has a finding if the counter grows, or if it is not 0 and the sockets are at half of the limit again.",
        "What helps: a higher net.ipv4.tcp_max_tw_buckets (about 250 bytes of memory for each socket), fewer connections, net.ipv4.tcp_tw_reuse \
         instead of the overflow where ports are short: it checks timestamps.",
        "What does not help: SO_LINGER with time 0, which also skips TIME_WAIT and sends RST to the peer.",
    ],
    check,
};

fn check(snapshot: &Snapshot, _: f64) -> Checked {
    let overflow = snapshot.counter("TcpExt.TCPTimeWaitOverflow")?;
    let time_wait = snapshot.memory.seen()?.time_wait;
    let limit = snapshot.number("net.ipv4.tcp_max_tw_buckets")?;
    let is_full = time_wait >= limit;
    let verdict = if overflow.during > 0 {
        let seconds = snapshot.interval_ns as f64 / 1e9;
        format!(
            "{} skipped TIME_WAIT in {seconds:.1} s: net.ipv4.tcp_max_tw_buckets is {}",
            counted(overflow.during, "connection"),
            count(limit)
        )
    } else if overflow.total > 0 && time_wait * 2 >= limit {
        format!(
            "{} skipped TIME_WAIT so far: net.ipv4.tcp_max_tw_buckets is {}, with {} in TIME_WAIT",
            counted(overflow.total, "connection"),
            count(limit),
            counted(time_wait, "socket")
        )
    } else {
        return Ok(Vec::new());
    };
    // With room for more sockets no further connection skips the state.
    let severity = if overflow.during > 0 && is_full { Severity::Warning } else { Severity::Notice };
    Ok(vec![
        Draft::new(severity, "TIME_WAIT", verdict)
            .explains(What::Counter("TcpExt.TCPTimeWaitOverflow"))
            .because(format!("{} in TIME_WAIT", counted(time_wait, "socket")))
            .because(format!(
                "{} since the namespace was created",
                counted(overflow.total, "such connection")
            ))
            .now(raise(time_wait, limit))
            .proper(lasting(time_wait, limit)),
    ])
}
