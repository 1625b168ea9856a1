use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Listener, Snapshot};

use crate::accepting::{acceptors, during, groups, is_left_behind, subject, time};
use crate::draft::{Draft, Remedy, What};
use crate::rule::{Checked, Rule};
use crate::words::{count, counted};

pub(super) const RULE: Rule = Rule {
    id: "B04",
    title: "a reload loses the connections of a queue",
    source: "sock_diag(7) (sk_ack_backlog, read twice), /proc/PID/stat (start time), net.ipv4.tcp_migrate_req, TcpExt.TCPMigrateReqFailure",
    threshold: None,
    explanation: &[
        "When a listener is closed, the kernel resets the connections that wait in its accept queue (inet_csk_listen_stop), and drops its \
         handshakes in progress. During a reload with SO_REUSEPORT the new processes have listeners at the same address already; the \
         clients of the old queue get ECONNRESET all the same.",
        "With net.ipv4.tcp_migrate_req=1 the kernel moves these connections and handshakes to another listener of the group \
         (reuseport_migrate_sock, Linux 5.14). The value is read when the listener is closed, so that it may be set during the reload. \
         TcpExt.TCPMigrateReqFailure counts connections that could not be moved.",
        "The rule has a finding if a listener with waiting connections, which did not become fewer, belongs to processes that started at \
         least 1 s before the processes of all other listeners of the address, and net.ipv4.tcp_migrate_req is 0; or if connections could not be \
         moved during the interval.",
        "What helps: net.ipv4.tcp_migrate_req=1; `fourtuple fix accept`, whose selector moves connections too; a server that accepts until \
         its queue is empty before it closes the listener, or that hands its listeners to the new process (HAProxy: expose-fd listeners; \
         systemd: socket activation). What does not help: a longer grace period for connections that are accepted already.",
    ],
    check,
};

fn check(snapshot: &Snapshot, _limit: f64) -> Checked {
    let listeners = snapshot.listeners.seen()?;
    let failed = during(snapshot, "TcpExt.TCPMigrateReqFailure");
    let mut drafts = Vec::new();
    if failed > 0 {
        let verdict = format!(
            "{} of closed listeners could not be moved to another listener in {}",
            counted(failed, "connection"),
            time(snapshot.interval_ns)
        );
        let draft = Draft::new(Severity::Warning, "migration", verdict)
            .explains(What::Counter("TcpExt.TCPMigrateReqFailure"));
        drafts.push(draft.proper(Remedy::advice(
            "let the server empty its accept queues before it closes its listeners, and raise the backlog of the new listeners",
            "the new queues have room",
        )));
    }
    // A kernel before Linux 5.14 has no such sysctl, and never moves a connection.
    let migrates = snapshot.number("net.ipv4.tcp_migrate_req").unwrap_or(0);
    if migrates == 0 {
        for group in groups(listeners) {
            let old = group.iter().filter(|member| is_left_behind(snapshot, member, &group));
            drafts.extend(old.map(|member| draft(snapshot, member, &group)));
        }
    }
    Ok(drafts)
}

fn draft(snapshot: &Snapshot, member: &Listener, group: &[&Listener]) -> Draft {
    let successor = group.iter().find(|other| other.cookie != member.cookie);
    let verdict = format!(
        "{} at {} {} for {}, which is older than {} and does not accept: they are reset when it closes its listener",
        counted(member.waiting.into(), "connection"),
        member.address,
        if member.waiting == 1 { "waits" } else { "wait" },
        acceptors(snapshot, member),
        successor.map_or_else(String::new, |other| acceptors(snapshot, other))
    );
    Draft::new(Severity::Warning, subject(member), verdict)
        .explains(What::Queue(member.cookie))
        .because(format!("its queue held {} at the first reading", count(member.waiting_before.into())))
        .now(Remedy::sysctl("net.ipv4.tcp_migrate_req", "1", "a closed listener passes its queue on to the others"))
        .proper(Remedy::advice(
            "net.ipv4.tcp_migrate_req = 1 in a file of /etc/sysctl.d, or a server that hands its listeners to the new process",
            "reloads lose no connection",
        ))
}
