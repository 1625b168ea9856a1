//! The table of remedies.
//!
//! Names, parsing, the help of `lab time-wait`, predictions and the texts of the advice derive from a remedy's row.

use std::fmt;
use std::str::FromStr;

/// A change to the base case: a client that opens and closes connections from one source as fast as it can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remedy {
    /// The name on the command line and in records. Names of unchanged cases begin with `none`.
    name: &'static str,
    /// The text of the advice.
    pub(super) description: &'static str,
    /// Whether there are more transactions than ports, so that the run goes on after the stall.
    pub(super) exceeds_ports: bool,
    /// Source addresses.
    pub(super) sources: u32,
    /// Transactions per connection.
    pub(super) per_connection: u64,
    /// net.ipv4.ip_local_port_range = 1024 65535.
    pub(super) widens_range: bool,
    /// net.ipv4.tcp_tw_reuse = 1, which needs TCP timestamps on both sides.
    pub(super) reuses_time_wait: bool,
    /// The server closes first (active close), so the TIME_WAIT socket is the server's.
    pub(super) server_closes_first: bool,
}

/// No change; every other row starts from its values.
const NONE_OVER: Remedy = Remedy {
    name: "none-over",
    description: "no change",
    exceeds_ports: true,
    sources: 1,
    per_connection: 1,
    widens_range: false,
    reuses_time_wait: false,
    server_closes_first: false,
};

impl Remedy {
    /// All remedies, the unchanged cases first.
    pub const ALL: [Remedy; 7] = [
        Remedy { name: "none-under", exceeds_ports: false, ..NONE_OVER },
        NONE_OVER,
        Remedy { name: "more-sources", description: "four source addresses", sources: 4, ..NONE_OVER },
        Remedy {
            name: "wider-range",
            description: "net.ipv4.ip_local_port_range = 1024 65535",
            widens_range: true,
            ..NONE_OVER
        },
        Remedy {
            name: "tcp-tw-reuse",
            description: "net.ipv4.tcp_tw_reuse = 1 (needs timestamps)",
            reuses_time_wait: true,
            ..NONE_OVER
        },
        Remedy {
            name: "server-closes-first",
            description: "the server closing first",
            server_closes_first: true,
            ..NONE_OVER
        },
        Remedy {
            name: "keep-alive",
            description: "100 transactions per connection",
            per_connection: 100,
            ..NONE_OVER
        },
    ];

    /// Returns the name that records use.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Returns the names of all remedies, separated by commas.
    pub fn names() -> String {
        Remedy::ALL.map(Remedy::name).join(", ")
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name)
    }
}

impl FromStr for Remedy {
    type Err = String;

    fn from_str(text: &str) -> Result<Remedy, String> {
        let found = Remedy::ALL.into_iter().find(|remedy| remedy.name == text);
        found.ok_or_else(|| format!("{text:?} is not a remedy: expected {}", Remedy::names()))
    }
}
