use std::fmt;

use fourtuple::ports::{PortRange, PortSet, Random};

/// The kernel's search of a window that was set with IP_LOCAL_PORT_RANGE. Without a window all kernels search the range of the
/// namespace by parity (`__inet_hash_connect`).
///
/// Example: [`TupleTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums, reason = "two generations of kernels")]
pub enum WindowSearch {
    /// Before Linux 6.8: first the ports with the parity of the window's first port, then the ports of the opposite parity.
    Parity,
    /// Since Linux 6.8: port by port.
    Linear,
}

/// The ports that a search probed, by state: the cost of a probe depends on the state.
///
/// Example: [`TupleTable`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Probes {
    /// The free port that the search took.
    pub free: u64,
    /// Ports held by an open connection of this tuple.
    pub established: u64,
    /// Ports held by a TIME_WAIT socket of this tuple.
    pub time_wait: u64,
    /// Ports skipped without a lookup: reserved (`ip_local_reserved_ports`), or bound by number by a socket of the namespace.
    pub skipped: u64,
}

impl Probes {
    /// Returns the number of probed ports that were not free.
    pub fn taken(self) -> u64 {
        self.established + self.time_wait + self.skipped
    }

    /// Returns the number of all probed ports.
    pub fn total(self) -> u64 {
        self.free + self.taken()
    }
}

impl std::ops::AddAssign for Probes {
    fn add_assign(&mut self, other: Probes) {
        self.free += other.free;
        self.established += other.established;
        self.time_wait += other.time_wait;
        self.skipped += other.skipped;
    }
}

/// The result of one search or one bind().
///
/// Example: [`TupleTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs, reason = "two generations of kernels")]
pub struct SearchResult {
    /// The port, now in use; `None`: the kernel returns EADDRNOTAVAIL.
    pub port: Option<u16>,
    /// The ports probed by the search.
    pub probes: Probes,
}

/// A model of the kernel's port table for one (source, destination, destination port), and of the kernel's port search.
///
/// The model is exact for a single dialer: it has the same start, the same order, and the same pointer that advances with each
/// success (`table_perturb`). It omits that the kernel changes the start every 10 s (`EPHEMERAL_PORT_SHUFFLE_PERIOD`), and that
/// several destinations may share one of the 65,536 pointers. A search does not reuse TIME_WAIT tuples, as with `tcp_tw_reuse=0`, or
/// with 2 for destinations other than loopback.
///
/// ```
/// use fourtuple::ports::{PortRange, PortSet};
/// use fourtuple_observe::plan::{WindowSearch, TupleTable};
///
/// let range = PortRange::new(32768, 32775).unwrap();
/// let mut random = fourtuple::ports::Random::with_seed(1);
/// let mut table = TupleTable::new(range, WindowSearch::Linear, &PortSet::new(), &mut random);
/// let ports: Vec<u16> = (0..8).map(|_| table.connect(None, &mut random).port.unwrap()).collect();
/// // Without the option all even ports go first, and a ninth connection finds nothing.
/// assert!(ports[..4].iter().all(|port| port % 2 == 0) && ports[4..].iter().all(|port| port % 2 == 1));
/// assert_eq!(table.connect(None, &mut random).port, None);
/// assert_eq!(table.connect(Some(PortRange::ALL), &mut random).probes.established, 8);
///
/// // A connection that this end closes first stays in TIME_WAIT. No search takes its port, but bind() by number does.
/// assert!(table.close(32770));
/// let found = table.connect(None, &mut random);
/// assert_eq!((found.port, found.probes.time_wait, found.probes.taken()), (None, 1, 8));
/// assert_eq!((table.held(), table.in_time_wait()), (8, 1));
/// assert_eq!(table.bind(32770).port, Some(32770));
///
/// // Another socket of the namespace binds 32771 by number: of the two free ports, a search takes 32772 only.
/// table.poison(32771);
/// assert!(table.release(32771) && table.release(32772));
/// assert_eq!(table.connect(None, &mut random).port, Some(32772));
///
/// table.reset(&mut random); // for another destination
/// assert_eq!((table.held(), table.range()), (0, range));
/// let found = table.connect(None, &mut random);
/// assert_eq!((found.probes.free, found.probes.total()), (1, 1));
/// ```
#[derive(Clone)]
pub struct TupleTable {
    range: PortRange,
    search: WindowSearch,
    free: FreePorts,
    pristine: FreePorts,
    reserved: PortSet,
    /// Ports that are reserved, or bound by number elsewhere in the namespace. They never become free.
    passed: PortSet,
    /// The ports of `passed` within the range, and the ports of the range that are bound by number for this tuple.
    skipped: CountedSet,
    /// Value of `skipped` in the empty table.
    pristine_skipped: CountedSet,
    established: Words,
    time_wait: CountedSet,
    /// Ports bound by number for this tuple.
    bound: PortSet,
    /// Whether a port was bound since the table was empty. Such a port may be outside of the range, and in two of these sets.
    binds: bool,
    held: u32,
    /// `table_perturb[index] + (port_offset >> 32)`: start of the next search, modulo the length of its range.
    pointer: u32,
}

impl fmt::Debug for TupleTable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("TupleTable")
            .field("range", &self.range)
            .field("search", &self.search)
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

impl TupleTable {
    /// Creates an empty table for a namespace with the port range `range` and these reserved ports.
    pub fn new(range: PortRange, search: WindowSearch, reserved: &PortSet, random: &mut Random) -> Self {
        let free = FreePorts::new(range, reserved);
        let mut skipped = CountedSet::default();
        for port in range.iter().filter(|&port| reserved.contains(port)) {
            skipped.insert(port);
        }
        TupleTable {
            range,
            search,
            pristine: free.clone(),
            free,
            reserved: reserved.clone(),
            passed: reserved.clone(),
            pristine_skipped: skipped.clone(),
            skipped,
            established: Words::default(),
            time_wait: CountedSet::default(),
            bound: PortSet::new(),
            binds: false,
            held: 0,
            pointer: random.u32(..),
        }
    }

    /// Clears the table for another destination, with another start. Faster than [`TupleTable::new`].
    pub fn reset(&mut self, random: &mut Random) {
        self.free.reset_to(&self.pristine);
        self.time_wait.clear();
        if self.binds {
            self.established.clear();
            self.bound.clear();
            self.skipped.clone_from(&self.pristine_skipped);
        } else {
            self.established.clear_in(self.range);
        }
        (self.binds, self.held, self.pointer) = (false, 0, random.u32(..));
    }

    /// Returns the port range of the namespace.
    pub fn range(&self) -> PortRange {
        self.range
    }

    pub(super) fn reserved(&self) -> &PortSet {
        &self.reserved
    }

    /// Returns the number of ports of the range that are not reserved, free or in use.
    pub fn ports(&self) -> u32 {
        self.range.len() - self.pristine_skipped.len()
    }

    /// Returns the number of tuples in use, open or in TIME_WAIT.
    pub fn held(&self) -> u32 {
        self.held
    }

    /// Returns the number of tuples in TIME_WAIT.
    pub fn in_time_wait(&self) -> u32 {
        self.time_wait.len()
    }

    /// Simulates connect() on a socket without a port: searches `window`, clamped by [`PortRange::window`], or the range of the
    /// namespace. The window 0-0 means no window: the kernel stores both bounds in one word, and 0 stands for "not set".
    #[inline]
    pub fn connect(&mut self, window: Option<PortRange>, random: &mut Random) -> SearchResult {
        let window = window.filter(|window| window.high() > 0);
        let range = window.map_or(self.range, |window| self.range.window(window));
        let scan = match (self.search, window) {
            (WindowSearch::Linear, Some(_)) => Scan { range, remaining: range.len(), step: 1 },
            _ => Scan { range, remaining: (range.len() & !1).max(1), step: 2 },
        };
        let offset = (self.pointer % scan.remaining) & !(scan.step - 1);
        // Most searches take the first probed port. `offset` is below the length of the range.
        let first = range.low() + offset as u16;
        if self.free.contains(first) {
            self.take(first, 0, scan.step, random);
            return SearchResult { port: Some(first), probes: Probes { free: 1, ..Probes::default() } };
        }
        self.search(&scan, offset, random)
    }

    #[inline(never)]
    fn search(&mut self, scan: &Scan, offset: u32, random: &mut Random) -> SearchResult {
        let mut probes = Probes::default();
        let mut port = self.scan(scan, offset, random, &mut probes);
        if port.is_none() && scan.step == 2 && scan.remaining > 1 {
            port = self.scan(scan, offset + 1, random, &mut probes);
        }
        SearchResult { port, probes }
    }

    /// Makes one pass of `scan` and takes the first free port.
    fn scan(&mut self, scan: &Scan, offset: u32, random: &mut Random, probes: &mut Probes) -> Option<u16> {
        let mut walked = 0;
        for leg in scan.legs(offset).into_iter().flatten() {
            let Some(port) = self.free.first(leg.low, leg.high, leg.lane) else {
                self.charge(leg, leg.length, scan.step, probes);
                walked += leg.length;
                continue;
            };
            let steps = u32::from(port - leg.low) / scan.step;
            self.charge(leg, steps, scan.step, probes);
            probes.free += 1;
            self.take(port, walked + steps, scan.step, random);
            return Some(port);
        }
        None
    }

    /// Adds the first `steps` ports of a leg, all of them in use, to `probes`.
    fn charge(&self, leg: Leg, steps: u32, step: u32, probes: &mut Probes) {
        if steps == 0 {
            return;
        }
        let last = leg.low + ((steps - 1) * step) as u16;
        let skipped = self.skipped.count(leg.low, last, leg.lane);
        let mut time_wait = self.time_wait.count(leg.low, last, leg.lane);
        if time_wait > 0 && self.binds {
            // A port that is bound and in TIME_WAIT is skipped before the tuple lookup.
            let range = PortRange::new(leg.low, last).expect("a leg never runs backwards");
            let both = range.iter().step_by(step as usize);
            time_wait -= both
                .filter(|&port| self.time_wait.contains(port) && self.skipped.contains(port))
                .count() as u64;
        }
        probes.skipped += skipped;
        probes.time_wait += time_wait;
        probes.established += u64::from(steps) - skipped - time_wait;
    }

    /// Takes the port that a pass found after `walked` ports in use, and advances the pointer. The random part makes the next port
    /// hard to guess while few ports are in use.
    #[inline]
    fn take(&mut self, port: u16, walked: u32, step: u32, random: &mut Random) {
        let jump = walked.max(random.u32(..) >> 29);
        self.pointer = self.pointer.wrapping_add((jump + 1) * step);
        self.hold(port);
    }

    #[inline]
    fn hold(&mut self, port: u16) {
        self.free.remove(port);
        self.established.insert(port);
        self.held += 1;
    }

    /// Simulates bind() to `port` with SO_REUSEADDR, then connect(). Only an open connection causes a conflict. With TCP timestamps a
    /// tuple in TIME_WAIT is reused at once (`tcp_twsk_unique`), and bind() accepts reserved ports (`inet_csk_get_port`). No later
    /// search takes the port.
    pub fn bind(&mut self, port: u16) -> SearchResult {
        if self.established.contains(port) {
            return SearchResult { port: None, probes: Probes { established: 1, ..Probes::default() } };
        }
        if self.time_wait.remove(port) {
            self.held -= 1;
        }
        self.binds = true;
        self.bound.insert(port);
        if self.range.contains(port) {
            self.skipped.insert(port);
        }
        self.hold(port);
        SearchResult { port: Some(port), probes: Probes { free: 1, ..Probes::default() } }
    }

    /// Simulates a socket elsewhere in the namespace that binds `port` by number and never closes it. No search takes the port
    /// (`fastreuse >= 0`) for any destination. [`TupleTable::bind`] may still use it.
    pub fn poison(&mut self, port: u16) {
        self.passed.insert(port);
        if self.range.contains(port) {
            self.skipped.insert(port);
            self.pristine_skipped.insert(port);
            self.free.remove(port);
            self.pristine.remove(port);
            // A search skips the port before the tuple lookup, as it skips a bound port.
            self.binds = true;
        }
    }

    /// Closes the connection on `port` first, so that the tuple stays in TIME_WAIT. Returns false if there was no connection.
    pub fn close(&mut self, port: u16) -> bool {
        let open = self.established.remove(port);
        if open {
            self.time_wait.insert(port);
        }
        open
    }

    /// Frees the tuple on `port`, after the end of TIME_WAIT or when the peer closed first. Returns false if the tuple was not in use.
    ///
    /// A bind by number ends with the tuple, as in Linux 6.18. Earlier kernels skip the port while any socket uses it.
    pub fn release(&mut self, port: u16) -> bool {
        if !self.time_wait.remove(port) && !self.established.remove(port) {
            return false;
        }
        self.held -= 1;
        self.bound.remove(port);
        if self.range.contains(port) && !self.passed.contains(port) {
            self.skipped.remove(port);
            self.free.insert(port);
        }
        true
    }
}

/// The kernel's loop over a range. `remaining` is the length of the range in that loop, named as in `__inet_hash_connect`.
struct Scan {
    range: PortRange,
    remaining: u32,
    step: u32,
}

/// A part of a scan: ports in ascending order, with a distance of one step.
#[derive(Clone, Copy)]
struct Leg {
    low: u16,
    high: u16,
    length: u32,
    lane: Lane,
}

impl Scan {
    /// Returns the two legs of the pass that starts `offset` ports above the first port. After the end of the range the kernel goes
    /// back by `remaining`, not to the first port. In a range of odd length the search therefore misses one port.
    fn legs(&self, offset: u32) -> [Option<Leg>; 2] {
        let start = u32::from(self.range.low()) + offset;
        let looks = self.remaining.div_ceil(self.step);
        let to_the_end = (u32::from(self.range.high()) - start) / self.step + 1;
        let leg = |start: u32, length: u32| {
            // Both values fit, because a leg ends at the range's last port at the latest.
            let (low, high) = (start as u16, (start + (length - 1) * self.step) as u16);
            Leg { low, high, length, lane: if self.step == 1 { Lane::Both } else { Lane::of(low) } }
        };
        let first = to_the_end.min(looks);
        let second = looks - first;
        [
            Some(leg(start, first)),
            (second > 0).then(|| leg(start + to_the_end * self.step - self.remaining, second)),
        ]
    }
}

/// The ports of a range that a scan reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Even,
    Odd,
    Both,
}

impl Lane {
    /// Returns the lane that contains `port` and every second port from there.
    pub(super) fn of(port: u16) -> Self {
        if port & 1 == 0 { Lane::Even } else { Lane::Odd }
    }

    /// Returns the bits of a word of 64 ports that belong to the lane.
    pub(super) fn bits(self) -> u64 {
        match self {
            Lane::Even => 0x5555_5555_5555_5555,
            Lane::Odd => 0xAAAA_AAAA_AAAA_AAAA,
            Lane::Both => u64::MAX,
        }
    }
}

/// The ports that an automatic choice may take, with an index that finds the next free port in a few steps, however many ports in use
/// lie in between. The simulation of a fleet dial by dial depends on this.
#[derive(Clone)]
pub(super) struct FreePorts {
    words: Box<[u64; 1024]>,
    /// An index by lane (even, odd): one bit per word, set while the word has a free port of that lane.
    open: [[u64; 16]; 2],
    /// First and last word of the range: no port outside of the range is free.
    first: u16,
    last: u16,
}

impl FreePorts {
    /// Creates the set of all ports of `range` that are not in `skipped`.
    pub(super) fn new(range: PortRange, skipped: &PortSet) -> Self {
        let mut ports = FreePorts {
            words: Box::new([0; 1024]),
            open: [[0; 16]; 2],
            first: range.low() >> 6,
            last: range.high() >> 6,
        };
        for port in range.iter().filter(|&port| !skipped.contains(port)) {
            ports.insert(port);
        }
        ports
    }

    /// Copies `pristine`, a set of the same range, and writes only the words of that range.
    pub(super) fn reset_to(&mut self, pristine: &FreePorts) {
        let words = usize::from(self.first)..=usize::from(self.last);
        self.words[words.clone()].copy_from_slice(&pristine.words[words]);
        self.open = pristine.open;
    }

    #[inline]
    pub(super) fn contains(&self, port: u16) -> bool {
        self.words[usize::from(port >> 6)] >> (port & 63) & 1 == 1
    }

    pub(super) fn insert(&mut self, port: u16) {
        let index = usize::from(port >> 6);
        self.words[index] |= 1 << (port & 63);
        self.open[usize::from(port & 1)][index >> 6] |= 1 << (index & 63);
    }

    #[inline]
    pub(super) fn remove(&mut self, port: u16) {
        let index = usize::from(port >> 6);
        self.words[index] &= !(1 << (port & 63));
        if self.words[index] & Lane::of(port).bits() == 0 {
            self.open[usize::from(port & 1)][index >> 6] &= !(1 << (index & 63));
        }
    }

    /// Returns the first free port of `lane` from `low` to `high`, both inclusive.
    #[inline]
    pub(super) fn first(&self, low: u16, high: u16, lane: Lane) -> Option<u16> {
        let index = low >> 6;
        let mut port = index << 6;
        let mut word = self.words[usize::from(index)] & lane.bits() & (u64::MAX << (low & 63));
        if word == 0 {
            let index = self.open_word(index + 1, lane)?;
            port = index << 6;
            word = self.words[usize::from(index)] & lane.bits();
        }
        port += word.trailing_zeros() as u16;
        (port <= high).then_some(port)
    }

    /// Returns the first word at or after `from` with a free port of `lane`.
    fn open_word(&self, from: u16, lane: Lane) -> Option<u16> {
        let mut index = usize::from(from >> 6);
        let mut ignore = (1_u64 << (from & 63)) - 1;
        while index < 16 {
            let open = match lane {
                Lane::Even => self.open[0][index],
                Lane::Odd => self.open[1][index],
                Lane::Both => self.open[0][index] | self.open[1][index],
            };
            let open = open & !ignore;
            if open != 0 {
                return Some((index as u16) << 6 | open.trailing_zeros() as u16);
            }
            ignore = 0;
            index += 1;
        }
        None
    }
}

/// Ports per block: long ranges are counted by block.
const BLOCK: u32 = 1024;

/// A set of ports that counts its members between two ports without reading each word. Each simulated dial needs such a count for
/// each kind of port that it probes.
#[derive(Clone, Default)]
pub(super) struct CountedSet {
    ports: Words,
    /// Number of ports per block, by lane (even, odd).
    blocks: [Blocks; 2],
    len: u32,
}

#[derive(Clone)]
struct Blocks([u16; 64]);

impl Default for Blocks {
    fn default() -> Self {
        Blocks([0; 64])
    }
}

impl CountedSet {
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn contains(&self, port: u16) -> bool {
        self.ports.contains(port)
    }

    pub(super) fn insert(&mut self, port: u16) {
        if self.ports.insert(port) {
            self.blocks[usize::from(port & 1)].0[usize::from(port >> 10)] += 1;
            self.len += 1;
        }
    }

    pub(super) fn remove(&mut self, port: u16) -> bool {
        let held = self.ports.remove(port);
        if held {
            self.blocks[usize::from(port & 1)].0[usize::from(port >> 10)] -= 1;
            self.len -= 1;
        }
        held
    }

    pub(super) fn clear(&mut self) {
        if self.len > 0 {
            *self = CountedSet::default();
        }
    }

    /// Counts the ports of `lane` in the set from `low` to `high`, both inclusive.
    pub(super) fn count(&self, low: u16, high: u16, lane: Lane) -> u64 {
        if self.len == 0 {
            return 0;
        }
        // Computed in u32, because 65,535 has no successor in u16. The values cast back are at most 65,535.
        let (first, end) = (u32::from(low).next_multiple_of(BLOCK), (u32::from(high) + 1) / BLOCK * BLOCK);
        let count = if first >= end {
            self.count_words(low, high, lane)
        } else {
            let edge = |from: u32, to: u32| {
                if from < to { self.count_words(from as u16, (to - 1) as u16, lane) } else { 0 }
            };
            edge(u32::from(low), first)
                + self.count_blocks((first / BLOCK) as usize..(end / BLOCK) as usize, lane)
                + edge(end, u32::from(high) + 1)
        };
        u64::from(count)
    }

    fn count_blocks(&self, blocks: std::ops::Range<usize>, lane: Lane) -> u32 {
        let sum =
            |index: usize| self.blocks[index].0[blocks.clone()].iter().map(|&count| u32::from(count)).sum();
        match lane {
            Lane::Even => sum(0),
            Lane::Odd => sum(1),
            Lane::Both => sum(0) + sum(1),
        }
    }

    fn count_words(&self, low: u16, high: u16, lane: Lane) -> u32 {
        let (first, last) = (low >> 6, high >> 6);
        let within = |index: u16| {
            let from = if index == first { u64::MAX << (low & 63) } else { u64::MAX };
            let to = if index == last { u64::MAX >> (63 - (high & 63)) } else { u64::MAX };
            from & to & lane.bits()
        };
        (first..=last).map(|index| (self.ports.0[usize::from(index)] & within(index)).count_ones()).sum()
    }
}

/// A set of ports in words of 64. [`PortSet`] does not show its words.
#[derive(Clone)]
struct Words(Box<[u64; 1024]>);

impl Default for Words {
    fn default() -> Words {
        Words(Box::new([0; 1024]))
    }
}

impl Words {
    fn contains(&self, port: u16) -> bool {
        self.0[usize::from(port >> 6)] >> (port & 63) & 1 == 1
    }

    /// Returns whether the port was not in the set.
    fn insert(&mut self, port: u16) -> bool {
        let is_new = !self.contains(port);
        self.0[usize::from(port >> 6)] |= 1 << (port & 63);
        is_new
    }

    /// Returns whether the port was in the set.
    fn remove(&mut self, port: u16) -> bool {
        let was = self.contains(port);
        self.0[usize::from(port >> 6)] &= !(1 << (port & 63));
        was
    }

    fn clear(&mut self) {
        self.0.fill(0);
    }

    /// Removes all ports of `range`, and possibly ports within 63 ports of it.
    fn clear_in(&mut self, range: PortRange) {
        self.0[usize::from(range.low() >> 6)..=usize::from(range.high() >> 6)].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_free_port_is_found_across_many_words() {
        let range = PortRange::new(130, 65535).unwrap();
        let mut free = FreePorts::new(range, &PortSet::parse_list("130-60000").unwrap());
        assert_eq!(free.first(0, 65535, Lane::Even), Some(60002));
        assert_eq!(free.first(0, 65535, Lane::Odd), Some(60001));
        assert_eq!(free.first(0, 65535, Lane::Both), Some(60001));
        assert_eq!(free.first(130, 60000, Lane::Both), None);
        for port in (60001..65535).step_by(2) {
            free.remove(port);
        }
        assert_eq!(free.first(131, 65534, Lane::Odd), None);
        assert_eq!(free.first(131, 65535, Lane::Odd), Some(65535));
        free.remove(65535);
        assert_eq!(free.first(65535, 65535, Lane::Both), None);
        free.insert(141);
        assert_eq!(free.first(0, 65535, Lane::Odd), Some(141));
    }

    #[test]
    fn counts_by_block_equal_counts_by_port() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut set = CountedSet::default();
        for _ in 0..20_000 {
            set.insert(random.u16(..));
        }
        for _ in 0..5_000 {
            set.remove(random.u16(..));
        }
        for _ in 0..200 {
            let (a, b) = (random.u16(..), random.u16(..));
            let (low, high) =
                if random.bool() { (a.min(b), a.max(b)) } else { (a, a.saturating_add(b % 3000)) };
            for (lane, parities) in [(Lane::Even, 0..1), (Lane::Odd, 1..2), (Lane::Both, 0..2)] {
                let one_by_one =
                    (low..=high).filter(|port| parities.contains(&(port & 1)) && set.contains(*port)).count();
                assert_eq!(set.count(low, high, lane), one_by_one as u64, "{low}-{high} {lane:?}");
            }
        }
        assert_eq!(set.count(0, 65535, Lane::Both), u64::from(set.len()));
        set.clear();
        assert_eq!(set.count(0, 65535, Lane::Both), 0);
    }
}
