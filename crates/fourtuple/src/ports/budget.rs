use std::time::Duration;

use crate::ports::{PortRange, PortSet};

/// Lifetime of a TIME_WAIT socket, 60 s, at the end that closed first (TCP_TIMEWAIT_LEN: a constant, which `tcp_fin_timeout` does not
/// change). Example: [`Closer`].
pub const TIME_WAIT: Duration = Duration::from_secs(60);

/// The end of a connection that closes first (active close) and keeps a TIME_WAIT socket.
///
/// ```
/// use std::time::Duration;
/// use fourtuple::ports::{Closer, TIME_WAIT, steady_tuples};
///
/// assert_eq!((Closer::Us.time_wait(), Closer::Them.time_wait()), (TIME_WAIT, Duration::ZERO));
/// // 100 new connections per second, each open for 2 s: 200 tuples in use, and 6,000 more in TIME_WAIT of the end that closes first.
/// let hold = Duration::from_secs(2);
/// assert_eq!(steady_tuples(100.0, hold + Closer::Them.time_wait()), 200);
/// assert_eq!(steady_tuples(100.0, hold + Closer::Us.time_wait()), 6_200);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums, reason = "a connection has two ends")]
pub enum Closer {
    /// The client: each closed connection holds its tuple for 60 s more.
    Us,
    /// The server: the tuple is free for the client at once.
    Them,
}

impl Closer {
    /// Returns how long a tuple stays in use after the end of its connection.
    pub fn time_wait(self) -> Duration {
        match self {
            Closer::Us => TIME_WAIT,
            Closer::Them => Duration::ZERO,
        }
    }
}

/// A budget without a single tuple.
///
/// ```
/// use fourtuple::ports::{Budget, BudgetError, PortRange, PortSet};
///
/// let reserved = PortSet::parse_list("9000-9001").unwrap();
/// let range = PortRange::new(9000, 9001).unwrap();
/// assert_eq!(
///     Budget::new(range, &reserved, true, 1, 1),
///     Err(BudgetError::AllReserved { range, ports: 2 })
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// All ports of the range are reserved.
    #[error(
        "all ports of {range} are reserved ({ports}): widen ip_local_port_range or shorten ip_local_reserved_ports"
    )]
    AllReserved {
        /// The range.
        range: PortRange,
        /// Number of ports in the range.
        ports: u32,
    },
    /// The number of source addresses is 0.
    #[error("0 sources: expected at least one source address")]
    NoSources,
    /// The number of destinations is 0.
    #[error("0 destinations: expected at least one destination")]
    NoDestinations,
}

/// The number of available tuples: ports x sources x destinations.
///
/// ```
/// use std::time::Duration;
/// use fourtuple::ports::{Budget, BudgetError, Closer, PortRange, PortSet};
///
/// let budget = Budget::new(PortRange::KERNEL_DEFAULT, &PortSet::new(), true, 1, 1)?;
/// assert_eq!((budget.capacity(), budget.before_the_cliff()), (28_232, 14_116));
/// // Closing first, one source address cannot dial one server more often than this.
/// assert_eq!(budget.ceiling_per_s(Closer::Us.time_wait()) as u32, 470);
///
/// let three_servers = Budget::new(PortRange::KERNEL_DEFAULT, &PortSet::new(), true, 2, 3)?;
/// assert_eq!((three_servers.ports(), three_servers.pairs()), (28_232, 6));
/// # Ok::<(), BudgetError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    ports: u32,
    first_half: u32,
    sources: u64,
    destinations: u64,
}

impl Budget {
    /// Calculates the budget of a range.
    ///
    /// `by_parity` says whether the kernel searches by parity (`halves`). In a range of odd length such a search misses one port
    /// (see `TupleTable`), which depends on the start of the search. Dials may still get all ports, but the budget leaves one out.
    ///
    /// # Errors
    ///
    /// [`BudgetError`] if there is no tuple: all ports are reserved, or the number of sources or destinations is 0.
    pub fn new(
        range: PortRange,
        reserved: &PortSet,
        by_parity: bool,
        sources: u64,
        destinations: u64,
    ) -> Result<Self, BudgetError> {
        let open = |port: &u16| !reserved.contains(*port);
        let ports = range.iter().filter(open).count() as u32;
        let first_half = range.iter().step_by(2).filter(open).count() as u32;
        // A search misses the first port of the range, except from one start, from which it misses the last port.
        let unseen = by_parity && range.len() % 2 == 1 && range.len() > 1 && ports > 1;
        let unseen = u32::from(unseen && (range.len() == 3 || !reserved.contains(range.low())));
        if ports == 0 {
            return Err(BudgetError::AllReserved { range, ports: range.len() });
        } else if sources == 0 {
            return Err(BudgetError::NoSources);
        } else if destinations == 0 {
            return Err(BudgetError::NoDestinations);
        }
        Ok(Budget {
            ports: ports - unseen,
            first_half: first_half.saturating_sub(unseen),
            sources,
            destinations,
        })
    }

    /// Returns the ports of one source for one destination; at least 1.
    pub fn ports(&self) -> u32 {
        self.ports
    }

    /// Returns the number of (source, destination) pairs.
    pub fn pairs(&self) -> u64 {
        self.sources.saturating_mul(self.destinations)
    }

    /// Returns the maximum number of simultaneous connections over all pairs.
    pub fn capacity(&self) -> u64 {
        self.pairs().saturating_mul(u64::from(self.ports))
    }

    /// Returns the number of connections over all pairs until a search by parity has used up its first half. Assumes that the load
    /// of all pairs is equal.
    pub fn before_the_cliff(&self) -> u64 {
        self.pairs().saturating_mul(u64::from(self.first_half))
    }

    /// Returns the sustainable rate of new connections per second when each uses its tuple for `in_use`, TIME_WAIT included: the
    /// capacity divided by this time (Little's law). Infinite if it is 0.
    pub fn ceiling_per_s(&self, in_use: Duration) -> f64 {
        self.capacity() as f64 / in_use.as_secs_f64()
    }
}

/// Returns the tuples in use in the steady state, at `arrival_per_s` new connections per second, each of which uses its tuple for
/// `in_use`, TIME_WAIT included (Little's law). The result saturates; a rate below 0 or NaN gives 0.
///
/// Example: [`Closer`].
pub fn steady_tuples(arrival_per_s: f64, in_use: Duration) -> u64 {
    // `as` saturates, and converts NaN to 0.
    (arrival_per_s * in_use.as_secs_f64()).ceil() as u64
}
