//! The ports that a tuple has left.

use fourtuple_record::snapshot::{Snapshot, Tuple};

/// TCP_TIMEWAIT_LEN in seconds (include/net/tcp.h).
pub(crate) const TIME_WAIT_SECONDS: f64 = 60.0;

/// The ports of a tuple.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Ports that connect() may choose for the tuple, including ports in use.
    pub total: u32,
    /// Ports of the range that bind() holds, for all tuples.
    pub(crate) held: u32,
    /// Ports in use.
    pub(crate) in_use: u32,
    /// Sockets in TIME_WAIT, at most `in_use`.
    pub(crate) time_wait: u32,
    /// Ports in TIME_WAIT that connect() may take again now (net.ipv4.tcp_tw_reuse).
    pub(crate) reusable: u32,
    /// Time after the close at which connect() may take the port again.
    pub(crate) wait_s: f64,
    /// Connections that this side closes first, per second.
    pub(crate) closes_per_s: f64,
    /// Growth of the ports in use per second; `None`: there is no second reading.
    pub(crate) growth_per_s: Option<f64>,
}

impl Budget {
    /// Returns the budget of a tuple.
    ///
    /// # Errors
    ///
    /// The ports or the connections were not read.
    pub fn of(snapshot: &Snapshot, tuple: &Tuple) -> Result<Budget, String> {
        let ports = snapshot.ports.seen()?;
        let held = snapshot.connections.seen()?.held_tcp.min(ports.usable());
        let time_wait = (state(tuple, "time-wait") as u32).min(tuple.in_use);
        let reuse = reuse_delay_s(snapshot, tuple);
        let wait_s = reuse.unwrap_or(TIME_WAIT_SECONDS);
        // TIME_WAIT sockets that are younger than the delay.
        let young = (tuple.closes_per_s * wait_s).ceil() as u32;
        let reusable = if reuse.is_some() { time_wait.saturating_sub(young) } else { 0 };
        Ok(Budget {
            total: ports.usable() - held,
            held,
            in_use: tuple.in_use,
            time_wait,
            reusable,
            wait_s,
            closes_per_s: tuple.closes_per_s,
            growth_per_s: (snapshot.interval_ns > 0).then_some(tuple.growth_per_s),
        })
    }

    /// Returns the ports that connect() cannot take.
    pub fn taken(&self) -> u32 {
        self.in_use - self.reusable
    }

    /// Returns the ports that connect() can take now.
    pub fn free(&self) -> u32 {
        self.total.saturating_sub(self.taken())
    }

    /// Returns whether connect() cannot take this share of the ports.
    pub(crate) fn is_past(&self, percent: f64) -> bool {
        self.total > 0 && f64::from(self.taken()) >= f64::from(self.total) * percent / 100.0
    }

    /// Returns whether no port is left.
    pub(crate) fn is_full(&self) -> bool {
        self.total > 0 && self.taken() >= self.total
    }

    /// Returns whether a draw finds a port sooner than the search of the kernel: one port in 100 is unused, and the search does not end at
    /// a port in TIME_WAIT that connect() may take again, one of 100 of which ends it after about 100 lookups.
    pub(crate) fn draws_pay(&self) -> bool {
        let unused = u64::from(self.total.saturating_sub(self.in_use));
        unused * 100 >= u64::from(self.total) && u64::from(self.reusable) * 100 < self.in_use.into()
    }

    /// Returns the connections per second that this side can close first for ever.
    pub(crate) fn ceiling_per_s(&self) -> f64 {
        f64::from(self.total) / self.wait_s
    }

    /// Returns the ports in use when the rate at which this side closes lasts: the plateau after 60 s.
    pub(crate) fn plateau(&self) -> f64 {
        f64::from(self.in_use - self.time_wait) + self.closes_per_s * self.wait_s
    }

    /// Returns whether the closes need more ports than there are. Many closes at once, such as the end of a pool, are no rate: the ports in
    /// use then do not grow.
    pub(crate) fn is_outrun(&self) -> bool {
        self.plateau() > f64::from(self.total) && self.growth_per_s.is_none_or(|growth| growth > 0.0)
    }
}

/// Returns the number of sockets of a tuple in a state.
pub(crate) fn state(tuple: &Tuple, name: &str) -> u64 {
    tuple.states.get(name).copied().unwrap_or(0)
}

/// Returns the time after which connect() takes a port in TIME_WAIT again, or `None` if connect() does not before TIME_WAIT ends
/// (`tcp_twsk_unique`). Whether the peer has timestamps is not known.
pub(crate) fn reuse_delay_s(snapshot: &Snapshot, tuple: &Tuple) -> Option<f64> {
    let is_loopback = tuple.source.is_loopback() || tuple.destination.ip().is_loopback();
    let is_allowed = match snapshot.number("net.ipv4.tcp_tw_reuse") {
        Ok(1) => true,
        Ok(2) => is_loopback,
        _ => false,
    };
    let has_timestamps = snapshot.number("net.ipv4.tcp_timestamps").is_ok_and(|value| value != 0);
    (is_allowed && has_timestamps).then(|| delay_s(snapshot))
}

/// Returns net.ipv4.tcp_tw_reuse_delay (Linux 6.14); 1 s before.
pub(crate) fn delay_s(snapshot: &Snapshot) -> f64 {
    snapshot.number("net.ipv4.tcp_tw_reuse_delay").map_or(1.0, |delay| delay as f64 / 1e3)
}
