//! The numbers of a host that the texts contain.

use std::net::{IpAddr, SocketAddr};

use fourtuple_record::snapshot::EphemeralPorts;
use ipnet::IpNet;

/// The effect of the socket option IP_LOCAL_PORT_RANGE (51 of SOL_IP) on a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortRangeOption {
    /// The kernel does not have the option (before Linux 6.3 without a backport).
    Absent,
    /// The kernel searches ports of one parity first, also with the option.
    Parity,
    /// With the option the kernel searches port by port (Linux 6.8), so that a long search is rare.
    Linear,
}

/// The numbers of a host, in the network namespace where the program runs, and the wishes of the user.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The release of the kernel.
    pub kernel: String,
    /// Processors that this process may use.
    pub cpus: u32,
    /// First port of net.ipv4.ip_local_port_range.
    pub low: u16,
    /// Last port of net.ipv4.ip_local_port_range.
    pub high: u16,
    /// First and last ports of net.ipv4.ip_local_reserved_ports.
    pub reserved: Vec<(u16, u16)>,
    /// Ports of listening TCP sockets, ascending, each once; `None` if the kernel does not tell (sock_diag).
    pub listeners: Option<Vec<u16>>,
    /// net.ipv4.tcp_tw_reuse: 0, 1, or 2 for loopback only.
    pub time_wait_reuse: u8,
    /// net.ipv4.tcp_timestamps.
    pub timestamps: u8,
    /// net.ipv4.tcp_max_tw_buckets.
    pub time_wait_limit: Option<u32>,
    /// The effect of IP_LOCAL_PORT_RANGE.
    pub option: PortRangeOption,
    /// The destination; `None` for an example.
    pub destination: Option<SocketAddr>,
    /// The prefix with the source addresses; `None` for the address of the route.
    pub prefix: Option<IpNet>,
    /// Source addresses of the prefix, or of the route to the destination; empty if neither is known.
    pub sources: Vec<IpAddr>,
    /// The service to keep fixed; `None` for a template.
    pub unit: Option<String>,
    /// Path of the program `fourtuple`.
    pub program: String,
}

impl Snapshot {
    /// Returns the number of ports of the range that are not reserved.
    pub fn usable(&self) -> u32 {
        EphemeralPorts { low: self.low, high: self.high, reserved: self.reserved.clone() }.usable()
    }

    /// Returns the number of connections from a source to a destination up to which connect() searches briefly.
    pub(super) fn half(&self) -> u32 {
        self.usable() / 2
    }

    /// Returns the destination, or an address for documentation (RFC 5737, RFC 3849).
    pub(crate) fn destination(&self) -> SocketAddr {
        self.destination.unwrap_or_else(|| {
            let is_ipv6 = self.sources.first().is_some_and(IpAddr::is_ipv6);
            let example = if is_ipv6 { "2001:db8::1" } else { "192.0.2.1" };
            SocketAddr::new(example.parse().unwrap_or([192, 0, 2, 1].into()), 80)
        })
    }

    /// Returns a sentence about an example destination, or nothing.
    pub(super) fn example_note(&self) -> &'static str {
        if self.destination.is_some() { "" } else { " (an example; --to fills in yours)" }
    }

    /// Returns whether the text binds sockets to source addresses: with one address of the route the kernel would choose the same.
    pub(super) fn binds(&self) -> bool {
        self.prefix.is_some() && !self.sources.is_empty()
    }

    /// Returns the ports of listening TCP sockets that are known.
    pub(super) fn listeners(&self) -> &[u16] {
        self.listeners.as_deref().unwrap_or_default()
    }

    /// Returns the largest block of the range without reserved ports and listeners.
    pub(super) fn free_block(&self) -> (u16, u16) {
        let is_taken = |port: u16| {
            self.listeners().binary_search(&port).is_ok()
                || self.reserved.iter().any(|(first, last)| (*first..=*last).contains(&port))
        };
        let mut best = (self.low, self.low);
        let mut begin = None;
        for port in self.low..=self.high {
            if is_taken(port) {
                begin = None;
                continue;
            }
            let first = *begin.get_or_insert(port);
            if port - first >= best.1 - best.0 {
                best = (first, port);
            }
        }
        best
    }
}
