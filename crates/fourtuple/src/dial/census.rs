use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fourtuple_syscalls::sock_diag::{self, Filter, state};
use fourtuple_syscalls::socket::Transport;

use crate::capabilities;
use crate::dial::error::{Census, DialError, SOCK_DIAG, Uncounted, Unseen};

/// Counts the sockets that hold the ports from `source` to `destination`.
fn take(transport: Transport, source: Option<IpAddr>, destination: SocketAddr) -> Result<Census, Unseen> {
    let (range, reserved) =
        capabilities::local_ports().map_err(|error| Unseen::new("/proc/sys/net/ipv4", &error))?;
    let mut census = Census {
        ports: u64::from(range.len() - reserved.count_in(range)),
        established: 0,
        time_wait: 0,
        otherwise: 0,
    };
    let filter = Filter { transport, source, source_port: None, destination };
    sock_diag::each(&filter, |entry| match entry.state {
        state::ESTABLISHED => census.established += 1,
        state::TIME_WAIT => census.time_wait += 1,
        _ => {}
    })
    .map_err(|error| Unseen::new(SOCK_DIAG, &error))?;
    census.otherwise = census.ports.saturating_sub(census.established + census.time_wait);
    Ok(census)
}

/// A census and the source address whose sockets it counts; `None`: the sockets of all sources.
pub(super) type SourceCensus = (Option<IpAddr>, Result<Census, Unseen>);

/// Takes a census for one destination, at most once per second.
#[derive(Debug)]
pub(super) struct Counter {
    transport: Transport,
    destination: SocketAddr,
    /// Time and result of the last census. Locked to read or write the value, never during a dump.
    last: Mutex<Option<(Instant, SourceCensus)>>,
    /// Held by the thread that takes a census; other threads wait for its result.
    counting: Mutex<()>,
}

impl Counter {
    pub(super) fn new(transport: Transport, destination: SocketAddr) -> Self {
        Counter { transport, destination, last: Mutex::new(None), counting: Mutex::new(()) }
    }

    /// Returns the last census if it is at most one second old. Does not wait for a census in progress.
    pub(super) fn fresh(&self) -> Option<SourceCensus> {
        const FRESH: Duration = Duration::from_secs(1);
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.filter(|(taken, _)| taken.elapsed() < FRESH).map(|(_, census)| census)
    }

    /// Returns a census that is at most one second old, of `source` or of the source of an earlier call. A new census takes about 1.2 us
    /// for each socket on the destination.
    pub(super) fn count(&self, source: Option<IpAddr>) -> SourceCensus {
        if let Some(census) = self.fresh() {
            return census;
        }
        let _counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
        self.fresh().unwrap_or_else(|| {
            let census = (source, take(self.transport, source, self.destination));
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            *last = Some((Instant::now(), census));
            census
        })
    }

    /// Adds a census to [`DialError::PortsExhausted`], and the source that it counts. Returns other errors unchanged.
    pub(super) fn counted(&self, mut error: DialError) -> DialError {
        if let DialError::PortsExhausted { source_address, census, .. } = &mut error {
            let counted = self.count(*source_address);
            *source_address = counted.0;
            *census = counted.1.map_err(Uncounted::Unseen);
        }
        error
    }
}
