use fourtuple_record::snapshot::merged;

use crate::print::snapshot::Snapshot;
use crate::print::template::{fill, heading};

/// The first port that needs no privilege, and the last port.
const WIDEST: (u16, u16) = (1024, 65_535);
/// The kernel's default on hosts with enough memory (`inet_hashinfo2_init`, `tcp_init`).
const TIME_WAIT_LIMIT: u32 = 262_144;

pub(super) fn text(snapshot: &Snapshot) -> String {
    let reserved = reserved(snapshot);
    let wide = Snapshot { low: WIDEST.0, high: WIDEST.1, reserved: reserved.clone(), ..snapshot.clone() };
    fill(
        TEMPLATE,
        &[
            ("heading", &heading(snapshot, "#")),
            ("low", &WIDEST.0.to_string()),
            ("high", &WIDEST.1.to_string()),
            ("usable", &wide.usable().to_string()),
            ("now", &snapshot.usable().to_string()),
            ("reserved", &reserved_line(snapshot, &reserved)),
            ("reuse", &reuse(snapshot)),
            ("limit", &limit(snapshot, wide.usable())),
        ],
    )
}

const TEMPLATE: &str = r#"# sysctl: /etc/sysctl.d/90-fourtuple.conf, then `sysctl --system`. Values are for a network namespace: containers have their own.
@heading@
# The first port that needs no privilege to the last one: @usable@ ports instead of @now@ (an even number: a search by parity can lose one
# port of an odd range).
net.ipv4.ip_local_port_range = @low@ @high@
# Reserved today, and ports with a TCP listener now, so that connect() does not take the port of a server while the server restarts. Add
# ports of servers that do not run now, and of UDP. bind() by number ignores this list.
@reserved@
@reuse@
@limit@
# Often named, but without effect on source ports:
# net.ipv4.tcp_fin_timeout: time in FIN_WAIT_2. TIME_WAIT lasts 60 s, a constant (TCP_TIMEWAIT_LEN).
# net.ipv4.tcp_tw_recycle: removed in Linux 4.12; before, it refused clients behind NAT.
# What no sysctl can do: end the long search of connect() beyond half of the range. A socket option does (fourtuple fix --print go, envoy,
# python, netty), or `fourtuple fix ports` for running programs.
"#;

/// Returns the reserved ports and the ports of listeners in the wide range, as ascending blocks without overlap.
fn reserved(snapshot: &Snapshot) -> Vec<(u16, u16)> {
    let listeners = snapshot.listeners().iter().filter(|port| **port >= WIDEST.0).map(|port| (*port, *port));
    merged(snapshot.reserved.iter().copied().chain(listeners).collect())
}

fn reserved_line(snapshot: &Snapshot, reserved: &[(u16, u16)]) -> String {
    let blocks: Vec<String> = reserved
        .iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect();
    let unknown = match snapshot.listeners {
        Some(_) => "",
        None => "# The listeners of this host are not known: the kernel has no sock_diag.\n",
    };
    if blocks.is_empty() {
        // An empty value is an error for sysctl(8).
        return format!("{unknown}# net.ipv4.ip_local_reserved_ports = 8080\n");
    }
    format!("{unknown}net.ipv4.ip_local_reserved_ports = {}\n", blocks.join(","))
}

fn reuse(snapshot: &Snapshot) -> String {
    let now = match snapshot.time_wait_reuse {
        0 => "0, never",
        1 => "1, all destinations",
        _ => "2, the default: loopback only",
    };
    let setting = if snapshot.timestamps == 0 {
        "# Timestamps are off here, so it would have no effect.\n# net.ipv4.tcp_timestamps = 1\n# net.ipv4.tcp_tw_reuse = 1"
    } else {
        "net.ipv4.tcp_tw_reuse = 1"
    };
    format!(
        "# connect() uses a port in TIME_WAIT again after 1 s instead of 60 s, if both sides have TCP timestamps (net.ipv4.tcp_timestamps, here {});\n\
         # now {now}. For clients that close first. The search still passes over each of these ports.\n{setting}\n",
        snapshot.timestamps
    )
}

/// Returns the line for net.ipv4.tcp_max_tw_buckets; as a comment where the host has enough.
fn limit(snapshot: &Snapshot, usable: u32) -> String {
    match snapshot.time_wait_limit {
        Some(now) if now >= usable => format!(
            "# net.ipv4.tcp_max_tw_buckets is {now}: enough for the {usable} ports of a source and a destination. Above it the kernel ends TIME_WAIT\n\
             # at once, which frees ports but lets old segments reach a new connection. Do not lower it.\n"
        ),
        _ => format!(
            "# Fewer than the {usable} ports of a source and a destination; above it the kernel ends TIME_WAIT at once, and old segments can reach a new\n\
             # connection.\nnet.ipv4.tcp_max_tw_buckets = {TIME_WAIT_LIMIT}\n"
        ),
    }
}
