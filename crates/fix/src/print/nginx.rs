use crate::print::snapshot::Snapshot;
use crate::print::template::{fill, heading, lines};

/// Idle connections of a worker; they count against worker_connections, which is 512 by default.
const KEPT: u32 = 128;

pub(super) fn text(snapshot: &Snapshot) -> String {
    let kept = KEPT.min(snapshot.half() / snapshot.cpus.max(1)).max(1);
    fill(
        TEMPLATE,
        &[
            ("heading", &heading(snapshot, "#")),
            ("destination", &snapshot.destination().to_string()),
            ("note", snapshot.example_note()),
            ("kept", &kept.to_string()),
            ("workers", &snapshot.cpus.to_string()),
            ("all", &(kept * snapshot.cpus).to_string()),
            ("split", &split(snapshot)),
            ("bind", &bind(snapshot)),
            ("limit", limit(snapshot)),
        ],
    )
}

const TEMPLATE: &str = r#"# nginx, source ports toward @destination@@note@: include this file in http{}.
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

fn split(snapshot: &Snapshot) -> String {
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

fn bind(snapshot: &Snapshot) -> String {
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

fn limit(snapshot: &Snapshot) -> &'static str {
    if snapshot.binds() {
        "# More source addresses keep each below half; `fourtuple fix ports` leaves sockets with proxy_bind alone."
    } else {
        "# `fourtuple fix ports --unit nginx` ends it from outside, or --source CIDR here spreads connections over more addresses."
    }
}
