//! Source ports as numbers: ranges, reserved ports and budgets.
//!
//! Nothing in this module opens a socket, reads a clock or draws random numbers: callers pass all of these in, so that each
//! claim can be tested.
//!
//! Example: [`Budget`].

use std::fmt;
use std::ops::RangeBounds;
use std::str::FromStr;
use std::time::Duration;

use fastrand::Rng;

/// A range of ports with both ends inclusive, as in net.ipv4.ip_local_port_range.
///
/// ```
/// use fourtuple::ports::{PortRange, RangeError};
///
/// let range: PortRange = "32768-60999".parse()?; // also the two columns of /proc/sys/net/ipv4/ip_local_port_range
/// assert_eq!(range, PortRange::KERNEL_DEFAULT);
/// assert_eq!((range.low(), range.high(), range.len()), (32768, 60999, 28_232));
/// assert!(range.contains(60999) && !range.contains(61000));
/// assert_eq!(PortRange::single(443).iter().collect::<Vec<u16>>(), [443]);
/// assert_eq!(PortRange::new(9, 8), Err(RangeError::Backwards { low: 9, high: 8 }));
/// # Ok::<(), RangeError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortRange {
    low: u16,
    high: u16,
}

/// An invalid range of ports.
///
/// ```
/// use fourtuple::ports::{PortRange, RangeError};
///
/// assert_eq!("80".parse::<PortRange>(), Err(RangeError::Malformed("80".to_owned())));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// The first port is above the last.
    #[error("the range {low}-{high} runs backwards: the first port must not be above the last")]
    Backwards {
        /// First port.
        low: u16,
        /// Last port.
        high: u16,
    },
    /// The text is not a pair of numbers from 0 to 65535.
    #[error("{0:?} is not a range of ports: expected LOW-HIGH, each from 0 to 65535, such as 32768-60999")]
    Malformed(String),
}

impl PortRange {
    /// All ports. As a window it means the full range of the namespace, because the kernel clamps windows to that range
    /// (`inet_sk_get_local_port_range`).
    pub const ALL: PortRange = PortRange { low: 0, high: u16::MAX };

    /// The default of the kernel: 32768 to 60999.
    pub const KERNEL_DEFAULT: PortRange = PortRange { low: 32768, high: 60999 };

    /// Creates the range from `low` to `high`, both inclusive.
    ///
    /// # Errors
    ///
    /// [`RangeError::Backwards`] if `low` is above `high`.
    pub fn new(low: u16, high: u16) -> Result<Self, RangeError> {
        if low > high { Err(RangeError::Backwards { low, high }) } else { Ok(PortRange { low, high }) }
    }

    /// Creates the range of one port.
    pub fn single(port: u16) -> Self {
        PortRange { low: port, high: port }
    }

    /// Returns the first port.
    pub fn low(self) -> u16 {
        self.low
    }

    /// Returns the last port, inclusive.
    pub fn high(self) -> u16 {
        self.high
    }

    /// Returns the number of ports, at least 1.
    #[allow(clippy::len_without_is_empty, reason = "a range is never empty")]
    pub fn len(self) -> u32 {
        u32::from(self.high - self.low) + 1
    }

    /// Returns whether `port` is in the range.
    pub fn contains(self, port: u16) -> bool {
        self.low <= port && port <= self.high
    }

    /// Returns the ports that a socket with the IP_LOCAL_PORT_RANGE `wanted` may use in a namespace with this range. The kernel
    /// ignores each bound that is outside of this range (`inet_sk_get_local_port_range`).
    ///
    /// ```
    /// use fourtuple::ports::PortRange;
    ///
    /// let namespace = PortRange::KERNEL_DEFAULT;
    /// assert_eq!(namespace.window(PortRange::ALL), namespace);
    /// assert_eq!(namespace.window(PortRange::new(100, 200).unwrap()), namespace);
    /// assert_eq!(namespace.window(PortRange::new(60000, 65000).unwrap()).to_string(), "60000-60999");
    /// ```
    pub fn window(self, wanted: PortRange) -> PortRange {
        PortRange {
            low: if self.contains(wanted.low) { wanted.low } else { self.low },
            high: if self.contains(wanted.high) { wanted.high } else { self.high },
        }
    }

    /// Returns the words of a [`PortSet`] that contain the range: index and mask of each.
    fn masks(self) -> impl Iterator<Item = (u16, u64)> {
        (self.low >> 6..=self.high >> 6).map(move |index| (index, mask(self, index)))
    }

    /// Iterates over all ports in ascending order.
    pub fn iter(self) -> impl ExactSizeIterator<Item = u16> {
        // Computed in usize, because 65,535 has no successor in u16. The index is below 65,536.
        (0..self.len() as usize).map(move |index| self.low + index as u16)
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}-{}", self.low, self.high)
    }
}

impl FromStr for PortRange {
    type Err = RangeError;

    /// Parses `LOW-HIGH`, and the two columns of /proc/sys/net/ipv4/ip_local_port_range.
    fn from_str(text: &str) -> Result<Self, RangeError> {
        let malformed = || RangeError::Malformed(text.to_owned());
        let (low, high) =
            text.trim().split_once(|c: char| c == '-' || c.is_ascii_whitespace()).ok_or_else(malformed)?;
        let port = |text: &str| text.trim().parse::<u16>().map_err(|_| malformed());
        PortRange::new(port(low)?, port(high)?)
    }
}

/// A set of ports in 8 KiB, such as the reserved ports or the ports in use.
///
/// ```
/// use fourtuple::ports::{PortRange, PortSet};
///
/// let mut reserved = PortSet::parse_list("8080,9000-9002")?; // as in net.ipv4.ip_local_reserved_ports
/// let range = PortRange::new(9000, 9003)?;
/// assert!(reserved.contains(8080) && !reserved.contains(9003));
/// assert_eq!((reserved.count_in(range), reserved.next_free(range, 9001)), (3, Some(9003)));
///
/// assert!(reserved.insert(9003) && !reserved.insert(9003));
/// assert_eq!(reserved.next_free(range, 9001), None);
/// assert!(reserved.remove(9000));
/// assert_eq!(reserved.next_free(range, 9001), Some(9000)); // the search continues at the first port
///
/// let mut used = PortSet::new();
/// used.copy_from(&reserved);
/// reserved.clear();
/// assert_eq!((used.count_in(PortRange::ALL), reserved.count_in(PortRange::ALL)), (4, 0));
/// # Ok::<(), fourtuple::ports::RangeError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct PortSet {
    words: Box<[u64; 1024]>,
}

impl PortSet {
    /// Creates an empty set.
    pub fn new() -> Self {
        PortSet { words: Box::new([0; 1024]) }
    }

    /// Returns whether `port` is in the set.
    pub fn contains(&self, port: u16) -> bool {
        self.words[usize::from(port >> 6)] >> (port & 63) & 1 == 1
    }

    /// Adds `port`. Returns false if the set contained it already.
    pub fn insert(&mut self, port: u16) -> bool {
        let word = &mut self.words[usize::from(port >> 6)];
        let bit = 1 << (port & 63);
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh
    }

    /// Removes `port`. Returns false if the set did not contain it.
    pub fn remove(&mut self, port: u16) -> bool {
        let word = &mut self.words[usize::from(port >> 6)];
        let bit = 1 << (port & 63);
        let held = *word & bit != 0;
        *word &= !bit;
        held
    }

    /// Removes all ports.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// Returns 64 ports from port 64 x `index` on, the lowest in the lowest bit.
    fn word(&self, index: u16) -> u64 {
        self.words[usize::from(index)]
    }

    /// Copies `other` into this set without an allocation.
    pub fn copy_from(&mut self, other: &PortSet) {
        self.words.copy_from_slice(&other.words[..]);
    }

    /// Returns the number of ports of `range` in the set.
    pub fn count_in(&self, range: PortRange) -> u32 {
        range.masks().map(|(index, mask)| (self.word(index) & mask).count_ones()).sum()
    }

    /// Returns the first port of `range`, from `start` on, that is not in the set; `None`: the set has all ports of the range. After
    /// the end of the range the search continues at its first port. `start` is a port of the range.
    pub fn next_free(&self, range: PortRange, start: u16) -> Option<u16> {
        debug_assert!(range.contains(start));
        self.first_free(PortRange { low: start, high: range.high }).or_else(|| self.first_free(range))
    }

    fn first_free(&self, range: PortRange) -> Option<u16> {
        (range.low >> 6..=range.high >> 6).find_map(|index| {
            let free = !self.words[usize::from(index)] & mask(range, index);
            (free != 0).then(|| (index << 6) + free.trailing_zeros() as u16)
        })
    }

    /// Parses the list format of net.ipv4.ip_local_reserved_ports: `8080,9000-9005`. An empty text is an empty set.
    ///
    /// # Errors
    ///
    /// [`RangeError`] for the first entry that is neither a port nor a range.
    pub fn parse_list(text: &str) -> Result<Self, RangeError> {
        let mut set = PortSet::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            let range: PortRange = match part.parse::<u16>() {
                Ok(port) => PortRange::single(port),
                Err(_) => part.parse()?,
            };
            for port in range.iter() {
                set.insert(port);
            }
        }
        Ok(set)
    }
}

/// Returns the bits of word `index` for the ports within `range`.
fn mask(range: PortRange, index: u16) -> u64 {
    let mut mask = u64::MAX;
    if index == range.low >> 6 {
        mask &= u64::MAX << (range.low & 63);
    }
    if index == range.high >> 6 {
        mask &= u64::MAX >> (63 - (range.high & 63));
    }
    mask
}

impl Default for PortSet {
    fn default() -> Self {
        PortSet::new()
    }
}

/// Does the same as [`PortSet::parse_list`].
impl FromStr for PortSet {
    type Err = RangeError;

    fn from_str(text: &str) -> Result<Self, RangeError> {
        PortSet::parse_list(text)
    }
}

/// Writes the list format of net.ipv4.ip_local_reserved_ports.
impl fmt::Display for PortSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ports = PortRange::ALL.iter().filter(|port| self.contains(*port)).peekable();
        let mut separator = "";
        while let Some(low) = ports.next() {
            let mut high = low;
            while let Some(next) = ports.next_if(|port| port - high == 1) {
                high = next;
            }
            write!(formatter, "{separator}{low}")?;
            if high > low {
                write!(formatter, "-{high}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

impl fmt::Debug for PortSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "PortSet({} ports)", self.count_in(PortRange::ALL))
    }
}

/// A generator of pseudo-random numbers, for pure functions that draw ports. Equal seeds give equal sequences in one version of this
/// crate. The generator is fast and not cryptographic.
///
/// ```
/// use fourtuple::ports::Random;
///
/// let mut random = Random::with_seed(1);
/// let port = random.u16(32768..=60999);
/// assert!((32768..=60999).contains(&port) && random.u32(..10) < 10);
///
/// let mut continued = Random::with_seed(random.state());
/// assert_eq!(continued.u64(), random.u64());
/// random.seed(1);
/// assert_eq!(random.u16(32768..=60999), port);
/// ```
#[derive(Clone, Debug)]
pub struct Random(Rng);

impl Random {
    /// Returns a generator with a seed.
    pub const fn with_seed(seed: u64) -> Random {
        Random(Rng::with_seed(seed))
    }

    /// Starts the sequence of another seed.
    pub fn seed(&mut self, seed: u64) {
        self.0.seed(seed);
    }

    /// Returns the seed with which another generator continues this sequence.
    pub fn state(&self) -> u64 {
        self.0.get_seed()
    }

    /// Draws a number of the range.
    ///
    /// # Panics
    ///
    /// If the range is empty.
    pub fn u16(&mut self, range: impl RangeBounds<u16>) -> u16 {
        self.0.u16(range)
    }

    /// Draws a number of the range.
    ///
    /// # Panics
    ///
    /// If the range is empty.
    pub fn u32(&mut self, range: impl RangeBounds<u32>) -> u32 {
        self.0.u32(range)
    }

    /// Draws a number.
    pub fn u64(&mut self) -> u64 {
        self.0.u64(..)
    }
}

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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn both_notations_of_a_range_are_parsed() {
        assert_eq!("32768-60999".parse(), Ok(PortRange::KERNEL_DEFAULT));
        assert_eq!("32768\t60999\n".parse(), Ok(PortRange::KERNEL_DEFAULT));
        assert_eq!("9-8".parse::<PortRange>(), Err(RangeError::Backwards { low: 9, high: 8 }));
        for text in ["", "9", "9-", "-9", "0-65536", "a-b", "1-2-3"] {
            assert!(matches!(text.parse::<PortRange>(), Err(RangeError::Malformed(_))), "{text:?}");
        }
    }

    #[test]
    fn the_whole_range_has_65536_ports() {
        assert_eq!(PortRange::ALL.len(), 65536);
        assert_eq!(PortRange::ALL.iter().last(), Some(65535));
        assert_eq!(PortRange::single(65535).iter().collect::<Vec<_>>(), [65535]);
    }

    #[test]
    fn reserved_lists_are_parsed_as_the_kernel_writes_them() {
        let set = PortSet::parse_list("8080,9000-9002\n").unwrap();
        assert_eq!(set.count_in(PortRange::ALL), 4);
        assert!(set.contains(8080) && set.contains(9000) && set.contains(9002) && !set.contains(9003));
        assert_eq!(PortSet::parse_list("\n").unwrap(), PortSet::new());
        assert!(PortSet::parse_list("80,x").is_err());
        for text in ["", "0", "65535", "8080,9000-9002", "0-65535", "1-2,4-5,63-64"] {
            assert_eq!(text.parse::<PortSet>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn the_next_free_port_wraps_around() {
        let range = PortRange::new(60, 130).unwrap();
        let mut set = PortSet::new();
        assert_eq!(set.next_free(range, 64), Some(64));
        for port in 64..=130 {
            set.insert(port);
        }
        assert_eq!(set.next_free(range, 64), Some(60));
        assert_eq!(set.count_in(range), 67);
        for port in 60..64 {
            set.insert(port);
        }
        assert_eq!(set.next_free(range, 130), None);
        assert!(set.remove(99) && !set.remove(99));
        assert_eq!(set.next_free(range, 100), Some(99));
    }

    proptest! {
        #[test]
        fn a_port_set_is_a_set(
            acts in prop::collection::vec((any::<bool>(), 0_u16..300), 0..500),
            low in 0_u16..300,
            more in 0_u16..300,
            start in 0_u16..300,
        ) {
            let (mut set, mut model) = (PortSet::new(), HashSet::new());
            for (insert, port) in acts {
                if insert {
                    prop_assert_eq!(set.insert(port), model.insert(port));
                } else {
                    prop_assert_eq!(set.remove(port), model.remove(&port));
                }
            }
            let range = PortRange::new(low, low + more).unwrap();
            let within = model.iter().filter(|port| range.contains(**port)).count();
            prop_assert_eq!(set.count_in(range) as usize, within);
            prop_assert!((0..400).all(|port| set.contains(port) == model.contains(&port)));
            let start = low + start % (more + 1);
            let next = (start..=range.high()).chain(low..start).find(|port| !model.contains(port));
            prop_assert_eq!(set.next_free(range, start), next);
        }
    }
}
