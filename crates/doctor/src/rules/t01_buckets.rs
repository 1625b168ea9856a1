use fourtuple_record::Severity;
use fourtuple_record::snapshot::Snapshot;

use crate::command::{Content, Setting};
use crate::draft::{Draft, Remedy};
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{count, counted, doing, percent};

pub(super) const RULE: Rule = Rule {
    id: "T01",
    title: "the TIME_WAIT sockets come near net.ipv4.tcp_max_tw_buckets",
    source: "/proc/net/sockstat (tw), net.ipv4.tcp_max_tw_buckets",
    threshold: Some(Threshold { default: 80.0, unit: "% of net.ipv4.tcp_max_tw_buckets" }),
    explanation: &[
        "A network namespace has at most net.ipv4.tcp_max_tw_buckets sockets in TIME_WAIT (inet_twsk_alloc). Beyond, a connection that is closed skips \
         TIME_WAIT (tcp_time_wait), and TcpExt.TCPTimeWaitOverflow counts it: rule T02.",
        "TIME_WAIT protects the next connection with the same addresses and ports from late segments of the previous one (RFC 9293, section 3.6.1), \
         and answers a retransmitted FIN. Without it a peer can get RST where it waits for an ACK, and with sequence numbers that happen to match, \
         old data.",
        "What helps: a higher limit. A socket in TIME_WAIT takes about 250 bytes, so that 262,144 of them take 64 MiB at most. Connections that are used \
         again help too.",
        "What does not help: a lower limit as a means to get rid of TIME_WAIT; net.ipv4.tcp_fin_timeout, which is another state.",
    ],
    check,
};

const NAME: &str = "net.ipv4.tcp_max_tw_buckets";

fn check(snapshot: &Snapshot, percent_limit: f64) -> Checked {
    let time_wait = snapshot.memory.seen()?.time_wait;
    let limit = snapshot.number(NAME)?;
    if time_wait == 0 || (time_wait as f64) < limit as f64 * percent_limit / 100.0 {
        return Ok(Vec::new());
    }
    let verdict = format!(
        "{} in TIME_WAIT, {} of the {} that {NAME} allows",
        doing(time_wait, "socket", "are"),
        percent(time_wait, limit),
        count(limit)
    );
    Ok(vec![
        Draft::new(Severity::Warning, NAME, verdict)
            .because("beyond the limit connections skip TIME_WAIT (T02)")
            .now(raise(time_wait, limit))
            .proper(lasting(time_wait, limit)),
    ])
}

/// A limit of twice the sockets, at least the kernel's usual 262,144.
fn higher(time_wait: u64, limit: u64) -> u64 {
    (time_wait.max(limit) * 2).next_power_of_two().max(262_144)
}

/// Raises the limit.
pub(super) fn raise(time_wait: u64, limit: u64) -> Remedy {
    let higher = higher(time_wait, limit);
    let effect =
        format!("room for {}, at most {} MiB of memory", counted(higher, "socket"), (higher * 256) >> 20);
    Remedy::sysctl(NAME, higher.to_string(), effect)
}

/// Raises the limit at boot.
pub(super) fn lasting(time_wait: u64, limit: u64) -> Remedy {
    Remedy::kept(
        "91-time-wait",
        Content::Settings(vec![Setting::new(NAME, higher(time_wait, limit).to_string())]),
        "the limit also after a restart of the host",
    )
}
