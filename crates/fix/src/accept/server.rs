//! The settings of servers that create a SO_REUSEPORT group.

/// Servers by the name of their process, and their setting.
const SETTINGS: &[(&str, &str)] = &[
    ("nginx", "nginx creates one with `reuseport` in its directive `listen`"),
    ("envoy", "Envoy creates one with `enable_reuse_port: true` in the listener"),
    ("haproxy", "HAProxy creates one with `shards by-thread` in its line `bind`"),
    ("gunicorn", "Gunicorn creates one with `--reuse-port` and one process for each listener"),
    ("unbound", "Unbound creates one with `so-reuseport: yes`"),
    ("knotd", "Knot DNS creates one with `udp-workers` and `tcp-reuseport: on`"),
    ("named", "BIND creates one with `reuseport yes` in its options"),
    ("pdns_server", "PowerDNS creates one with `reuseport=yes`"),
    ("pdns_recursor", "PowerDNS Recursor creates one with `reuseport=yes`"),
    ("dnsdist", "dnsdist creates one with `reusePort=true` in addLocal() or setLocal()"),
    ("node", NODE),
    // The name of its main thread since Node.js 24.
    ("MainThread", NODE),
    ("apache2", "Apache httpd creates one with `ListenCoresBucketsRatio`"),
    ("httpd", "Apache httpd creates one with `ListenCoresBucketsRatio`"),
];

const NODE: &str =
    "Node.js (22.12) creates one with `reusePort: true` in server.listen() of several processes";
const OTHER: &str = "a server creates one with several sockets for one address, each with setsockopt(SO_REUSEPORT) before bind(): \
                     Go in `net.ListenConfig.Control`, Python by `socket.SO_REUSEPORT`";

/// Returns how a server creates a group, by the name of its process.
pub(super) fn setting(command: &str) -> &'static str {
    SETTINGS.iter().find(|(name, _)| command.starts_with(name)).map_or(OTHER, |(_, setting)| setting)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_known_by_their_processes() {
        assert!(setting("nginx").contains("`reuseport`"));
        assert!(setting("gunicorn: maste").contains("--reuse-port"));
        assert_eq!(setting("MainThread"), setting("node"));
        assert!(setting("my-server").contains("SO_REUSEPORT"));
    }
}
