//! Settings of other programs against long port searches and exhausted ports, with the numbers of a host filled in.
//!
//! A program is a row of [`Program::ALL`] and a file with its text. The texts are pure: all numbers are in the [`Snapshot`].

mod envoy;
mod go;
mod haproxy;
mod kubernetes;
mod netty;
mod nginx;
mod python;
mod snapshot;
mod sysctl;
mod systemd;
mod template;

pub use snapshot::{PortRangeOption, Snapshot};

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
            text: nginx::text,
        },
        Program {
            name: "haproxy",
            about: "backend with a server line and a port range for each source address",
            has_addresses: true,
            has_unit: false,
            text: haproxy::text,
        },
        Program {
            name: "envoy",
            about: "a cluster for each source address, with socket options (YAML)",
            has_addresses: true,
            has_unit: false,
            text: envoy::text,
        },
        Program {
            name: "kubernetes",
            about: "sysctls in the security context of a pod (YAML)",
            has_addresses: false,
            has_unit: false,
            text: kubernetes::text,
        },
        Program {
            name: "systemd",
            about: "unit that runs `fourtuple fix ports` as long as one service runs",
            has_addresses: true,
            has_unit: true,
            text: systemd::text,
        },
        Program {
            name: "sysctl",
            about: "port range, reserved ports and TIME_WAIT (file for /etc/sysctl.d)",
            has_addresses: false,
            has_unit: false,
            text: sysctl::text,
        },
        Program {
            name: "go",
            about: "net.Dialer and http.Transport with socket options and source addresses",
            has_addresses: true,
            has_unit: false,
            text: go::text,
        },
        Program {
            name: "python",
            about: "sockets for asyncio, aiohttp, urllib3 and requests",
            has_addresses: true,
            has_unit: false,
            text: python::text,
        },
        Program {
            name: "netty",
            about: "options of a Bootstrap of the epoll transport (Java)",
            has_addresses: true,
            has_unit: false,
            text: netty::text,
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
