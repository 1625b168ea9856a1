//! Reads the numbers of this host that the settings of other programs contain.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use fourtuple_bpf::fix_ports::SOURCES;
use fourtuple_host::sysctl;
use fourtuple_syscalls::{route, sock_diag};
use ipnet::IpNet;

use crate::error::FixError;
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
            kernel: fourtuple_host::read(Path::new("/"), &[]).kernel,
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
