//! Settings of other programs against long port searches and exhausted ports, with the numbers of a host filled in.
//!
//! A program is a row of [`Program::ALL`] and a file with its text. The texts are pure: all numbers are in the [`Snapshot`].

mod proxies;
mod runtimes;
mod system;

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

use fourtuple_record::snapshot::EphemeralPorts;
use ipnet::IpNet;

/// A program whose setting can be printed.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The name on the command line.
    pub name: &'static str,
    /// The printed setting in a few words.
    pub about: &'static str,
    /// Whether the text contains the destination and the source addresses (`--to`, `--source`).
    pub has_addresses: bool,
    /// Whether the text contains the name of a service (`--unit`).
    pub has_unit: bool,
    text: fn(&Snapshot) -> String,
}

impl Program {
    pub const ALL: [Program; 9] = [
        Program {
            name: "nginx",
            about: "upstream with kept connections, source addresses in turn (file for http{})",
            has_addresses: true,
            has_unit: false,
            text: proxies::nginx,
        },
        Program {
            name: "haproxy",
            about: "backend with a server line and a port range for each source address",
            has_addresses: true,
            has_unit: false,
            text: proxies::haproxy,
        },
        Program {
            name: "envoy",
            about: "a cluster for each source address, with socket options (YAML)",
            has_addresses: true,
            has_unit: false,
            text: proxies::envoy,
        },
        Program {
            name: "kubernetes",
            about: "sysctls in the security context of a pod (YAML)",
            has_addresses: false,
            has_unit: false,
            text: system::kubernetes,
        },
        Program {
            name: "systemd",
            about: "unit that runs `fourtuple fix ports` as long as one service runs",
            has_addresses: true,
            has_unit: true,
            text: system::systemd,
        },
        Program {
            name: "sysctl",
            about: "port range, reserved ports and TIME_WAIT (file for /etc/sysctl.d)",
            has_addresses: false,
            has_unit: false,
            text: system::sysctl,
        },
        Program {
            name: "go",
            about: "net.Dialer and http.Transport with socket options and source addresses",
            has_addresses: true,
            has_unit: false,
            text: runtimes::go,
        },
        Program {
            name: "python",
            about: "sockets for asyncio, aiohttp, urllib3 and requests",
            has_addresses: true,
            has_unit: false,
            text: runtimes::python,
        },
        Program {
            name: "netty",
            about: "options of a Bootstrap of the epoll transport (Java)",
            has_addresses: true,
            has_unit: false,
            text: runtimes::netty,
        },
    ];

    pub fn named(name: &str) -> Option<Program> {
        Program::ALL.into_iter().find(|program| program.name == name)
    }

    /// Returns the setting with the numbers of the snapshot, ready to paste.
    pub fn text(&self, snapshot: &Snapshot) -> String {
        (self.text)(snapshot)
    }
}

/// Returns a template with each `@name@` replaced by its value.
fn fill(template: &str, values: &[(&str, &str)]) -> String {
    let mut text = template.to_owned();
    for (name, value) in values {
        text = text.replace(&format!("@{name}@"), value);
    }
    text
}

/// Returns the items, each in a line by `line`.
fn lines<T>(items: &[T], line: impl Fn(usize, &T) -> String) -> String {
    items.iter().enumerate().fold(String::new(), |mut text, (number, item)| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}", line(number, item));
        text
    })
}

/// Returns sentences about this host, which begin every text, as comments.
fn heading(snapshot: &Snapshot, comment: &str) -> String {
    let (low, high) = (snapshot.low, snapshot.high);
    let reserved = if snapshot.reserved.is_empty() { "" } else { " without the reserved ones" };
    let mut sentences = vec![
        format!(
            "This host: Linux {}, CPUs: {}, source ports {low} to {high}{reserved}.",
            snapshot.kernel, snapshot.cpus
        ),
        format!("Ports of a source address for each destination: {}.", snapshot.usable()),
    ];
    sentences.push(match snapshot.option {
        PortRangeOption::Linear => format!(
            "Beyond half of them ({}) connect() searches for milliseconds, unless the socket has IP_LOCAL_PORT_RANGE.",
            snapshot.half()
        ),
        _ => format!("Beyond half of them ({}) connect() searches for milliseconds.", snapshot.half()),
    });
    lines(&sentences, |_, sentence| format!("{comment} {sentence}"))
}

/// Returns the reason why a text has no IP_LOCAL_PORT_RANGE; `None` if it has.
fn why_no_option(option: PortRangeOption) -> Option<&'static str> {
    match option {
        PortRangeOption::Linear => None,
        PortRangeOption::Parity => Some(
            "IP_LOCAL_PORT_RANGE is not set: the search of this kernel passes over half of the range with this option too (Linux 6.8 changed it).",
        ),
        PortRangeOption::Absent => {
            Some("IP_LOCAL_PORT_RANGE is not set: this kernel does not have it (Linux 6.3).")
        }
    }
}

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
    fn half(&self) -> u32 {
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
    fn example_note(&self) -> &'static str {
        if self.destination.is_some() { "" } else { " (an example; --to fills in yours)" }
    }

    /// Returns whether the text binds sockets to source addresses: with one address of the route the kernel would choose the same.
    fn binds(&self) -> bool {
        self.prefix.is_some() && !self.sources.is_empty()
    }

    /// Returns the ports of listening TCP sockets that are known.
    fn listeners(&self) -> &[u16] {
        self.listeners.as_deref().unwrap_or_default()
    }

    /// Returns the largest block of the range without reserved ports and listeners.
    fn free_block(&self) -> (u16, u16) {
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
