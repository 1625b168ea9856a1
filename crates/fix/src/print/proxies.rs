//! The proxies nginx, HAProxy and Envoy.

use std::net::IpAddr;

use crate::print::{PortRangeOption, Snapshot, fill, heading, lines, why_no_option};

/// Idle connections of a worker; they count against worker_connections, which is 512 by default.
const NGINX_KEPT: u32 = 128;

pub(super) fn nginx(snapshot: &Snapshot) -> String {
    let kept = NGINX_KEPT.min(snapshot.half() / snapshot.cpus.max(1)).max(1);
    fill(
        NGINX,
        &[
            ("heading", &heading(snapshot, "#")),
            ("destination", &snapshot.destination().to_string()),
            ("note", snapshot.example_note()),
            ("kept", &kept.to_string()),
            ("workers", &snapshot.cpus.to_string()),
            ("all", &(kept * snapshot.cpus).to_string()),
            ("split", &nginx_split(snapshot)),
            ("bind", &nginx_bind(snapshot)),
            ("limit", nginx_limit(snapshot)),
        ],
    )
}

const NGINX: &str = r#"# nginx, source ports toward @destination@@note@: include this file in http{}.
@heading@
upstream fourtuple {
    server @destination@;
    # Idle connections that each worker process keeps, so that a request needs no connect(); @workers@ workers keep up to @all@.
    keepalive @kept@;
    # After this number of requests nginx closes a connection first, and its port is in TIME_WAIT for 60 s. The default is 1000.
    keepalive_requests 100000;
    # Connections that are idle for this time are closed.
    keepalive_timeout 60s;
}
@split@
server {
    # An example: move the location to your server.
    listen 127.0.0.1:8080;
    location / {
        proxy_pass http://fourtuple;
        # HTTP/1.0 and `Connection: close`, the defaults of many releases, end a connection after each response.
        proxy_http_version 1.1;
        proxy_set_header Connection "";
@bind@    }
}

# What nginx cannot do: set IP_LOCAL_PORT_RANGE (option 51), which ends the long search beyond half of the ports.
@limit@
"#;

fn nginx_split(snapshot: &Snapshot) -> String {
    let Some((last, others)) = snapshot.sources.split_last() else { return String::new() };
    if others.is_empty() || !snapshot.binds() {
        return String::new();
    }
    let share = 100.0 / snapshot.sources.len() as f64;
    format!(
        "\n# Each request gets one of these source addresses at random, and each address has its own ports.\n\
         split_clients $request_id $fourtuple_source {{\n{}    *      {last};\n}}\n",
        lines(others, |_, source| format!("    {share:.2}% {source};")),
    )
}

fn nginx_bind(snapshot: &Snapshot) -> String {
    let value = match snapshot.sources.as_slice() {
        _ if !snapshot.binds() => return String::new(),
        [source] => source.to_string(),
        _ => "$fourtuple_source".to_owned(),
    };
    format!(
        "        # nginx sets IP_BIND_ADDRESS_NO_PORT (option 24) here itself: connect() chooses the port, and destinations share ports.\n        \
         proxy_bind {value};\n"
    )
}

fn nginx_limit(snapshot: &Snapshot) -> &'static str {
    if snapshot.binds() {
        "# More source addresses keep each below half; `fourtuple fix ports` leaves sockets with proxy_bind alone."
    } else {
        "# `fourtuple fix ports --unit nginx` ends it from outside, or --source CIDR here spreads connections over more addresses."
    }
}

pub(super) fn haproxy(snapshot: &Snapshot) -> String {
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
        HAPROXY,
        &[
            ("heading", &heading(snapshot, "#")),
            ("destination", &destination),
            ("note", snapshot.example_note()),
            ("range", &format!("{first}-{last}")),
            ("servers", &servers),
        ],
    )
}

const HAPROXY: &str = r#"# HAProxy, source ports toward @destination@@note@.
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

pub(super) fn envoy(snapshot: &Snapshot) -> String {
    let clusters: Vec<Option<IpAddr>> = if snapshot.sources.is_empty() {
        vec![None]
    } else {
        snapshot.sources.iter().map(|source| Some(*source)).collect()
    };
    let bodies: Vec<String> =
        clusters.iter().enumerate().map(|(n, source)| envoy_cluster(snapshot, n, *source)).collect();
    let weights =
        lines(&clusters, |number, _| format!("#   - {{ name: fourtuple-{}, weight: 1 }}", number + 1));
    fill(
        ENVOY,
        &[
            ("heading", &heading(snapshot, "#")),
            ("destination", &snapshot.destination().to_string()),
            ("note", snapshot.example_note()),
            ("clusters", bodies.concat().trim_end_matches('\n')),
            ("weights", weights.trim_end()),
        ],
    )
}

const ENVOY: &str = r#"# Envoy, source ports toward @destination@@note@.
@heading@static_resources:
  clusters:
@clusters@
# What Envoy cannot do: several source addresses of one IP version in a cluster (extra_source_addresses takes one address of the second
# IP version), so there is a cluster for each address. Route to them by weight:
#   weighted_clusters:
#     clusters:
@weights@
# Each worker thread (--concurrency) has its own connection pool for each host of each cluster.
"#;

const ENVOY_CLUSTER: &str = r#"  - name: fourtuple-@number@
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: fourtuple-@number@
      endpoints:
      - lb_endpoints:
        - endpoint:
            address:
              socket_address: { address: "@address@", port_value: @port@ }
    circuit_breakers:
      thresholds:
      # Beyond this number Envoy queues requests instead of opening connections; the default is 1024.
      - max_connections: @connections@
    upstream_bind_config:
@source@      socket_options:
      # IP_BIND_ADDRESS_NO_PORT: connect() chooses the port, not bind(), and destinations share ports. Envoy sets the option itself
      # since July 2026 (envoy#45916).
      - { description: "IP_BIND_ADDRESS_NO_PORT", level: 0, name: 24, int_value: 1, state: STATE_PREBIND }
@range@"#;

fn envoy_cluster(snapshot: &Snapshot, number: usize, source: Option<IpAddr>) -> String {
    let destination = snapshot.destination();
    let bound = source.map_or(String::new(), |source| {
        format!(
            "      # Port 0: the kernel chooses.\n      source_address: {{ address: \"{source}\", port_value: 0 }}\n"
        )
    });
    let range = match why_no_option(snapshot.option) {
        Some(reason) => format!("      # {reason}\n"),
        None => {
            "      # IP_LOCAL_PORT_RANGE with 0xFFFF0000 (as a signed number): the whole range, searched port by port, also beyond half.\n      \
                 - { description: \"IP_LOCAL_PORT_RANGE\", level: 0, name: 51, int_value: -65536, state: STATE_PREBIND }\n"
                .to_owned()
        }
    };
    let connections =
        if snapshot.option == PortRangeOption::Linear { snapshot.usable() } else { snapshot.half() };
    fill(
        ENVOY_CLUSTER,
        &[
            ("number", &(number + 1).to_string()),
            ("address", &destination.ip().to_string()),
            ("port", &destination.port().to_string()),
            ("connections", &connections.to_string()),
            ("source", &bound),
            ("range", &range),
        ],
    )
}
