use fourtuple_record::Severity;
use fourtuple_record::snapshot::Snapshot;

use crate::accepting::{during, time};
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule};
use crate::words::counted;

pub(super) const RULE: Rule = Rule {
    id: "A06",
    title: "a full accept queue resets connections",
    source: "net.ipv4.tcp_abort_on_overflow, TcpExt.ListenOverflows of /proc/net/netstat",
    threshold: None,
    explanation: &[
        "With net.ipv4.tcp_abort_on_overflow=1 the kernel answers the last ACK of a handshake with RST if the accept queue is full \
         (tcp_check_req). The client sees ECONNRESET after a connect() that succeeded. With 0, the default, the kernel drops the ACK, and \
         the connection is established when the SYN-ACK is sent again and the queue has room by then.",
        "The setting turns a short burst into errors. It is useful only where a client shall try another server at once.",
        "What helps: net.ipv4.tcp_abort_on_overflow=0, and what helps against full accept queues (A01). What does not help: SYN cookies, \
         because the reset concerns complete handshakes.",
    ],
    check,
};

fn check(snapshot: &Snapshot, _limit: f64) -> Checked {
    if snapshot.number("net.ipv4.tcp_abort_on_overflow")? == 0 {
        return Ok(Vec::new());
    }
    let overflows = during(snapshot, "TcpExt.ListenOverflows");
    let draft = if overflows > 0 {
        let verdict = format!(
            "net.ipv4.tcp_abort_on_overflow is 1, and accept queues were full {} in {}: a last ACK then gets RST",
            counted(overflows, "time"),
            time(snapshot.interval_ns)
        );
        Draft::new(Severity::Critical, "net.ipv4.tcp_abort_on_overflow", verdict)
    } else {
        let verdict =
            "net.ipv4.tcp_abort_on_overflow is 1: a burst that fills an accept queue resets connections";
        Draft::new(Severity::Notice, "net.ipv4.tcp_abort_on_overflow", verdict)
    };
    Ok(vec![draft.now(Remedy::sysctl(
        "net.ipv4.tcp_abort_on_overflow",
        "0",
        "a full accept queue delays connections instead of resetting them",
    ))])
}
