use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use fourtuple::ports::PortRange;
use fourtuple::ports::words::{counted, in_words};

use super::forecast::Course;
use super::{Closer, Need, Snapshot};

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
    /// TIME_WAIT of earlier connections has then ended.
    Wait(Duration),
    /// No more connections at once.
    Connections(u64),
    /// Another engine, by its name.
    Engine(&'static str),
    /// More threads.
    Threads(u64),
    /// Something else, as an order in words.
    Other(String),
}

/// Most source addresses that are proposed, as many as a pool of sources takes.
const MOST: u64 = fourtuple::dial::MOST_SOURCES as u64;

/// What would let a run have ports that has not enough of them, each tried by reckoning with it.
pub(super) fn for_ports(snapshot: &Snapshot, need: &Need) -> Vec<Remedy> {
    let enough = |snapshot: &Snapshot, need: &Need| {
        let course = Course::of(snapshot, need);
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
    let course = Course::of(snapshot, need);
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
        // The slower the better, so it is looked for from the other end.
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

/// The fewest sources that are enough: as a network on loopback, where every address is there, else as a number.
fn sources(snapshot: &Snapshot, enough: &dyn Fn(u64) -> bool) -> Option<Remedy> {
    let destination = snapshot.destination?;
    match destination.ip().to_canonical() {
        IpAddr::V4(v4) if v4.is_loopback() => (20..=30).rev().find_map(|prefix| {
            let hosts = (1 << (32 - prefix)) - 2;
            (hosts > snapshot.sources && enough(hosts))
                .then_some(Remedy::SourceNetwork { network: Ipv4Addr::new(127, 0, 0, 0), prefix })
        }),
        _ => smallest(snapshot.sources + 1, MOST, enough).map(Remedy::Sources),
    }
}

/// The smallest number from `low` to `high` that is enough, if larger ones are so too.
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
    /// Whether its words say what to do, rather than what to use.
    pub(super) fn is_an_order(&self) -> bool {
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
            Remedy::Wait(time) => write!(formatter, "wait {}", in_words(*time)),
            Remedy::Connections(count) => write!(formatter, "--connections {count}"),
            Remedy::Engine(name) => write!(formatter, "--engine {name}"),
            Remedy::Threads(count) => write!(formatter, "--threads {count}"),
            Remedy::Other(words) => formatter.write_str(words),
        }
    }
}
