use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Snapshot, UdpSocketView};

use crate::accepting::{holders, time};
use crate::datagram::groups;
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule};
use crate::words::{count, counted};

pub(super) const RULE: Rule = Rule {
    id: "U02",
    title: "a connected UDP socket takes the datagrams of a peer out of its group",
    source: "sock_diag(7) (local address, peer, queue and sk_drops of each UDP socket)",
    threshold: None,
    explanation: &[
        "The kernel distributes datagrams over the unconnected sockets of a SO_REUSEPORT group by a hash of the 4-tuple or by a BPF \
         program. A socket of the group that has called connect() matches its peer better than all others (compute_score, \
         udp4_lib_lookup2): it gets all datagrams of this peer, and no other datagram. Hash and program have no say in it.",
        "Measured with Linux 6.18, 4 sockets and a program that chooses at random: of 100 datagrams of one peer 25, 26, 22 and 27 reach \
         the sockets; 100, 0, 0 and 0 once the first socket is connected to this peer. Datagrams of other peers are spread over the other \
         three. If all traffic has one 4-tuple, as in a tunnel, one connected socket switches the balancing off.",
        "The group also keeps the mark has_conns (reuseport_has_conns_set), with which the kernel compares the sockets of the group one \
         by one for each datagram; since Linux 6.6 a lookup in such a group costs 7 to 12% more.",
        "Servers with a connected socket for each client (DTLS, QUIC) do this on purpose: the rule is silent if there are more connected \
         than unconnected sockets, unless the connected ones drop. It is a notice otherwise, and a warning if a connected socket dropped \
         datagrams during the interval.",
        "What helps: sendto() and recvfrom() instead of connect() in the group, or another local port for connected sockets. What does \
         not help: more sockets in the group; a selector (`fourtuple fix accept`), which the kernel does not use for this peer.",
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
        drafts.extend(draft(snapshot, &group, &connected));
    }
    Ok(drafts)
}

fn draft(snapshot: &Snapshot, group: &[&UdpSocketView], connected: &[&UdpSocketView]) -> Option<Draft> {
    let drops_of = |socket: &UdpSocketView| socket.drops.map_or(0, |drops| drops.during);
    let drops: u64 = connected.iter().map(|socket| drops_of(socket)).sum();
    if drops == 0 && connected.len() > group.len() {
        return None;
    }
    let first = group[0];
    let busiest = connected.iter().max_by_key(|socket| (drops_of(socket), socket.queued_bytes))?;
    let peer = busiest.remote.map_or_else(String::new, |peer| peer.to_string());
    let server = holders(&busiest.owners);
    let mut verdict = format!(
        "a UDP socket of {server} is connected to {peer} and shares {} with {}: it alone gets the datagrams of this peer",
        first.local,
        counted(group.len() as u64, "unconnected socket")
    );
    if drops > 0 {
        verdict += &format!("; {} were dropped in {}", count(drops), time(snapshot.interval_ns));
    }
    let severity = if drops > 0 { Severity::Warning } else { Severity::Notice };
    let queues: Vec<String> = group.iter().take(16).map(|socket| count(socket.queued_bytes)).collect();
    Some(
        Draft::new(severity, first.local.to_string(), verdict)
            .because(format!("{} of the sockets at this port are connected", count(connected.len() as u64)))
            .because(format!(
                "bytes in the queue of the connected socket: {}, of the unconnected sockets: {}",
                count(busiest.queued_bytes),
                queues.join(", ")
            ))
            .proper(Remedy::advice(
                format!("{server}: sendto() and recvfrom() instead of connect() on sockets of the group, or another local port"),
                "hash or selector chooses for this peer too",
            )),
    )
}
