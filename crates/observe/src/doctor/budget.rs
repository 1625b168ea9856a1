//! The ports that a tuple has left.

use fourtuple_record::snapshot::{Snapshot, Tuple};

use crate::doctor::words::{count, counted, rate};

/// TCP_TIMEWAIT_LEN in seconds (include/net/tcp.h).
pub(crate) const TIME_WAIT_SECONDS: f64 = 60.0;

/// Seconds over which [`Tuple::closes_per_s`] is counted.
pub(crate) const RECENT_SECONDS: f64 = 10.0;

/// The ports of a tuple.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Ports that connect() may choose for the tuple, including ports in use.
    pub total: u32,
    /// Ports of the range that bind() holds, for all tuples.
    pub(crate) held: u32,
    pub(crate) in_use: u32,
    /// Sockets in TIME_WAIT, at most `in_use`.
    pub(crate) time_wait: u32,
    /// Ports in TIME_WAIT that connect() may take again now (net.ipv4.tcp_tw_reuse).
    pub(crate) reusable: u32,
    /// Ports in TIME_WAIT that connect() never takes again before TIME_WAIT ends, for lack of TCP timestamps.
    pub(crate) plain: u32,
    /// Time after the close at which connect() may take the port again.
    pub(crate) wait_s: f64,
    /// Connections that this side closed first, per second, over the last 10 s.
    pub(crate) closes_per_s: f64,
    /// Connections that this side closed first in the last second.
    pub(crate) closed_last_s: u32,
    /// Growth of the ports in use per second; `None`: there is no second reading.
    pub(crate) growth_per_s: Option<f64>,
    /// Whether `plain` is presumed, because none of its sockets could be read and no port was taken again meanwhile.
    pub(crate) is_presumed: bool,
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
        let total = ports.usable() - held;
        let is_idle = tuple.in_use >= total && is_reuse_idle(snapshot);
        let unread = tuple.time_wait_plain.is_none() && may_be_plain(snapshot, tuple);
        let is_likely = unread && (was_never_reused(snapshot) || is_idle);
        let plain = tuple.time_wait_plain.unwrap_or(if is_likely { time_wait } else { 0 }).min(time_wait);
        // One connection tells about the next ones: the peer is the same.
        let reuse = reuse_delay_s(snapshot, tuple).filter(|_| plain * 2 <= time_wait);
        let wait_s = reuse.unwrap_or(TIME_WAIT_SECONDS);
        // TIME_WAIT sockets that are younger than the delay.
        let young = (tuple.closes_per_s * wait_s).ceil() as u32;
        let reusable = if reuse.is_some() { (time_wait - plain).saturating_sub(young) } else { 0 };
        Ok(Budget {
            total,
            held,
            in_use: tuple.in_use,
            time_wait,
            reusable,
            plain,
            wait_s,
            closes_per_s: tuple.closes_per_s,
            closed_last_s: tuple.closed_last_s,
            growth_per_s: (snapshot.interval_ns > 0).then_some(tuple.growth_per_s),
            is_presumed: is_likely && !was_never_reused(snapshot),
        })
    }

    /// Returns whether most ports in TIME_WAIT stay taken for lack of TCP timestamps.
    pub(crate) fn is_plain(&self) -> bool {
        self.plain * 2 > self.time_wait
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
    pub fn is_full(&self) -> bool {
        self.total > 0 && self.taken() >= self.total
    }

    /// Returns whether a draw finds a port sooner than the search of the kernel: one port in 100 is unused, and the search does not end at
    /// a port in TIME_WAIT that connect() may take again, one of 100 of which ends it after about 100 lookups.
    pub fn draws_pay(&self) -> bool {
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

    /// Returns whether growth of the ports in use ends below the ports: most are in TIME_WAIT, and the closes need no more than there are.
    pub(crate) fn is_bounded(&self) -> bool {
        self.time_wait * 2 > self.in_use && self.plateau() <= f64::from(self.total)
    }

    /// Returns what this side closed first, over 10 s and now, and what can last.
    pub(crate) fn closed(&self) -> String {
        format!(
            "closed {} in the last 10 s, {} in the last second; at most {} can last",
            counted((self.closes_per_s * RECENT_SECONDS).round() as u64, "connection"),
            count(self.closed_last_s.into()),
            rate(self.ceiling_per_s())
        )
    }

    /// Returns whether the closes need more ports than there are. Many closes at once, such as the end of a pool, are not a rate: the ports in
    /// use then do not grow.
    pub(crate) fn is_outrun(&self) -> bool {
        self.plateau() > f64::from(self.total) && self.growth_per_s.is_none_or(|growth| growth > 0.0)
    }
}

/// Returns whether a `fix ports` gives new connections to the destination of a tuple other sources, one of which has free ports.
pub(crate) fn is_relieved(snapshot: &Snapshot, tuple: &Tuple) -> bool {
    let tuples = snapshot.connections.seen().map(|all| all.tuples.as_slice()).unwrap_or_default();
    let others =
        tuples.iter().filter(|other| other.destination == tuple.destination && other.source != tuple.source);
    let mut others = others.filter_map(|other| Budget::of(snapshot, other).ok());
    tuple.fix.as_ref().is_some_and(|fix| fix.source.is_some()) && others.any(|budget| !budget.is_full())
}

/// Returns the number of sockets of a tuple in a state.
pub(crate) fn state(tuple: &Tuple, name: &str) -> u64 {
    tuple.states.get(name).copied().unwrap_or(0)
}

/// Returns the time after which connect() takes a port in TIME_WAIT again, or `None` if connect() does not before TIME_WAIT ends
/// (`tcp_twsk_unique`). Whether the peer has timestamps is another question: [`Budget::is_plain`].
pub(crate) fn reuse_delay_s(snapshot: &Snapshot, tuple: &Tuple) -> Option<f64> {
    let is_allowed = match snapshot.number("net.ipv4.tcp_tw_reuse") {
        Ok(1) => true,
        Ok(2) => is_loopback(tuple),
        _ => false,
    };
    let has_timestamps = snapshot.number("net.ipv4.tcp_timestamps").is_ok_and(|value| value != 0);
    (is_allowed && has_timestamps).then(|| delay_s(snapshot))
}

/// Returns whether connect() may be kept from the ports of a tuple in TIME_WAIT by lack of TCP timestamps only.
fn may_be_plain(snapshot: &Snapshot, tuple: &Tuple) -> bool {
    !is_loopback(tuple) && reuse_delay_s(snapshot, tuple).is_some()
}

/// Returns whether no port in TIME_WAIT of the namespace was ever taken again. With TCP timestamps connect() would have taken one while it
/// filled the ports, as its search starts at random.
fn was_never_reused(snapshot: &Snapshot) -> bool {
    snapshot.counter("TcpExt.TWRecycled").is_ok_and(|counter| counter.total == 0)
}

/// Returns whether no port in TIME_WAIT was taken again between the readings: towards full ports each connect() that succeeds takes one.
fn is_reuse_idle(snapshot: &Snapshot) -> bool {
    snapshot.interval_ns > 0 && snapshot.counter("TcpExt.TWRecycled").is_ok_and(|counter| counter.during == 0)
}

fn is_loopback(tuple: &Tuple) -> bool {
    tuple.source.is_loopback() || tuple.destination.ip().is_loopback()
}

/// Returns net.ipv4.tcp_tw_reuse_delay (Linux 6.14); 1 s before.
pub(crate) fn delay_s(snapshot: &Snapshot) -> f64 {
    snapshot.number("net.ipv4.tcp_tw_reuse_delay").map_or(1.0, |delay| delay as f64 / 1e3)
}

/// A source and a destination that use a share of the ports.
#[derive(Clone, Copy, Debug)]
pub struct Shortage<'a> {
    pub tuple: &'a Tuple,
    pub budget: Budget,
}

/// Returns the sources and destinations for which connect() cannot take this share of the ports, 0 to 1.
///
/// # Errors
///
/// The ports or the connections were not read.
pub fn shortages(snapshot: &Snapshot, share: f64) -> Result<Vec<Shortage<'_>>, String> {
    let mut found = Vec::new();
    for tuple in &snapshot.connections.seen()?.tuples {
        let budget = Budget::of(snapshot, tuple)?;
        if budget.is_past(share * 100.0) {
            found.push(Shortage { tuple, budget });
        }
    }
    Ok(found)
}
