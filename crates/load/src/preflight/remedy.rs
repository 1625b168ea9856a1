use std::fmt;
use std::net::Ipv4Addr;
use std::time::Duration;

use super::words::{counted, in_words};

/// Something that would help, as one would type it.
#[derive(Clone, Debug, PartialEq)]
pub enum Remedy {
    /// All hosts of a network as sources: on loopback every address of 127.0.0.0/8 is there already.
    SourceNetwork {
        /// Its address.
        network: Ipv4Addr,
        /// Its length.
        prefix: u8,
    },
    /// So many source addresses, which somebody must first add to an interface.
    Sources(u64),
    /// The server closes first.
    CloseServer,
    /// No more operations than so many a second.
    Rate(u64),
    /// So many requests per connection.
    CloseEvery(u64),
    /// A wider net.ipv4.ip_local_port_range, its first and last port.
    Range(u16, u16),
    /// net.ipv4.tcp_tw_reuse=1
    TwReuse,
    /// Time for TIME_WAIT of earlier runs to end.
    Wait(Duration),
    /// No more connections at once.
    Connections(u64),
    /// Another engine, by its name.
    Engine(&'static str),
    /// More threads.
    Threads(u64),
    /// Something else, in words.
    Other(String),
}

impl fmt::Display for Remedy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remedy::SourceNetwork { network, prefix } => write!(formatter, "--source {network}/{prefix}"),
            Remedy::Sources(count) => {
                write!(formatter, "--source with {}", counted(*count, "address"))
            }
            Remedy::CloseServer => formatter.write_str("--close server"),
            Remedy::Rate(per_s) => write!(formatter, "--rate {per_s}/s"),
            Remedy::CloseEvery(requests) => write!(formatter, "--close-every {requests}"),
            Remedy::Range(low, high) => {
                write!(formatter, "sysctl net.ipv4.ip_local_port_range=\"{low} {high}\"")
            }
            Remedy::TwReuse => formatter.write_str("sysctl net.ipv4.tcp_tw_reuse=1"),
            Remedy::Wait(time) => write!(formatter, "it {} later", in_words(*time)),
            Remedy::Connections(count) => write!(formatter, "--connections {count}"),
            Remedy::Engine(name) => write!(formatter, "--engine {name}"),
            Remedy::Threads(count) => write!(formatter, "--threads {count}"),
            Remedy::Other(words) => formatter.write_str(words),
        }
    }
}
