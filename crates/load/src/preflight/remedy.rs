use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use fourtuple::ports::PortRange;
use fourtuple_measure::words::counted;
use fourtuple_record::format_time;

use crate::preflight::forecast::TupleUsage;
use crate::preflight::{Closer, Need, Snapshot};

/// A remedy, formatted as flags or commands to type.
#[derive(Clone, Debug, PartialEq)]
pub enum Remedy {
    /// All addresses of a network as sources: on loopback each address in 127.0.0.0/8 is local.
    SourceNetwork {
        /// Address of the network.
        network: Ipv4Addr,
        /// Prefix length.
        prefix: u8,
    },
    /// This many source addresses, which must first be added to an interface.
    Sources(u64),
    /// The server closes first.
    CloseServer,
    /// A lower rate, in operations per second.
    Rate(u64),
    /// This many requests per connection.
    CloseEvery(u64),
    /// A wider net.ipv4.ip_local_port_range: its first and last port.
    Range(u16, u16),
    /// The sysctl net.ipv4.tcp_tw_reuse=1.
    TwReuse,
    /// A wait until the TIME_WAIT sockets of earlier connections have expired.
    Wait(Duration),
    /// Fewer open connections.
    Connections(u64),
    /// Another engine: its name.
    Engine(&'static str),
    /// More threads.
    Threads(u64),
    /// Another remedy, as an instruction in words.
    Other(String),
}

/// Maximum number of source addresses in a remedy: the size limit of a source pool.
const MAX_SOURCES: u64 = fourtuple::dial::MAX_SOURCES as u64;

/// Returns the remedies for a run without enough ports. Each is tested by judging the run with it.
pub(super) fn for_ports(snapshot: &Snapshot, need: &Need) -> Vec<Remedy> {
    let enough = |snapshot: &Snapshot, need: &Need| {
        let course = TupleUsage::of(snapshot, need);
        course.stall().is_none() && !course.is_tight()
    };
    let with = |change: &dyn Fn(&mut Snapshot)| {
        let mut changed = snapshot.clone();
        change(&mut changed);
        enough(&changed, need)
    };
    let asked = |change: &dyn Fn(&mut Need)| {
        let mut changed = *need;
        change(&mut changed);
        enough(snapshot, &changed)
    };
    let course = TupleUsage::of(snapshot, need);
    let mut remedies = Vec::new();
    if snapshot.taken.time_wait > 0 && with(&|changed| changed.taken.forget_time_wait()) {
        let seconds = (snapshot.taken.time_wait_back.len() as u64).max(1);
        remedies.push(Remedy::Wait(Duration::from_secs(seconds)));
    }
    remedies.extend(sources(snapshot, &|count| with(&|changed| changed.sources = count)));
    if !course.leaves_time_wait() {
        let fits = u64::try_from(course.free_now()).unwrap_or(0);
        if fits > 0 && asked(&|changed| changed.connections = fits) {
            remedies.push(Remedy::Connections(fits));
        }
    } else {
        if asked(&|changed| changed.closer = Closer::Server) {
            remedies.push(Remedy::CloseServer);
        }
        let kept_for = |requests| asked(&|changed| changed.requests_per_connection = requests);
        if need.may_keep_alive
            && let Some(requests) = smallest(need.requests_per_connection + 1, 1_000_000, &kept_for)
        {
            remedies.push(Remedy::CloseEvery(requests));
        }
        let fastest = need.rate_per_s.unwrap_or(course.rate * need.requests_per_connection as f64) as u64;
        // A lower rate needs fewer ports, so the search runs over the reduction of the rate.
        let slower = |less: u64| asked(&|changed| changed.rate_per_s = Some((fastest - less) as f64));
        if fastest > 1
            && let Some(less) = smallest(1, fastest - 1, &slower)
        {
            remedies.push(Remedy::Rate(fastest - less));
        }
    }
    let wide = PortRange::new(1024, u16::MAX).expect("1024 is below 65535");
    if snapshot.range.len() < wide.len() && with(&|changed| changed.range = wide) {
        remedies.push(Remedy::Range(wide.low(), wide.high()));
    }
    if snapshot.reuse().is_none() && snapshot.tcp_timestamps && with(&|changed| changed.tcp_tw_reuse = 1) {
        remedies.push(Remedy::TwReuse);
    }
    remedies
}

/// Returns the smallest sufficient number of sources: on loopback as a network, otherwise as a number.
fn sources(snapshot: &Snapshot, enough: &dyn Fn(u64) -> bool) -> Option<Remedy> {
    let destination = snapshot.destination?;
    match destination.ip().to_canonical() {
        IpAddr::V4(v4) if v4.is_loopback() => (20..=30).rev().find_map(|prefix| {
            let hosts = (1 << (32 - prefix)) - 2;
            (hosts > snapshot.sources && enough(hosts))
                .then_some(Remedy::SourceNetwork { network: Ipv4Addr::new(127, 0, 0, 0), prefix })
        }),
        _ => smallest(snapshot.sources + 1, MAX_SOURCES, enough).map(Remedy::Sources),
    }
}

/// Returns the smallest sufficient number from `low` to `high`, by bisection: each larger number must be sufficient too.
fn smallest(mut low: u64, mut high: u64, enough: &dyn Fn(u64) -> bool) -> Option<u64> {
    if low > high || !enough(high) {
        return None;
    }
    while low < high {
        let middle = low + (high - low) / 2;
        if enough(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Some(low)
}

impl Remedy {
    /// Returns whether the text is an instruction, and not a setting.
    pub(super) fn is_instruction(&self) -> bool {
        matches!(self, Remedy::Wait(_) | Remedy::Other(_))
    }
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
            Remedy::Wait(time) => write!(formatter, "wait {}", format_time(*time)),
            Remedy::Connections(count) => write!(formatter, "--connections {count}"),
            Remedy::Engine(name) => write!(formatter, "--engine {name}"),
            Remedy::Threads(count) => write!(formatter, "--threads {count}"),
            Remedy::Other(words) => formatter.write_str(words),
        }
    }
}
