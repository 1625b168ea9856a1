use fastrand::Rng;

use super::free::{FreePorts, Lane};
use super::{PortRange, PortSet};

/// How a kernel searches a window that a socket asked for (option IP_LOCAL_PORT_RANGE). Without a window every kernel
/// searches its own range by parity (`__inet_hash_connect`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Search {
    /// Before Linux 6.8: every second port of the window, those with the parity of its first port before the others.
    Parity,
    /// Since Linux 6.8: one port after the other.
    Linear,
}

/// Ports that a search looked at, by what it found there: each kind costs its own time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probes {
    /// Free: the one that the search took.
    pub free: u64,
    /// Held by a connection of this tuple that is open.
    pub established: u64,
    /// Held by a connection of this tuple in TIME_WAIT.
    pub time_wait: u64,
    /// Never looked up: reserved (`ip_local_reserved_ports`), or bound by number by any socket of the namespace.
    pub skipped: u64,
}

impl Probes {
    /// Ports that were of no use.
    pub fn taken(self) -> u64 {
        self.established + self.time_wait + self.skipped
    }

    /// All ports looked at.
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

/// What came of one search, or of one bind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The port, now held; `None` where the kernel says EADDRNOTAVAIL.
    pub port: Option<u16>,
    /// What was looked at on the way.
    pub probes: Probes,
}

/// The ports of one (source, destination, destination port) as the kernel sees them, and its way of choosing one.
///
/// The model is exact for a single dialer: the same starts, the same order, the same pointer that moves on with every
/// success (`table_perturb`). Two things are left out: every 10 s the kernel starts somewhere else
/// (`EPHEMERAL_PORT_SHUFFLE_PERIOD`), and other destinations may share the pointer (it is one of 65,536). TIME_WAIT
/// tuples are not reused by a search, as with `tcp_tw_reuse=0`, or 2 off loopback.
///
/// ```
/// use fourtuple::ports::{PortRange, PortSet, Search, TupleTable};
///
/// let range = PortRange::new(32768, 32775).unwrap();
/// let mut random = fastrand::Rng::with_seed(1);
/// let mut table = TupleTable::new(range, Search::Linear, &PortSet::new(), &mut random);
/// let ports: Vec<u16> = (0..8).map(|_| table.connect(None, &mut random).port.unwrap()).collect();
/// // Without the option all even ports go first, and a ninth connection finds nothing.
/// assert!(ports[..4].iter().all(|port| port % 2 == 0) && ports[4..].iter().all(|port| port % 2 == 1));
/// assert_eq!(table.connect(None, &mut random).port, None);
/// assert_eq!(table.connect(Some(PortRange::ALL), &mut random).probes.established, 8);
/// ```
#[derive(Clone)]
pub struct TupleTable {
    range: PortRange,
    search: Search,
    free: FreePorts,
    pristine: FreePorts,
    /// Reserved, or bound by number elsewhere in the namespace.
    passed: PortSet,
    /// Bound by number for this tuple.
    bound: PortSet,
    established: PortSet,
    time_wait: PortSet,
    /// Passed or bound ports within the range; 0 spares every walk the look at both sets.
    skipped: u32,
    /// Whether a port was bound since the table was empty: such a port may lie outside the range.
    binds: bool,
    waiting: u32,
    held: u32,
    /// `table_perturb[index] + (port_offset >> 32)`: where the next search starts, modulo the length of its range.
    pointer: u32,
}

impl TupleTable {
    /// An empty table in a namespace with the port range `range` and these reserved ports.
    pub fn new(range: PortRange, search: Search, reserved: &PortSet, random: &mut Rng) -> Self {
        let free = FreePorts::new(range, reserved);
        TupleTable {
            range,
            search,
            pristine: free.clone(),
            free,
            passed: reserved.clone(),
            bound: PortSet::new(),
            established: PortSet::new(),
            time_wait: PortSet::new(),
            skipped: reserved.count_in(range),
            binds: false,
            waiting: 0,
            held: 0,
            pointer: random.u32(..),
        }
    }

    /// The table of another destination: empty, with another start. Cheaper than a new one.
    pub fn reset(&mut self, random: &mut Rng) {
        self.free.reset_to(&self.pristine);
        if self.binds {
            self.established.clear();
            self.time_wait.clear();
            self.bound.clear();
            self.skipped = self.passed.count_in(self.range);
        } else {
            self.established.clear_in(self.range);
            if self.waiting > 0 {
                self.time_wait.clear_in(self.range);
            }
        }
        self.binds = false;
        (self.waiting, self.held, self.pointer) = (0, 0, random.u32(..));
    }

    /// The namespace's range.
    pub fn range(&self) -> PortRange {
        self.range
    }

    /// Ports of the range that are not reserved, taken or not.
    pub fn ports(&self) -> u32 {
        self.range.len() - self.passed.count_in(self.range)
    }

    /// Tuples in use: open ones and those in TIME_WAIT.
    pub fn held(&self) -> u32 {
        self.held
    }

    /// Tuples in TIME_WAIT.
    pub fn in_time_wait(&self) -> u32 {
        self.waiting
    }

    /// connect() on a socket without a port: searches `window`, clamped as by [`PortRange::window`], or the namespace's
    /// range. A window of 0-0 is no window: the kernel stores both bounds in one word, and 0 stands for "not set".
    #[inline]
    pub fn connect(&mut self, window: Option<PortRange>, random: &mut Rng) -> Found {
        let window = window.filter(|window| window.high() > 0);
        let range = window.map_or(self.range, |window| self.range.window(window));
        match (self.search, window) {
            (Search::Linear, Some(_)) => self.search_linear(range, random),
            _ => self.search_parity(range, random),
        }
    }

    fn search_linear(&mut self, range: PortRange, random: &mut Rng) -> Found {
        let offset = self.pointer % range.len();
        let mut probes = Probes::default();
        let port = self.scan(&Scan::new(range, offset, range.len(), 1), random, &mut probes);
        Found { port, probes }
    }

    fn search_parity(&mut self, range: PortRange, random: &mut Rng) -> Found {
        let remaining = if range.len() > 1 { range.len() & !1 } else { 1 };
        let offset = self.pointer % remaining & !1;
        let mut probes = Probes::default();
        let mut port = self.scan(&Scan::new(range, offset, remaining, 2), random, &mut probes);
        if port.is_none() && remaining > 1 {
            port = self.scan(&Scan::new(range, offset + 1, remaining, 2), random, &mut probes);
        }
        Found { port, probes }
    }

    /// Goes through `scan`, and takes the first free port.
    #[inline]
    fn scan(&mut self, scan: &Scan, random: &mut Rng, probes: &mut Probes) -> Option<u16> {
        let mut walked = 0;
        for leg in scan.legs() {
            let Some(port) = self.free.first(leg.low, leg.high, scan.lane) else {
                self.walk(leg, scan, leg.length, probes);
                walked += leg.length;
                continue;
            };
            let steps = u32::from(port - leg.low) / scan.step;
            self.walk(leg, scan, steps, probes);
            walked += steps;
            probes.free += 1;
            // The random part keeps the next port hard to guess while there is little to walk past.
            let jump = walked.max(u32::from(random.u8(..8)));
            self.pointer = self.pointer.wrapping_add((jump + 1) * scan.step);
            self.hold(port);
            return Some(port);
        }
        None
    }

    /// Charges the first `steps` ports of a leg, all of them taken.
    #[inline]
    fn walk(&self, leg: Leg, scan: &Scan, steps: u32, probes: &mut Probes) {
        if steps == 0 {
            return;
        }
        let mut established = u64::from(steps);
        if self.skipped | self.waiting > 0 {
            let last = leg.low + ((steps - 1) * scan.step) as u16;
            let (skipped, waiting) = self.classify(leg.low, last, scan.lane);
            probes.skipped += skipped;
            probes.time_wait += waiting;
            established -= skipped + waiting;
        }
        probes.established += established;
    }

    /// Ports from `low` to `high` of a lane that a search passes without a look-up, and those in TIME_WAIT.
    fn classify(&self, low: u16, high: u16, lane: Lane) -> (u64, u64) {
        let (mut skipped, mut waiting) = (0, 0);
        let range = PortRange::new(low, high).expect("a leg never runs backwards");
        for (index, mask) in range.masks() {
            let mask = mask & lane.bits();
            let passed = self.passed.word(index) | self.bound.word(index);
            skipped += (passed & mask).count_ones();
            waiting += (self.time_wait.word(index) & !passed & mask).count_ones();
        }
        (u64::from(skipped), u64::from(waiting))
    }

    #[inline]
    fn hold(&mut self, port: u16) {
        self.free.remove(port);
        self.established.insert(port);
        self.held += 1;
    }

    /// bind() of this very port with SO_REUSEADDR, then connect(): only an open connection is in the way. A tuple in
    /// TIME_WAIT is taken over at once (timestamps being on), and reserved ports may be bound (`tcp_twsk_unique`,
    /// `inet_csk_get_port`). From now on no search takes the port.
    pub fn bind(&mut self, port: u16) -> Found {
        if self.established.contains(port) {
            return Found { port: None, probes: Probes { established: 1, ..Probes::default() } };
        }
        if self.time_wait.remove(port) {
            self.waiting -= 1;
            self.held -= 1;
        }
        self.binds = true;
        if self.bound.insert(port) && self.searched(port) {
            self.skipped += 1;
        }
        self.hold(port);
        Found { port: Some(port), probes: Probes { free: 1, ..Probes::default() } }
    }

    /// A socket elsewhere in the namespace binds `port` by number, for good: no search takes it (`fastreuse >= 0`),
    /// whatever the destination. [`TupleTable::bind`] still may.
    pub fn poison(&mut self, port: u16) {
        if self.searched(port) {
            self.skipped += u32::from(!self.bound.contains(port));
            self.free.remove(port);
            self.pristine.remove(port);
        }
        self.passed.insert(port);
    }

    /// Whether searches look up what is on `port`.
    fn searched(&self, port: u16) -> bool {
        self.range.contains(port) && !self.passed.contains(port)
    }

    /// We close the connection on `port`: the tuple stays in TIME_WAIT. False if there was none.
    pub fn close(&mut self, port: u16) -> bool {
        let open = self.established.remove(port);
        if open {
            self.time_wait.insert(port);
            self.waiting += 1;
        }
        open
    }

    /// The tuple on `port` is gone: its TIME_WAIT is over, or the peer closed first. False if there was none.
    ///
    /// With it goes a bind by number, as since Linux 6.18; before, the port stays skipped while any socket uses it.
    pub fn release(&mut self, port: u16) -> bool {
        let waiting = self.time_wait.remove(port);
        if !waiting && !self.established.remove(port) {
            return false;
        }
        self.waiting -= u32::from(waiting);
        self.held -= 1;
        let bound = self.bound.remove(port);
        if self.searched(port) {
            self.skipped -= u32::from(bound);
            self.free.insert(port);
        }
        true
    }
}

/// One pass of the kernel's loop: which ports, in which order.
struct Scan {
    lane: Lane,
    step: u32,
    legs: [Option<Leg>; 2],
}

/// Ports in ascending order, `step` apart.
#[derive(Clone, Copy)]
struct Leg {
    low: u16,
    high: u16,
    length: u32,
}

impl Scan {
    /// The pass that starts `offset` ports above the first of `range`, `remaining` being the length that the kernel
    /// reckons with. Past the end it goes back by `remaining`, not to the beginning: in a range of odd length that is
    /// one port too late, and why such a search never sees one of the ports.
    #[inline]
    fn new(range: PortRange, offset: u32, remaining: u32, step: u32) -> Self {
        let start = u32::from(range.low()) + offset;
        let looks = remaining.div_ceil(step);
        let to_the_end = (u32::from(range.high()) - start) / step + 1;
        let leg = |start: u32, length: u32| {
            // Ends at the range's last port at most, so that both fit.
            let high = start + (length - 1) * step;
            Leg { low: start as u16, high: high as u16, length }
        };
        let first = to_the_end.min(looks);
        let second = looks - first;
        Scan {
            lane: if step == 1 { Lane::Both } else { Lane::of(start as u16) },
            step,
            legs: [
                Some(leg(start, first)),
                (second > 0).then(|| leg(start + to_the_end * step - remaining, second)),
            ],
        }
    }

    fn legs(&self) -> impl Iterator<Item = Leg> {
        self.legs.into_iter().flatten()
    }
}
