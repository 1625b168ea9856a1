use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};

use fourtuple_load::{Load, Scheme};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Endpoint, sock_diag, unix_diag};

use crate::error::CompareError;

/// The addresses at which a load expects its server: on loopback, or a Unix socket's path.
#[derive(Debug)]
pub struct ServerAddress {
    pub(crate) endpoints: Vec<Endpoint>,
    transport: Transport,
    /// Number of addresses that need a listener.
    needed: usize,
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<String> = self.endpoints.iter().map(ToString::to_string).collect();
        formatter.write_str(&all.join(" or "))
    }
}

impl ServerAddress {
    /// Resolves the target of a load.
    ///
    /// # Errors
    /// A text for the user if the target's name does not resolve, or if the address is outside of loopback: the network
    /// namespace of a trial has no other device.
    pub(crate) fn of(load: &Load) -> Result<ServerAddress, String> {
        let target = &load.target;
        let endpoints = load.resolve().map_err(|error| error.to_string())?;
        let transport = if target.scheme() == Scheme::Udp { Transport::Udp } else { Transport::Tcp };
        let is_elsewhere =
            |address: SocketAddr| !address.ip().is_loopback() && !address.ip().is_unspecified();
        match endpoints.iter().filter_map(Endpoint::inet).any(is_elsewhere) {
            true => Err(format!(
                "'{target}' with '--server': each trial has a network namespace of its own, with loopback and nothing \
                 else; expected a target in 127.0.0.0/8, [::1] or unix:/PATH"
            )),
            false => Ok(ServerAddress {
                needed: if load.all_addresses { endpoints.len() } else { 1 },
                endpoints,
                transport,
            }),
        }
    }

    /// Returns whether a socket of the calling thread's network namespace listens on one of the addresses, or on each if the load
    /// goes to all. A UDP socket listens when it is bound and not connected.
    pub(crate) fn has_listener(&self) -> Result<bool, CompareError> {
        let mut found = 0;
        for endpoint in &self.endpoints {
            found += usize::from(self.listens(endpoint)?);
        }
        Ok(found >= self.needed)
    }

    fn listens(&self, endpoint: &Endpoint) -> Result<bool, CompareError> {
        let found = match (endpoint, self.transport) {
            (Endpoint::Unix(path), _) => {
                // `None` until the server has created the path; all namespaces share the file system.
                let queue = unix_diag::listener(path)
                    .map_err(CompareError::call("cannot ask the kernel for listeners (unix_diag)"))?;
                return Ok(queue.is_some());
            }
            (Endpoint::Inet(target), Transport::Tcp) => tcp_listener(*target),
            (Endpoint::Inet(target), Transport::Udp) => udp_socket(*target),
        };
        found.map_err(CompareError::call("cannot ask the kernel for listeners (sock_diag)"))
    }
}

fn tcp_listener(target: SocketAddr) -> io::Result<bool> {
    let mut found = false;
    sock_diag::each_listener(|listener| {
        found |= receives(listener.local, listener.only_ipv6, target);
    })?;
    Ok(found)
}

fn udp_socket(target: SocketAddr) -> io::Result<bool> {
    let mut found = false;
    // The peer of a socket that is not connected is the unspecified address with port 0.
    for destination in [SocketAddr::from(([0; 4], 0)), SocketAddr::from(([0; 16], 0))] {
        let filter = sock_diag::Filter {
            transport: Transport::Udp,
            source: None,
            source_port: Some(target.port()),
            destination,
        };
        sock_diag::each(&filter, |entry| found |= receives(entry.local, false, target))?;
    }
    Ok(found)
}

/// Returns whether the kernel delivers packets for `target` to a socket that is bound to `local`.
fn receives(local: SocketAddr, only_ipv6: bool, target: SocketAddr) -> bool {
    let is_wildcard = match local.ip() {
        IpAddr::V4(ip) => ip.is_unspecified() && target.is_ipv4(),
        IpAddr::V6(ip) => ip.is_unspecified() && (target.is_ipv6() || !only_ipv6),
    };
    // The kernel sends what is addressed to the unspecified address to loopback (ip_route_output_key_hash_rcu,
    // ip6_datagram_connect).
    local.port() == target.port()
        && (is_wildcard
            || local.ip() == target.ip()
            || (target.ip().is_unspecified() && local.ip().is_loopback()))
}

#[cfg(test)]
mod tests {
    use fourtuple_load::Workload;

    use super::*;

    #[test]
    fn wildcard_and_loopback_sockets_receive() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        for (local, only_ipv6, target, expected) in [
            ("127.0.0.1:80", false, "127.0.0.1:80", true),
            ("127.0.0.1:80", false, "127.0.0.1:81", false),
            ("127.0.0.2:80", false, "127.0.0.1:80", false),
            ("0.0.0.0:80", false, "127.0.0.1:80", true),
            ("0.0.0.0:80", false, "[::1]:80", false),
            ("[::]:80", false, "127.0.0.1:80", true),
            ("[::]:80", true, "127.0.0.1:80", false),
            ("[::]:80", true, "[::1]:80", true),
            ("127.0.0.1:80", false, "0.0.0.0:80", true),
        ] {
            assert_eq!(receives(address(local), only_ipv6, address(target)), expected, "{local} {target}");
        }
    }

    #[test]
    fn addresses_outside_of_loopback_are_refused() {
        for (target, accepted) in [
            ("tcp://127.0.0.9:1", true),
            ("udp://[::1]:1", true),
            ("unix:/run/x", true),
            ("http://192.0.2.1", false),
        ] {
            let load = Load::new(target.parse().unwrap(), Workload::Connect);
            assert_eq!(ServerAddress::of(&load).is_ok(), accepted, "{target}");
        }
    }
}
