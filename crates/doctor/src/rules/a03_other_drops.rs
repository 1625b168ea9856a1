use fourtuple_record::Severity;
use fourtuple_record::snapshot::Snapshot;

use crate::accepting::{drops as drops_of, during, flooded, other_drops, time, up_to};
use crate::draft::{Draft, Remedy, What};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted, segments};

pub(super) const RULE: Rule = Rule {
    id: "A03",
    title: "connections are dropped although the accept queue has room",
    source: "TcpExt.ListenDrops, ListenOverflows and TCPReqQFullDrop of /proc/net/netstat",
    threshold: Some(Threshold { default: 1.0, unit: "drops in the interval" }),
    explanation: &[
        "TcpExt.ListenDrops counts all SYNs and last ACKs that listeners dropped (tcp_listendrop), TcpExt.ListenOverflows the drops that met \
         a full accept queue (sk_acceptq_is_full). The difference has other causes, against which neither accept() nor the backlog helps.",
        "The other causes, in the order of tcp_conn_request: the SYN queue is full and SYN cookies are off (TCPReqQFullDrop); no memory \
         for the request (inet_reqsk_alloc); no route back to the client; SYN cookies are off and three quarters of \
         net.ipv4.tcp_max_syn_backlog are in use, so that only clients are served whose earlier connections the kernel remembers \
         (tcp_peer_is_proven); no memory for the new socket in tcp_v4_syn_recv_sock; an ICMP error for the client (tcp_req_err); a SYN to \
         a broadcast or multicast address.",
        "What helps: net.ipv4.tcp_syncookies=1 if it is 0; a route back to the clients (ip route get ADDRESS); memory (F02). What does \
         not help: a greater net.core.somaxconn.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let drops = snapshot.counter("TcpExt.ListenDrops")?.during;
    let overflows = snapshot.counter("TcpExt.ListenOverflows")?.during;
    let full = during(snapshot, "TcpExt.TCPReqQFullDrop");
    // A05 has the drops of a full SYN queue.
    let others = other_drops(snapshot);
    if (others as f64) < limit || flooded(snapshot).is_some() {
        return Ok(Vec::new());
    }
    let interval = time(snapshot.interval_ns);
    let by_listener: Vec<String> = snapshot
        .listeners
        .seen()
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .map(|listener| (listener.address, drops_of(snapshot, listener)))
        .filter(|(_, drops)| *drops > 0)
        .map(|(address, drops)| format!("{address} dropped {}{}", up_to(snapshot), count(drops)))
        .collect();
    let verdict = format!(
        "{} {} dropped in {interval} although the accept queue had room",
        segments(others),
        if others == 1 { "was" } else { "were" }
    );
    let mut draft = Draft::new(Severity::Warning, "drops without overflow", verdict).because(format!(
        "ListenDrops {}, ListenOverflows {}, TCPReqQFullDrop {}",
        count(drops),
        count(overflows),
        count(full)
    ));
    draft = draft
        .explains_up_to(What::Counter("TcpExt.ListenDrops"), others)
        .explains(What::Counter("TcpExt.TCPSynRetrans"));
    for listener in snapshot.listeners.seen().map(Vec::as_slice).unwrap_or_default() {
        draft = draft.explains(What::Drops(listener.cookie));
    }
    if !by_listener.is_empty() {
        draft = draft.because(by_listener.join(", "));
    }
    if let Ok(memory) = snapshot.memory.seen()
        && memory.limits_pages[1] > 0
    {
        draft = draft.because(format!(
            "TCP memory: {}, pressure from {} on",
            counted(memory.pages, "page"),
            count(memory.limits_pages[1])
        ));
    }
    if snapshot.number("net.ipv4.tcp_syncookies") == Ok(0) {
        draft = draft
            .because("net.ipv4.tcp_syncookies is 0: a quarter of net.ipv4.tcp_max_syn_backlog is kept for known clients")
            .now(Remedy::sysctl("net.ipv4.tcp_syncookies", "1", "SYNs are answered when the SYN queue is full").unproven());
    }
    Ok(vec![draft.proper(Remedy::advice(
        "look for a missing route back to the clients (ip route get ADDRESS), and for memory (`fourtuple explain F02`)",
        "the SYN is answered",
    ))])
}
