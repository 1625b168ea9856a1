use fourtuple_record::Severity;
use fourtuple_record::snapshot::{Snapshot, UdpSocketView};

use crate::accepting::{holders, stopped, time};
use crate::command::Scope;
use crate::datagram::Counted;
use crate::draft::{Draft, Remedy, What};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{self, count, percent, process};

pub(super) const RULE: Rule = Rule {
    id: "U01",
    title: "a UDP socket drops datagrams",
    source: "sock_diag(7) (sk_drops and sk_rcvbuf of each socket, read twice); Udp.InErrors and RcvbufErrors of /proc/net/snmp and snmp6",
    threshold: Some(Threshold { default: 1.0, unit: "drops in the interval" }),
    explanation: &[
        "The kernel drops a datagram if the receive queue of the socket is full: the memory of the queued packets exceeds sk_rcvbuf \
         (__udp_enqueue_schedule_skb). The sender does not learn of it. sk_drops counts the drops of each socket, Udp.RcvbufErrors those \
         of the network namespace.",
        "Linux 6.18 has a second queue for each NUMA node in front of the receive queue; drops there are in sk_drops, but in no counter \
         of /proc/net/snmp until Linux 7.0. Tools that read only the counters do not see them. The rule compares both.",
        "Udp.InErrors without RcvbufErrors are datagrams with a wrong checksum, and datagrams that a filter of the socket refuses on purpose \
         (SO_ATTACH_FILTER, udp_queue_rcv_one_skb). If these explain all drops, the rule has no finding.",
        "What helps: a process that reads faster (recvmmsg, UDP_GRO, a thread that only reads); several sockets with SO_REUSEPORT, and \
         `fourtuple fix accept --select` for flows that the hash puts on one of them; a greater SO_RCVBUF, up to net.core.rmem_max, against \
         bursts. What does not help: net.ipv4.udp_mem, the limit of the whole host, unless Udp.MemErrors grows; net.core.rmem_max alone, \
         because the program must ask for the buffer; net.core.rmem_default for sockets that exist.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let udp = snapshot.udp.seen()?;
    if !udp.sockets.is_empty() && udp.sockets.iter().all(|socket| socket.drops.is_none()) {
        return Err("sock_diag(7) of this kernel does not tell the drops of a socket (INET_DIAG_SKMEMINFO)"
            .to_owned());
    }
    let drops = |socket: &UdpSocketView| socket.drops.map_or(0, |drops| drops.during);
    let total: u64 = udp.sockets.iter().map(drops).sum();
    let counted = Counted::of(snapshot);
    if total <= counted.refused() {
        return Ok(Vec::new());
    }
    let dropping = udp.sockets.iter().filter(|socket| drops(socket) as f64 >= limit);
    Ok(dropping.map(|socket| draft(snapshot, socket, drops(socket), total, &counted)).collect())
}

fn draft(snapshot: &Snapshot, socket: &UdpSocketView, drops: u64, total: u64, counted: &Counted) -> Draft {
    let server = holders(&socket.owners);
    let interval = time(snapshot.interval_ns);
    let limit = socket.limit_bytes.unwrap_or(0);
    let verdict = format!(
        "the UDP socket {} of {server} dropped {} in {interval}; its queue holds {} of {} bytes ({})",
        socket.local,
        words::counted(drops, "datagram"),
        count(socket.queued_bytes),
        count(limit),
        percent(socket.queued_bytes, limit)
    );
    let seen = if total > counted.errors {
        format!("{} of the drops are in no counter of /proc/net/snmp", count(total - counted.errors))
    } else {
        "the counters have them all".to_owned()
    };
    let mut draft =
        Draft::new(Severity::Warning, format!("{} (socket {:#x})", socket.local, socket.cookie), verdict)
            .because(format!(
                "all sockets: {}; Udp.InErrors {}, Udp.RcvbufErrors {}: {seen}",
                words::counted(total, "drop"),
                count(counted.errors),
                count(counted.full)
            ));
    draft = draft.explains(What::Drops(socket.cookie));
    for counter in ["Udp.RcvbufErrors", "Udp6.RcvbufErrors", "Udp.MemErrors", "Udp6.MemErrors"] {
        draft = draft.explains_up_to(What::Counter(counter), drops);
    }
    if let Some(owner) = stopped(snapshot, &socket.owners) {
        draft = draft.because(format!("{} is stopped by a signal (state T)", process(owner))).now(
            Remedy::privileged(
                Scope::Process,
                format!("kill -CONT {}", owner.pid),
                "the process reads again",
            ),
        );
    }
    // The kernel doubles the number of SO_RCVBUF for its own overhead (sock_setsockopt); a socket that did not ask has the default as it is.
    let is_default = snapshot.number("net.core.rmem_default").is_ok_and(|default| default == limit);
    let asked = if is_default { 0 } else { limit / 2 };
    let has = match is_default {
        true => format!("the socket did not ask and has net.core.rmem_default, {}", count(limit)),
        false => format!("the socket asked for {}", count(asked)),
    };
    let buffer = match snapshot.number("net.core.rmem_max") {
        Ok(most) if asked < most => Remedy::advice(
            format!(
                "{server}: a greater SO_RCVBUF, up to {} (net.core.rmem_max; Unbound: `so-rcvbuf`), and a restart; {has}",
                count(most)
            ),
            "room for bursts, not for a load that the process cannot read",
        ),
        _ => {
            let wanted = asked.max(1 << 16) * 8;
            Remedy::sysctl("net.core.rmem_max", wanted.to_string(), format!(
                    "{server} may ask for SO_RCVBUF {wanted} after a restart, against bursts only; in a container, to be set on the host"
                ),).unproven()
        }
    };
    draft.now(buffer).proper(Remedy::advice(
        format!("{server}: read in batches (recvmmsg, UDP_GRO), or use several sockets with SO_REUSEPORT"),
        "the queue is emptied faster",
    ))
}
