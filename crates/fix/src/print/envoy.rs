use std::net::IpAddr;

use crate::print::snapshot::{PortRangeOption, Snapshot};
use crate::print::template::{fill, heading, lines, why_no_option};

pub(super) fn text(snapshot: &Snapshot) -> String {
    let clusters: Vec<Option<IpAddr>> = if snapshot.sources.is_empty() {
        vec![None]
    } else {
        snapshot.sources.iter().map(|source| Some(*source)).collect()
    };
    let bodies: Vec<String> =
        clusters.iter().enumerate().map(|(n, source)| cluster(snapshot, n, *source)).collect();
    let weights =
        lines(&clusters, |number, _| format!("#   - {{ name: fourtuple-{}, weight: 1 }}", number + 1));
    fill(
        TEMPLATE,
        &[
            ("heading", &heading(snapshot, "#")),
            ("destination", &snapshot.destination().to_string()),
            ("note", snapshot.example_note()),
            ("clusters", bodies.concat().trim_end_matches('\n')),
            ("weights", weights.trim_end()),
        ],
    )
}

const TEMPLATE: &str = r#"# Envoy, source ports toward @destination@@note@.
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

const CLUSTER: &str = r#"  - name: fourtuple-@number@
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

fn cluster(snapshot: &Snapshot, number: usize, source: Option<IpAddr>) -> String {
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
        CLUSTER,
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
