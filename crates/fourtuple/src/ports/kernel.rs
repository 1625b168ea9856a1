use fastrand::Rng;

use super::counted::CountedSet;
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
    /// Reserved, or bound by number elsewhere in the namespace: for good.
    passed: PortSet,
    /// Those within the range, and the ports of it that are bound by number for this tuple.
    skipped: CountedSet,
    /// What `skipped` is while the table is empty.
    pristine_skipped: CountedSet,
    established: PortSet,
    time_wait: CountedSet,
    /// Bound by number for this tuple.
    bound: PortSet,
    /// Whether a port was bound since the table was empty: it may lie outside the range, and in two of these sets.
    binds: bool,
    held: u32,
    /// `table_perturb[index] + (port_offset >> 32)`: where the next search starts, modulo the length of its range.
    pointer: u32,
}

impl TupleTable {
    /// An empty table in a namespace with the port range `range` and these reserved ports.
    pub fn new(range: PortRange, search: Search, reserved: &PortSet, random: &mut Rng) -> Self {
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
            passed: reserved.clone(),
            pristine_skipped: skipped.clone(),
            skipped,
            established: PortSet::new(),
            time_wait: CountedSet::default(),
            bound: PortSet::new(),
            binds: false,
            held: 0,
            pointer: random.u32(..),
        }
    }

    /// The table of another destination: empty, with another start. Cheaper than a new one.
    pub fn reset(&mut self, random: &mut Rng) {
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

    /// The namespace's range.
    pub fn range(&self) -> PortRange {
        self.range
    }

    /// Ports of the range that are not reserved, taken or not.
    pub fn ports(&self) -> u32 {
        self.range.len() - self.pristine_skipped.len()
    }

    /// Tuples in use: open ones and those in TIME_WAIT.
    pub fn held(&self) -> u32 {
        self.held
    }

    /// Tuples in TIME_WAIT.
    pub fn in_time_wait(&self) -> u32 {
        self.time_wait.len()
    }

    /// connect() on a socket without a port: searches `window`, clamped as by [`PortRange::window`], or the namespace's
    /// range. A window of 0-0 is no window: the kernel stores both bounds in one word, and 0 stands for "not set".
    #[inline]
    pub fn connect(&mut self, window: Option<PortRange>, random: &mut Rng) -> Found {
        let window = window.filter(|window| window.high() > 0);
        let range = window.map_or(self.range, |window| self.range.window(window));
        let scan = match (self.search, window) {
            (Search::Linear, Some(_)) => Scan { range, remaining: range.len(), step: 1 },
            _ => Scan { range, remaining: (range.len() & !1).max(1), step: 2 },
        };
        let offset = (self.pointer % scan.remaining) & !(scan.step - 1);
        // Most searches end where they begin: `offset` stays below the length of the range.
        let first = range.low() + offset as u16;
        if self.free.contains(first) {
            self.take(first, 0, scan.step, random);
            return Found { port: Some(first), probes: Probes { free: 1, ..Probes::default() } };
        }
        self.search(&scan, offset, random)
    }

    #[inline(never)]
    fn search(&mut self, scan: &Scan, offset: u32, random: &mut Rng) -> Found {
        let mut probes = Probes::default();
        let mut port = self.scan(scan, offset, random, &mut probes);
        if port.is_none() && scan.step == 2 && scan.remaining > 1 {
            port = self.scan(scan, offset + 1, random, &mut probes);
        }
        Found { port, probes }
    }

    /// Makes one pass of `scan`, and takes the first free port.
    fn scan(&mut self, scan: &Scan, offset: u32, random: &mut Rng, probes: &mut Probes) -> Option<u16> {
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

    /// Charges the first `steps` ports of a leg, all of them taken.
    fn charge(&self, leg: Leg, steps: u32, step: u32, probes: &mut Probes) {
        if steps == 0 {
            return;
        }
        let last = leg.low + ((steps - 1) * step) as u16;
        let skipped = self.skipped.count(leg.low, last, leg.lane);
        let mut time_wait = self.time_wait.count(leg.low, last, leg.lane);
        if time_wait > 0 && self.binds {
            // Bound and in TIME_WAIT: passed before the tuple is looked up.
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

    /// Holds the port that a pass found after `walked` taken ones, and moves on the pointer. Its random part keeps the
    /// next port hard to guess while there is little to walk past.
    #[inline]
    fn take(&mut self, port: u16, walked: u32, step: u32, random: &mut Rng) {
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

    /// bind() of this very port with SO_REUSEADDR, then connect(): only an open connection is in the way. A tuple in
    /// TIME_WAIT is taken over at once (timestamps being on), and reserved ports may be bound (`tcp_twsk_unique`,
    /// `inet_csk_get_port`). From now on no search takes the port.
    pub fn bind(&mut self, port: u16) -> Found {
        if self.established.contains(port) {
            return Found { port: None, probes: Probes { established: 1, ..Probes::default() } };
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
        Found { port: Some(port), probes: Probes { free: 1, ..Probes::default() } }
    }

    /// A socket elsewhere in the namespace binds `port` by number, for good: no search takes it (`fastreuse >= 0`),
    /// whatever the destination. [`TupleTable::bind`] still may.
    pub fn poison(&mut self, port: u16) {
        self.passed.insert(port);
        if self.range.contains(port) {
            self.skipped.insert(port);
            self.pristine_skipped.insert(port);
            self.free.remove(port);
            self.pristine.remove(port);
            // As if bound: a search passes it before it looks whether the tuple waits.
            self.binds = true;
        }
    }

    /// We close the connection on `port`: the tuple stays in TIME_WAIT. False if there was none.
    pub fn close(&mut self, port: u16) -> bool {
        let open = self.established.remove(port);
        if open {
            self.time_wait.insert(port);
        }
        open
    }

    /// The tuple on `port` is gone: its TIME_WAIT is over, or the peer closed first. False if there was none.
    ///
    /// With it goes a bind by number, as since Linux 6.18; before, the port stays skipped while any socket uses it.
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

/// The kernel's loop over a range: `remaining` is the length that it reckons with.
struct Scan {
    range: PortRange,
    remaining: u32,
    step: u32,
}

/// Ports in ascending order, a step apart.
#[derive(Clone, Copy)]
struct Leg {
    low: u16,
    high: u16,
    length: u32,
    lane: Lane,
}

impl Scan {
    /// The pass that starts `offset` ports above the first one. Past the end it goes back by `remaining`, not to the
    /// beginning: in a range of odd length that is one port too late, and why such a search never sees one of the ports.
    fn legs(&self, offset: u32) -> [Option<Leg>; 2] {
        let start = u32::from(self.range.low()) + offset;
        let looks = self.remaining.div_ceil(self.step);
        let to_the_end = (u32::from(self.range.high()) - start) / self.step + 1;
        let leg = |start: u32, length: u32| {
            // Ends at the range's last port at most, so that both fit.
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
