use std::time::Duration;

use super::{PortRange, PortSet};

/// How long a closed connection keeps its tuple at the end that closed first (TCP_TIMEWAIT_LEN; a constant, which
/// `tcp_fin_timeout` does not change).
pub const TIME_WAIT: Duration = Duration::from_secs(60);

/// Who closes a connection first, and so keeps it in TIME_WAIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Closer {
    /// We, the ones who dial: every tuple is lost to us for 60 s more.
    Us,
    /// The other end.
    Them,
}

impl Closer {
    /// How long a tuple stays taken after the connection's end.
    pub fn time_wait(self) -> Duration {
        match self {
            Closer::Us => TIME_WAIT,
            Closer::Them => Duration::ZERO,
        }
    }
}

/// Why there is nothing to plan with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BudgetError {
    /// Reserved from end to end.
    #[error(
        "all {ports} ports of {range} are reserved: widen ip_local_port_range or shorten ip_local_reserved_ports"
    )]
    AllReserved {
        /// The range.
        range: PortRange,
        /// Its length.
        ports: u32,
    },
    /// No address to dial from.
    #[error("0 sources: expected at least one source address")]
    NoSources,
    /// Nowhere to dial.
    #[error("0 destinations: expected at least one destination")]
    NoDestinations,
}

/// Tuples there are: ports x sources x destinations.
///
/// ```
/// use std::time::Duration;
/// use fourtuple::ports::{Budget, Closer, PortRange, PortSet};
///
/// let budget = Budget::new(PortRange::KERNEL_DEFAULT, &PortSet::new(), true, 1, 1).unwrap();
/// assert_eq!((budget.capacity(), budget.before_the_cliff()), (28_232, 14_116));
/// // Closing first, one source address cannot dial one server more often than this.
/// assert_eq!(budget.ceiling_per_s(Duration::ZERO, Closer::Us) as u32, 470);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    ports: u32,
    first_half: u32,
    sources: u64,
    destinations: u64,
}

impl Budget {
    /// `by_parity` says whether searches go by parity ([`halves`](super::halves)): in a range of odd length such a search
    /// does not see one of the ports (see [`TupleTable`](super::TupleTable)). Which one depends on where it starts, so
    /// that a fill may still get them all; but the last connection cannot be counted on, and is left out.
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
        // It is the first port in all but one of the starts, and the last one in that.
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

    /// Ports that one source has for one destination; at least 1.
    pub fn ports(&self) -> u32 {
        self.ports
    }

    /// (source, destination) pairs.
    pub fn pairs(&self) -> u64 {
        self.sources.saturating_mul(self.destinations)
    }

    /// Connections that fit at once, over all pairs.
    pub fn capacity(&self) -> u64 {
        self.pairs().saturating_mul(u64::from(self.ports))
    }

    /// Connections that fit before a search by parity has used up its first half, over all pairs. The pairs are taken
    /// to be equally loaded.
    pub fn before_the_cliff(&self) -> u64 {
        self.pairs().saturating_mul(u64::from(self.first_half))
    }

    /// New connections per second that can go on for ever when each is open for `hold`: capacity over the time that a
    /// tuple stays taken (Little's law). Infinite when that is no time at all.
    pub fn ceiling_per_s(&self, hold: Duration, closer: Closer) -> f64 {
        self.capacity() as f64 / (hold.as_secs_f64() + closer.time_wait().as_secs_f64())
    }
}

/// Tuples in use once as many come as go, at `arrival_per_s` new connections per second (Little's law).
pub fn steady_tuples(arrival_per_s: f64, hold: Duration, closer: Closer) -> u64 {
    // `as` saturates, and makes 0 of what is not a number.
    (arrival_per_s * (hold.as_secs_f64() + closer.time_wait().as_secs_f64())).ceil() as u64
}
