use crate::print::snapshot::Snapshot;
use crate::print::template::{fill, heading, lines};

pub(super) fn text(snapshot: &Snapshot) -> String {
    let (first, last) = snapshot.free_block();
    let destination = snapshot.destination().to_string();
    let servers = if snapshot.sources.is_empty() {
        format!(
            "    # No source address is known (--source CIDR): without an address HAProxy ignores a port range.\n    \
             server direct {destination} pool-purge-delay 60s\n"
        )
    } else {
        lines(&snapshot.sources, |number, source| {
            let source = std::net::SocketAddr::new(*source, first);
            format!(
                "    server source-{} {destination} source {source}-{last} pool-purge-delay 60s",
                number + 1
            )
        })
    };
    fill(
        TEMPLATE,
        &[
            ("heading", &heading(snapshot, "#")),
            ("destination", &destination),
            ("note", snapshot.example_note()),
            ("range", &format!("{first}-{last}")),
            ("servers", &servers),
        ],
    )
}

const TEMPLATE: &str = r#"# HAProxy, source ports toward @destination@@note@.
@heading@
backend fourtuple
    mode http
    timeout connect 5s
    timeout server 60s
    # Requests of other clients use a kept connection too, if it has been used again before: a request then needs no connect().
    http-reuse aggressive
    # A server line has one source address, so there is a line for each address. The range @range@ is the largest block of this
    # host's range without reserved ports and listeners: HAProxy binds by number and does not respect reserved ports. It takes the
    # port that has been free for the longest time, so the kernel searches nothing, and a port in TIME_WAIT with timestamps is used again.
    # pool-purge-delay: HAProxy closes idle connections at this interval, by default each 5 s, and their ports are then in TIME_WAIT.
@servers@
# What HAProxy cannot do: `source 0.0.0.0:@range@` has no effect and no warning, as without an address HAProxy does not bind
# (haproxy#2204); several addresses in one server line (haproxy#1520); IP_LOCAL_PORT_RANGE (option 51).
# The search of other programs on this host passes over ports that HAProxy uses. `fourtuple fix ports` leaves bound sockets alone.
"#;
