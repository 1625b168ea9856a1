use std::collections::VecDeque;

use fastrand::Rng;

use super::{Probes, TupleTable};
use crate::dial::{Step, Strategy};

/// Walks are kept apart by the power of two above their length: the cost of a probe depends on it. 65,536 ports twice
/// over (a failed parity search) is 17 bits.
const LENGTHS: usize = 18;

/// One dial, as a strategy made it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialed {
    /// The source port; `None`: the strategy gave up.
    pub port: Option<u16>,
    /// What was looked at, over all tries.
    pub probes: Probes,
    /// Tries after the first that searched again.
    pub searches_again: u32,
    /// Tries after the first that bound another port.
    pub binds_again: u32,
}

/// Plays one dial of `strategy` against `table`.
///
/// # Panics
///
/// As [`Strategy::step`], for [`Strategy::Auto`].
#[inline]
pub fn dial(table: &mut TupleTable, strategy: Strategy, random: &mut Rng) -> Dialed {
    let mut dialed = Dialed::default();
    let mut tried = 0;
    while let Some(step) = strategy.step(tried, table.range(), random) {
        let found = match step {
            Step::Search => table.connect(None, random),
            Step::Window(window) => table.connect(Some(window), random),
            Step::Bind(port) => table.bind(port),
        };
        dialed.probes += found.probes;
        if tried > 0 {
            match step {
                Step::Bind(_) => dialed.binds_again += 1,
                Step::Search | Step::Window(_) => dialed.searches_again += 1,
            }
        }
        if found.port.is_some() {
            dialed.port = found.port;
            break;
        }
        tried += 1;
    }
    dialed
}

/// The dials made while a table went from one share of its ports in use to the next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FillPart {
    /// Dials that got a port.
    pub connected: u64,
    /// Dials that gave up although ports were free.
    pub failed: u64,
    /// Searches after the first, of the dials that got a port.
    pub searches_again: u64,
    /// Binds after the first, of the dials that got a port.
    pub binds_again: u64,
    /// What the dials looked at that gave up.
    pub wasted: Probes,
    walks: [Walks; LENGTHS],
}

/// Successful dials whose walks had about the same length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Walks {
    pub(super) dials: u64,
    pub(super) probes: Probes,
}

impl FillPart {
    #[inline]
    fn add(&mut self, dialed: &Dialed) {
        if dialed.port.is_none() {
            self.failed += 1;
            self.wasted += dialed.probes;
            return;
        }
        self.connected += 1;
        if dialed.probes.taken() == 0 {
            // The rule while there is room.
            self.walks[0].dials += 1;
            self.walks[0].probes.free += 1;
            return;
        }
        self.add_walk(dialed);
    }

    fn add_walk(&mut self, dialed: &Dialed) {
        self.searches_again += u64::from(dialed.searches_again);
        self.binds_again += u64::from(dialed.binds_again);
        let length = (u64::BITS - dialed.probes.taken().leading_zeros()) as usize;
        let walks = &mut self.walks[length.min(LENGTHS - 1)];
        walks.dials += 1;
        walks.probes += dialed.probes;
    }

    fn merge(&mut self, other: &FillPart) {
        self.connected += other.connected;
        self.failed += other.failed;
        self.searches_again += other.searches_again;
        self.binds_again += other.binds_again;
        self.wasted += other.wasted;
        for (walks, more) in self.walks.iter_mut().zip(&other.walks) {
            walks.dials += more.dials;
            walks.probes += more.probes;
        }
    }

    pub(super) fn walks(&self) -> impl Iterator<Item = &Walks> {
        self.walks.iter().filter(|walks| walks.dials > 0)
    }

    /// What the dials looked at that got a port.
    pub fn probes(&self) -> Probes {
        self.walks.iter().fold(Probes::default(), |mut sum, walks| {
            sum += walks.probes;
            sum
        })
    }

    /// Ports looked at per dial that got one, on average, its own included; `None` when none did.
    pub fn probes_per_dial(&self) -> Option<f64> {
        (self.connected > 0).then(|| self.probes().total() as f64 / self.connected as f64)
    }
}

/// Dials one after the other into one table or many, by part of the fill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Equal parts of the fill, the emptiest first: part `k` of `n` holds the dials made while between `k/n` and
    /// `(k+1)/n` of the ports were in use.
    pub parts: Vec<FillPart>,
    /// Dials that there was no port for at all: more were asked for than the range has ports.
    pub excess: u64,
}

impl Fill {
    /// Without a dial, in `parts` parts (at least one).
    pub fn new(parts: usize) -> Self {
        Fill { parts: vec![FillPart::default(); parts.max(1)], excess: 0 }
    }

    /// Dials that got a port.
    pub fn connected(&self) -> u64 {
        self.parts.iter().map(|part| part.connected).sum()
    }

    /// Dials that gave up although ports were free.
    pub fn failed(&self) -> u64 {
        self.parts.iter().map(|part| part.failed).sum()
    }

    /// Adds what another fill of as many parts counted.
    ///
    /// # Panics
    ///
    /// Panics when the numbers of parts differ.
    pub fn merge(&mut self, other: &Fill) {
        assert_eq!(self.parts.len(), other.parts.len(), "fills of different resolution cannot be added");
        self.excess += other.excess;
        for (part, more) in self.parts.iter_mut().zip(&other.parts) {
            part.merge(more);
        }
    }

    /// Makes `dials` dials to the destination of `table`, which stay: at most as many as it has ports, the rest being
    /// excess at once.
    ///
    /// `open` is how many connections are open at a time: one more, and the oldest goes into TIME_WAIT, as when we close
    /// first. `None`: all stay open.
    pub fn dial(
        &mut self,
        table: &mut TupleTable,
        strategy: Strategy,
        dials: u64,
        open: Option<u32>,
        random: &mut Rng,
    ) {
        let ports = table.ports();
        let mut left = dials.min(u64::from(ports - table.held().min(ports)));
        self.excess += dials - left;
        let mut closing = open.filter(|&open| open < ports).map(Closing::new);
        let parts = self.parts.len() as u64;
        while left > 0 {
            // An outer loop by part spares every dial a division.
            let index = (u64::from(table.held()) * parts / u64::from(ports)).min(parts - 1);
            let until = ((index + 1) * u64::from(ports)).div_ceil(parts);
            let part = &mut self.parts[index as usize];
            while left > 0 && u64::from(table.held()) < until {
                let dialed = dial(table, strategy, random);
                part.add(&dialed);
                left -= 1;
                if let (Some(closing), Some(port)) = (&mut closing, dialed.port) {
                    closing.opened(port, table);
                }
            }
        }
    }
}

/// Connections in the order in which they were opened, the oldest of which are closed.
struct Closing {
    open: usize,
    ports: VecDeque<u16>,
}

impl Closing {
    fn new(open: u32) -> Self {
        Closing { open: open as usize, ports: VecDeque::with_capacity(open as usize + 1) }
    }

    fn opened(&mut self, port: u16, table: &mut TupleTable) {
        self.ports.push_back(port);
        if self.ports.len() > self.open
            && let Some(oldest) = self.ports.pop_front()
        {
            table.close(oldest);
        }
    }
}
