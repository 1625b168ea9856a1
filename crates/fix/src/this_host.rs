//! Reads the numbers of this host that the settings of other programs contain.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use fourtuple_bpf::fix_ports::{DestinationFilter, SOURCES};
use fourtuple_observe::host::sysctl;
use fourtuple_syscalls::{route, sock_diag};
use ipnet::IpNet;

use crate::FixError;
use crate::namespaces;
use crate::print::{PortRangeOption, Snapshot};

/// The wishes of the user.
#[derive(Clone, Debug, Default)]
pub struct PrintRequest {
    /// The destination; `None` for an example.
    pub destination: Option<SocketAddr>,
    /// Prefix with the source addresses; `None` for the address of the route to the destination.
    pub prefix: Option<IpNet>,
    /// The service to keep fixed; `None` for a template.
    pub unit: Option<String>,
    /// Path of the program `fourtuple`.
    pub program: String,
}

impl Snapshot {
    /// Reads this host, in the calling thread's network namespace.
    ///
    /// # Errors
    ///
    /// [`FixError::NoSource`], [`FixError::Version`], [`FixError::Sysctl`]
    pub fn read(request: PrintRequest, option: PortRangeOption) -> Result<Snapshot, FixError> {
        let PrintRequest { destination, prefix, unit, program } = request;
        let sources = match prefix {
            Some(prefix) => from_prefix(prefix, destination)?,
            None => Vec::new(),
        };
        let read = |name: &str| sysctl(Path::new("/"), name)?.parse::<u32>().ok();
        let ports = namespaces::read_ports().map_err(FixError::Sysctl)?;
        let mut snapshot = Snapshot {
            kernel: fourtuple_observe::host::read(Path::new("/"), &[]).kernel,
            cpus: std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32),
            low: ports.low,
            high: ports.high,
            reserved: ports.reserved,
            listeners: listeners(),
            time_wait_reuse: ports.time_wait_reuse,
            timestamps: read("net.ipv4.tcp_timestamps").unwrap_or(0) as u8,
            time_wait_limit: read("net.ipv4.tcp_max_tw_buckets"),
            option,
            destination,
            prefix,
            sources,
            unit,
            program,
        };
        if snapshot.prefix.is_none() {
            snapshot.sources.extend(route::source_for(snapshot.destination().ip()).ok());
        }
        Ok(snapshot)
    }
}

fn from_prefix(prefix: IpNet, destination: Option<SocketAddr>) -> Result<Vec<IpAddr>, FixError> {
    if let Some(destination) = destination.filter(|to| to.is_ipv4() != prefix.addr().is_ipv4()) {
        return Err(FixError::Version { prefix: prefix.to_string(), destination: destination.to_string() });
    }
    let local = namespaces::local_addresses(prefix, SOURCES);
    if local.is_empty() { Err(FixError::NoSource(prefix.to_string())) } else { Ok(local) }
}

/// Returns the ports of listening TCP sockets, ascending, each once.
fn listeners() -> Option<Vec<u16>> {
    let mut ports = Vec::new();
    sock_diag::each_listener(|listener| ports.push(listener.local.port())).ok()?;
    ports.sort_unstable();
    ports.dedup();
    Some(ports)
}

/// The text is not a destination.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a destination: expected an address or a prefix and a port, such as 192.0.2.0/24:443, 192.0.2.1:443 or \
     [2001:db8::/32]:443; the port * means every port"
)]
pub struct DestinationError(String);

/// Parses a prefix or an address, and a port or `*`.
///
/// # Errors
///
/// [`DestinationError`], also for port 0.
pub fn parse_destination(text: &str) -> Result<DestinationFilter, DestinationError> {
    parse(text).ok_or_else(|| DestinationError(text.to_owned()))
}

fn parse(text: &str) -> Option<DestinationFilter> {
    let (prefix, port) = text.rsplit_once(':')?;
    let port = match port {
        "*" => None,
        number => Some(number.parse().ok().filter(|port| *port != 0)?),
    };
    let (prefix, is_bracketed) = match prefix.strip_prefix('[') {
        Some(inner) => (inner.strip_suffix(']')?, true),
        None => (prefix, false),
    };
    let (address, length) = match prefix.parse::<IpNet>() {
        Ok(net) => (net.addr(), net.prefix_len()),
        Err(_) => {
            let address: IpAddr = prefix.parse().ok()?;
            (address, if address.is_ipv4() { 32 } else { 128 })
        }
    };
    // Without brackets the last group of an IPv6 address would be the port.
    (address.is_ipv6() == is_bracketed).then_some(DestinationFilter { address, length, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_a_prefix_and_a_port() {
        let parsed =
            |text: &str| parse(text).map(|filter| (filter.address.to_string(), filter.length, filter.port));
        assert_eq!(parsed("192.0.2.0/24:443"), Some(("192.0.2.0".into(), 24, Some(443))));
        assert_eq!(parsed("192.0.2.1:443"), Some(("192.0.2.1".into(), 32, Some(443))));
        assert_eq!(parsed("0.0.0.0/0:*"), Some(("0.0.0.0".into(), 0, None)));
        assert_eq!(parsed("[2001:db8::/32]:443"), Some(("2001:db8::".into(), 32, Some(443))));
        assert_eq!(parsed("[::1]:*"), Some(("::1".into(), 128, None)));
        for text in [
            "",
            "192.0.2.1",
            "192.0.2.1:0",
            "192.0.2.1:65536",
            "192.0.2.0/33:1",
            "::1:443",
            "[192.0.2.1]:1",
            "host:80",
        ] {
            assert_eq!(parsed(text), None, "{text}");
        }
    }
}
