use std::collections::VecDeque;

use fourtuple::dial::{Step, Strategy};
use fourtuple::ports::Random;

use crate::plan::{Probes, TupleTable};

/// Number of length classes of searches. A class is a power of two of the length, because the cost of a probe depends on the length.
/// A failed search by parity probes 65,536 ports twice: 17 bits.
const LENGTHS: usize = 18;

/// The result of one simulated dial.
///
/// Example: [`dial()`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimulatedDial {
    /// The source port; `None`: the dial failed.
    pub port: Option<u16>,
    /// The probed ports of all tries.
    pub probes: Probes,
    /// Searches after the first try.
    pub searches_again: u32,
    /// Calls of bind() after the first try.
    pub binds_again: u32,
}

/// Simulates one dial of `strategy` in `table`.
///
/// # Panics
///
/// Panics for [`Strategy::Auto`], as [`Strategy::step`] does.
///
/// # Examples
///
/// ```
/// use fourtuple::dial::Strategy;
/// use fourtuple::ports::{PortRange, PortSet, Random};
/// use fourtuple_observe::plan::{TupleTable, WindowSearch, dial};
///
/// let range = PortRange::new(32768, 32769)?;
/// let mut random = Random::with_seed(1);
/// let mut table = TupleTable::new(range, WindowSearch::Linear, &PortSet::new(), &mut random);
/// table.bind(32768); // in use
/// let dialed = dial(&mut table, Strategy::FullRange, &mut random);
/// assert_eq!((dialed.port, dialed.searches_again, dialed.binds_again), (Some(32769), 0, 0));
/// assert_eq!(dial(&mut table, Strategy::FullRange, &mut random).port, None);
/// # Ok::<(), fourtuple::ports::RangeError>(())
/// ```
#[inline]
pub fn dial(table: &mut TupleTable, strategy: Strategy, random: &mut Random) -> SimulatedDial {
    let mut dialed = SimulatedDial::default();
    let mut tried = 0;
    while let Some(step) = strategy.unreserved_step(tried, table.range(), table.reserved(), random) {
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

/// The dials in one part of a fill: between two shares of ports in use.
///
/// Example: [`Fill`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FillPart {
    /// Dials that got a port.
    pub connected: u64,
    /// Dials that failed although ports were free.
    pub failed: u64,
    /// Searches after the first try, of the dials that got a port.
    pub searches_again: u64,
    /// Calls of bind() after the first try, of the dials that got a port.
    pub binds_again: u64,
    /// The probed ports of failed dials.
    pub wasted: Probes,
    walks: [Walks; LENGTHS],
}

/// Successful dials whose searches belong to one length class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Walks {
    pub(super) dials: u64,
    pub(super) probes: Probes,
}

impl FillPart {
    #[inline]
    fn add(&mut self, dialed: &SimulatedDial) {
        if dialed.port.is_none() {
            self.failed += 1;
            self.wasted += dialed.probes;
            return;
        }
        self.connected += 1;
        if dialed.probes.taken() == 0 {
            // The most frequent case while few ports are in use.
            self.walks[0].dials += 1;
            self.walks[0].probes.free += 1;
            return;
        }
        self.add_walk(dialed);
    }

    fn add_walk(&mut self, dialed: &SimulatedDial) {
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

    /// Returns the probed ports of successful dials.
    pub fn probes(&self) -> Probes {
        self.walks.iter().fold(Probes::default(), |mut sum, walks| {
            sum += walks.probes;
            sum
        })
    }

    /// Returns the mean number of probed ports per successful dial, its own port included; `None` without a successful dial.
    pub fn probes_per_dial(&self) -> Option<f64> {
        (self.connected > 0).then(|| self.probes().total() as f64 / self.connected as f64)
    }
}

/// Counts of simulated dials in one table or several, by part of the fill.
///
/// ```
/// use fourtuple::dial::Strategy;
/// use fourtuple::ports::{PortRange, PortSet, Random};
/// use fourtuple_observe::plan::{Fill, TupleTable, WindowSearch};
///
/// let range = PortRange::new(32768, 33767)?;
/// let mut random = Random::with_seed(1);
/// let mut table = TupleTable::new(range, WindowSearch::Linear, &PortSet::new(), &mut random);
/// let mut fill = Fill::new(2); // counts for each half of the ports
/// fill.dial(&mut table, Strategy::KernelDefault, 1_200, None, &mut random);
/// assert_eq!((fill.connected(), fill.failed(), fill.excess), (1_000, 0, 200));
///
/// // In the second half, each search first probes the 500 ports of one parity in vain.
/// let [first, second] = [&fill.parts[0], &fill.parts[1]];
/// assert!(first.probes_per_dial().unwrap() < 10.0 && second.probes_per_dial().unwrap() > 500.0);
/// assert_eq!((second.probes().free, second.connected), (500, 500));
///
/// let mut both = fill.clone();
/// both.merge(&fill); // the counts of another destination
/// assert_eq!(both.connected(), 2_000);
/// # Ok::<(), fourtuple::ports::RangeError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fill {
    /// Equal parts of the fill: part `k` of `n` counts the dials while between `k/n` and `(k+1)/n` of the ports were in use.
    pub parts: Vec<FillPart>,
    /// Dials beyond the number of ports of the range, which were not simulated.
    pub excess: u64,
}

impl Fill {
    /// Creates counts of 0 in `parts` parts, at least one.
    pub fn new(parts: usize) -> Self {
        Fill { parts: vec![FillPart::default(); parts.max(1)], excess: 0 }
    }

    /// Returns the number of dials that got a port.
    pub fn connected(&self) -> u64 {
        self.parts.iter().map(|part| part.connected).sum()
    }

    /// Returns the number of dials that failed although ports were free.
    pub fn failed(&self) -> u64 {
        self.parts.iter().map(|part| part.failed).sum()
    }

    /// Adds the counts of another fill with the same number of parts.
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

    /// Simulates `dials` dials to the destination of `table`, at most as many as it has free ports. The rest counts as excess.
    ///
    /// `open` is the maximum number of simultaneous connections. Each further dial closes the oldest connection, whose tuple stays in
    /// TIME_WAIT. `None`: all connections stay open.
    pub fn dial(
        &mut self,
        table: &mut TupleTable,
        strategy: Strategy,
        dials: u64,
        open: Option<u32>,
        random: &mut Random,
    ) {
        let ports = table.ports();
        let mut left = dials.min(u64::from(ports - table.held().min(ports)));
        self.excess += dials - left;
        let mut closing = open.filter(|&open| open < ports).map(Closing::new);
        let parts = self.parts.len() as u64;
        while left > 0 {
            // The outer loop by part saves a division for each dial.
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

/// The open connections, oldest first. Limits their number: see [`Fill::dial`].
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
