use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Snapshot, UdpSocketView};

use crate::accepting::holders;
use crate::datagram::groups;
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule};
use crate::words::count;

pub(super) const RULE: Rule = Rule {
    id: "U02",
    title: "a connected UDP socket stops the balancing of its group",
    source: "sock_diag(7) (local address and peer of each UDP socket)",
    threshold: None,
    explanation: &[
        "The kernel distributes datagrams over the sockets of a SO_REUSEPORT group by a hash of the 4-tuple or by a BPF program. Once a \
         socket of the group has called connect(), the group has the mark has_conns (reuseport_has_conns_set), and the lookup compares \
         all sockets one by one (udp4_lib_lookup2), so that datagrams of the connected peer reach the connected socket. The other \
         datagrams then all reach the same socket: measured with Linux 6.18, 20,000 of 20,000 datagrams at one of four sockets.",
        "A selector by BPF does not help: the kernel does not use its choice in such a group. The comparison also costs time for each \
         datagram.",
        "What helps: connected sockets on a port or an address that the group does not have; sendto() and recvfrom() instead of connect() \
         in the group. What does not help: more sockets in the group; fourtuple fix accept, which attaches a selector.",
    ],
    check,
};

fn check(snapshot: &Snapshot, _limit: f64) -> Checked {
    let udp = snapshot.udp.seen()?;
    let mut drafts = Vec::new();
    for group in groups(udp) {
        let Some(first) = group.first() else { continue };
        // connect() replaces the unspecified local address of a socket by a specific one.
        let is_member = |socket: &&UdpSocketView| {
            socket.remote.is_some()
                && socket.local.port() == first.local.port()
                && socket.local.is_ipv4() == first.local.is_ipv4()
                && socket.interface == first.interface
                && (socket.local == first.local || first.local.ip().is_unspecified())
        };
        let connected: Vec<&UdpSocketView> = udp.sockets.iter().filter(is_member).collect();
        if !connected.is_empty() {
            drafts.push(draft(&group, &connected));
        }
    }
    Ok(drafts)
}

fn draft(group: &[&UdpSocketView], connected: &[&UdpSocketView]) -> Draft {
    let (first, other) = (group[0], connected[0]);
    let peer = other.remote.map_or_else(String::new, |peer| peer.to_string());
    let verdict = format!(
        "{} of {} is connected to {peer} and shares {} with {} unconnected sockets of {}: one of these gets all other datagrams",
        match connected.len() {
            1 => "a UDP socket".to_owned(),
            number => format!("one of {} UDP sockets", count(number as u64)),
        },
        holders(&other.owners),
        first.local,
        group.len(),
        holders(&first.owners)
    );
    let mut draft = Draft::new(Severity::Warning, first.local.to_string(), verdict);
    let queues: Vec<String> = group.iter().take(16).map(|socket| count(socket.queued_bytes)).collect();
    draft = draft.because(format!("bytes in the queues of the unconnected sockets: {}", queues.join(", ")));
    draft.proper(Remedy::advice(
        format!(
            "{}: no connect() on sockets of the group; sendto() and recvfrom(), or another local port",
            holders(&other.owners)
        ),
        "the kernel chooses by hash or selector again",
    ))
}
