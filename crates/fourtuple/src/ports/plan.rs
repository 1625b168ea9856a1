use std::time::Duration;

use super::advice;
use super::{
    Budget, BudgetError, Closer, Costs, CostsByFill, Fill, FillPart, Fleet, PortRange, PortSet, Search,
    halves, steady_tuples,
};
use crate::dial::Strategy;

/// Parts of the fill that a plan tells apart.
const PARTS: usize = 16;

/// Fills of one pair that its figures are the mean of.
const REPEATS: u64 = 5;

/// Connections that represent a fleet which is too large to be simulated whole: more would not change a mean.
const SAMPLE: u64 = 20_000_000;

/// What is known about the connections to come.
///
/// ```
/// use std::time::Duration;
/// use fourtuple::dial::Strategy;
/// use fourtuple::ports::{Closer, Plan};
///
/// let plan = Plan { arrival_per_s: Some(2_000.0), closer: Closer::Us, ..Plan::new(Strategy::KernelDefault) };
/// let outcome = plan.outcome().unwrap();
/// assert_eq!(outcome.cliff_connections, Some(14_116));
/// assert_eq!(outcome.cliff_after, Some(Duration::from_millis(7_058)));
/// assert_eq!(outcome.exhausted_after, Some(Duration::from_millis(14_116)));
/// assert_eq!(outcome.sources_needed, 9);
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    /// The range of the namespace.
    pub range: PortRange,
    /// Reserved ports (`ip_local_reserved_ports`); those outside the range do not matter.
    pub reserved: PortSet,
    /// Source addresses, at least 1.
    pub sources: u64,
    /// Destinations (address and port), at least 1, equally loaded.
    pub destinations: u64,
    /// New connections per second over all destinations; `None`: not known.
    pub arrival_per_s: Option<f64>,
    /// How long a connection is open.
    pub hold: Duration,
    /// Who closes first.
    pub closer: Closer,
    /// What the kernel does with a window.
    pub search: Search,
    /// How every dial is made; not [`Strategy::Auto`].
    pub strategy: Strategy,
    /// What a dial costs.
    pub costs: CostsByFill,
    /// Connections to simulate one by one at most. A larger fleet is represented by some of its pairs.
    pub simulate_at_most: u64,
    /// Seed of all random choices.
    pub seed: u64,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// No tuple at all.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// Not a rate.
    #[error("{0} new connections per second is no rate: expected a finite number of at least 0")]
    Rate(f64),
    /// Auto stands for what a kernel turns out to have.
    #[error("the strategy auto depends on the kernel: plan with the strategy that it chooses there")]
    Undecided,
}

/// The answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Connections that fit at once, over all pairs; saturates.
    pub capacity: u64,
    /// Connections at which connect() starts to search half of the range in vain; `None`: this strategy has no cliff.
    pub cliff_connections: Option<u64>,
    /// Tuples in use once arrivals and departures balance; `None` without an arrival rate.
    pub steady_tuples: Option<u64>,
    /// When the cliff is reached, from an empty table; `None`: never.
    pub cliff_after: Option<Duration>,
    /// When the ports run out, from an empty table; `None`: never.
    pub exhausted_after: Option<Duration>,
    /// Source addresses with which the ports never run out and no cliff is reached, at this rate; 1 without a rate.
    pub sources_needed: u64,
    /// Of the dials that fill one pair once, those that fail though ports are free: the mean of five fills.
    pub failed_dials: u64,
    /// Cost of connect() along the fill of one pair, by sixteenth, the mean of five fills. Where no dial succeeds there
    /// is no point.
    pub by_fill: Vec<Point>,
    /// The whole fleet dialed once, up to its steady state (without a rate: until it is full).
    pub fleet: Dialing,
    /// Connections simulated for all of it.
    pub simulated: u64,
    /// The answer in plain words, one line each.
    pub advice: Vec<String>,
}

/// One part of the fill of a single pair.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Share of the ports in use at the end of this part, 0 to 1.
    pub fill: f64,
    /// Ports looked at per dial, on average.
    pub probes: f64,
    /// Predicted mean time in connect(), nanoseconds.
    pub mean_ns: u64,
}

/// Many dials summed up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dialing {
    /// Pairs that were dialed.
    pub pairs: u64,
    /// Dials that got a port.
    pub connected: u64,
    /// Dials that failed though ports were free.
    pub failed: u64,
    /// Predicted mean time in connect(), nanoseconds; `None` when no dial got a port.
    pub mean_ns: Option<u64>,
}

impl Plan {
    /// One source, one destination, a kernel since 6.8 with its default range, nothing known about the rate.
    pub fn new(strategy: Strategy) -> Self {
        Plan {
            range: PortRange::KERNEL_DEFAULT,
            reserved: PortSet::new(),
            sources: 1,
            destinations: 1,
            arrival_per_s: None,
            hold: Duration::ZERO,
            closer: Closer::Them,
            search: Search::Linear,
            strategy,
            costs: Costs::reference().into(),
            simulate_at_most: 1_000_000_000,
            seed: 0,
        }
    }

    /// Works it out. The time it takes goes with the connections simulated: a few nanoseconds each.
    pub fn outcome(&self) -> Result<Outcome, PlanError> {
        if self.strategy == Strategy::Auto {
            return Err(PlanError::Undecided);
        }
        if let Some(rate) = self.arrival_per_s
            && !(rate.is_finite() && rate >= 0.0)
        {
            return Err(PlanError::Rate(rate));
        }
        let by_parity = halves(self.strategy, self.search);
        let budget = Budget::new(self.range, &self.reserved, by_parity, self.sources, self.destinations)?;
        let capacity = budget.capacity();
        let cliff_connections = by_parity.then(|| budget.before_the_cliff());
        let steady = self.arrival_per_s.map(|rate| steady_tuples(rate, self.hold, self.closer));

        let one = self.fleet(REPEATS, REPEATS * u64::from(budget.ports())).simulate();
        let (pairs, connections) = self.sample(&budget, steady.unwrap_or(capacity).min(capacity));
        let all = self.fleet(pairs, connections).simulate();

        let mut outcome = Outcome {
            capacity,
            cliff_connections,
            steady_tuples: steady,
            cliff_after: cliff_connections.and_then(|cliff| self.reached_after(cliff, steady)),
            exhausted_after: self.reached_after(capacity, steady),
            sources_needed: self.sources_needed(&budget, by_parity, steady.unwrap_or(0)),
            failed_dials: (one.failed() + REPEATS / 2) / REPEATS,
            by_fill: self.points(&one),
            fleet: self.dialing(pairs, &all),
            simulated: one.connected() + all.connected(),
            advice: Vec::new(),
        };
        outcome.advice = advice::lines(self, &budget, &outcome);
        Ok(outcome)
    }

    fn fleet(&self, pairs: u64, connections: u64) -> Fleet<'_> {
        Fleet {
            range: self.range,
            reserved: &self.reserved,
            search: self.search,
            strategy: self.strategy,
            pairs,
            connections,
            open: self.open_in_a_pair(),
            parts: PARTS,
            seed: self.seed,
        }
    }

    /// Connections of one pair that are open at a time, where closed ones stay in TIME_WAIT.
    fn open_in_a_pair(&self) -> Option<u32> {
        let rate = self.arrival_per_s.filter(|_| self.closer == Closer::Us)?;
        let pairs = self.sources as f64 * self.destinations as f64;
        // `as` saturates, and more than a range has ports means all.
        Some((rate * self.hold.as_secs_f64() / pairs).ceil() as u32)
    }

    /// Pairs and connections that stand for `connections` over all pairs: all of them where the limit allows it.
    fn sample(&self, budget: &Budget, connections: u64) -> (u64, u64) {
        let each = connections.div_ceil(budget.pairs()).max(1);
        let pairs = budget.pairs().min(connections).max(1);
        // To begin a pair costs about as much as 32 connections.
        if pairs.saturating_mul(each.max(32)) <= self.simulate_at_most {
            return (pairs, connections);
        }
        let pairs = pairs.min(self.simulate_at_most.min(SAMPLE) / each.max(32)).max(1);
        (pairs, connections.min(pairs.saturating_mul(each)))
    }

    /// When `tuples` are in use, from an empty table: nothing is given back before the steady state.
    fn reached_after(&self, tuples: u64, steady: Option<u64>) -> Option<Duration> {
        let rate = self.arrival_per_s.filter(|_| steady > Some(tuples))?;
        // Whole nanoseconds, as records keep them; `as` saturates at 584 years.
        Some(Duration::from_nanos((tuples as f64 / rate * 1e9) as u64))
    }

    fn sources_needed(&self, budget: &Budget, by_parity: bool, steady: u64) -> u64 {
        let all = budget.capacity();
        let usable = Some(budget.before_the_cliff()).filter(|&half| by_parity && half > 0).unwrap_or(all);
        // In 128 bits, since both factors may be large.
        let needed = (u128::from(steady) * u128::from(self.sources)).div_ceil(u128::from(usable));
        u64::try_from(needed).unwrap_or(u64::MAX).max(1)
    }

    fn points(&self, fill: &Fill) -> Vec<Point> {
        let parts = fill.parts.iter().enumerate();
        let point = |(index, part)| {
            let mean_ns = self.costs.mean_ns(part, middle(index))?.round() as u64;
            Some(Point { fill: (index + 1) as f64 / PARTS as f64, probes: part.probes_per_dial()?, mean_ns })
        };
        parts.filter_map(point).collect()
    }

    fn dialing(&self, pairs: u64, fill: &Fill) -> Dialing {
        let connected = fill.connected();
        let parts = fill.parts.iter().enumerate();
        let time = |(index, part): (usize, &FillPart)| {
            Some(self.costs.mean_ns(part, middle(index))? * part.connected as f64)
        };
        let sum: f64 = parts.filter_map(time).sum();
        let mean_ns = (connected > 0).then(|| (sum / connected as f64).round() as u64);
        Dialing { pairs, connected, failed: fill.failed(), mean_ns }
    }
}

/// The share of ports in use in the middle of a part.
fn middle(part: usize) -> f64 {
    (part as f64 + 0.5) / PARTS as f64
}
