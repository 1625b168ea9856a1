//! The cost of a port search, a simulation of the kernel's search, and plans: as a record with the settings as understood, the figures,
//! and advice in sentences.
//!
//! `fourtuple plan` and the Python package share it. The module measures nothing and reads nothing: [`Plan`] has all input.
#![warn(clippy::disallowed_methods, clippy::disallowed_types)]

mod advice;
mod cost;
mod kernel;
mod simulate;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::thread;
use std::time::Duration;

use fourtuple::dial::Strategy;
use fourtuple::ports::{Budget, BudgetError, Closer, PortRange, PortSet, Random, TIME_WAIT, steady_tuples};
use fourtuple_record::{PlanMoment, PlanOther, PlanPoint, PlanResults, PlanSettings};

pub use cost::{CostError, Costs, CostsByFill, ProbeCost, expected_probes, halves};
pub use kernel::{Probes, SearchResult, TupleTable, WindowSearch};
pub use simulate::{Fill, FillPart, SimulatedDial, dial};

/// Maximum number of connections to simulate for a strategy that the plan is only compared with. Its costs come from the fills of one
/// pair, which are simulated in any case.
const MAX_SIMULATED_BESIDE: u64 = 1_000_000;

/// The sysctls of a host that a record of a plan has.
pub const SYSCTLS: [&str; 5] = [
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_tw_reuse",
    "net.ipv4.tcp_tw_reuse_delay",
    "net.ipv4.tcp_timestamps",
];

/// The reuse of TIME_WAIT sockets by connect() on a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reuse {
    /// net.ipv4.tcp_tw_reuse. 0: never; 1: everywhere; 2: on loopback.
    pub tcp_tw_reuse: u8,
    /// Whether net.ipv4.tcp_timestamps is not 0. Without timestamps no TIME_WAIT socket is reused.
    pub timestamps: bool,
    /// Age from which a socket is reused.
    pub after: Duration,
}

/// The source of the costs of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CostSource {
    /// Measured on this host.
    Calibrated,
    /// The reference figures of fourtuple.
    Reference,
}

impl Reuse {
    /// Returns the reuse by the sysctls of a host; `None` if they are unknown.
    pub fn of(sysctls: &BTreeMap<String, String>) -> Option<Reuse> {
        let number = |name: &str| sysctls.get(name)?.parse::<u64>().ok();
        Some(Reuse {
            tcp_tw_reuse: number("net.ipv4.tcp_tw_reuse")?.try_into().ok()?,
            timestamps: number("net.ipv4.tcp_timestamps")? != 0,
            // Linux before 6.14 has no delay and compares clocks of whole seconds.
            after: number("net.ipv4.tcp_tw_reuse_delay")
                .map_or(Duration::from_secs(1), Duration::from_millis),
        })
    }
}

impl CostSource {
    fn name(self) -> &'static str {
        match self {
            CostSource::Calibrated => "calibrated",
            CostSource::Reference => "reference",
        }
    }
}

/// Returns the strategy to plan with. Replaces [`Strategy::Auto`] by the strategy that it chooses on a kernel with such a search,
/// without its port ledger: a plan covers all processes of a host. `absent`: the kernel lacks IP_LOCAL_PORT_RANGE.
pub fn strategy(wanted: Strategy, search: WindowSearch, absent: bool) -> Strategy {
    match wanted {
        Strategy::Auto if absent => Strategy::KernelDefault,
        Strategy::Auto => match search {
            WindowSearch::Linear => Strategy::FullRange,
            WindowSearch::Parity => Strategy::RANDOM_WINDOW,
        },
        strategy => strategy,
    }
}

/// Returns the settings of the record. `windows`: each random window gets one attempt without a fallback.
pub fn settings(plan: &Plan, windows: bool, costs: CostSource) -> PlanSettings {
    PlanSettings {
        low: plan.range.low(),
        high: plan.range.high(),
        reserved: plan.reserved.count_in(plan.range),
        sources: plan.sources,
        destinations: plan.destinations,
        arrival_per_s: plan.arrival_per_s,
        hold_ns: nanoseconds(plan.hold),
        closer: match plan.closer {
            Closer::Us => "us",
            Closer::Them => "them",
        }
        .to_owned(),
        time_wait_ns: nanoseconds(plan.time_wait),
        kernel: match plan.search {
            WindowSearch::Parity => "parity",
            WindowSearch::Linear => "linear",
        }
        .to_owned(),
        strategy: plan.strategy.to_string(),
        windows,
        costs: costs.name().to_owned(),
    }
}

/// Computes the plan and returns the results of the record. `reuse`: of the host to plan for, `None` if it is not this host.
///
/// # Errors
///
/// [`PlanError`]
pub fn results(plan: &Plan, reuse: Option<Reuse>) -> Result<PlanResults, PlanError> {
    let outcome = plan.outcome()?;
    let others = others(plan)?;
    let advice = advice::lines(plan, &plan.budget()?, &outcome, &others, reuse);
    let over_time = over_time(plan, &outcome);
    Ok(PlanResults {
        capacity: outcome.capacity,
        cliff_connections: outcome.cliff_connections,
        steady_tuples: outcome.steady_tuples,
        cliff_after_ns: outcome.cliff_after.map(nanoseconds),
        exhausted_after_ns: outcome.exhausted_after.map(nanoseconds),
        sources_needed: outcome.sources_needed,
        failed_dials: outcome.failed_dials,
        by_fill: outcome.by_fill,
        others,
        over_time,
        simulated: outcome.simulated,
        advice,
    })
}

/// Plans with the strategy of an ordinary program and with the choice of fourtuple for this kernel.
fn others(plan: &Plan) -> Result<Vec<PlanOther>, PlanError> {
    let by_number = matches!(plan.strategy, Strategy::SelectTestRepeat { .. });
    let strategies = [Strategy::KernelDefault, strategy(Strategy::Auto, plan.search, false)];
    let others = strategies.into_iter().filter(|other| *other != plan.strategy).map(|strategy| {
        let simulate_at_most = plan.simulate_at_most.min(MAX_SIMULATED_BESIDE);
        let outcome = Plan { strategy, simulate_at_most, ..plan.clone() }.outcome()?;
        Ok(PlanOther {
            strategy: strategy.to_string(),
            cliff_connections: outcome.cliff_connections,
            cliff_after_ns: outcome.cliff_after.map(nanoseconds),
            sources_needed: outcome.sources_needed,
            // Costs of ports that are bound by number say nothing about the kernel's search.
            last_mean_ns: outcome.by_fill.last().filter(|_| !by_number).map(|point| point.mean_ns),
        })
    });
    others.collect()
}

/// Returns the ports in use: they rise until the first are free again or none is left, and stay there.
fn over_time(plan: &Plan, outcome: &PlanOutcome) -> Vec<PlanMoment> {
    let Some(steady) = outcome.steady_tuples else { return Vec::new() };
    let in_use = nanoseconds(plan.in_use());
    let (flat_from, tuples) = match outcome.exhausted_after {
        Some(after) => (nanoseconds(after), outcome.capacity),
        None => (in_use, steady),
    };
    // The flat part is at least as visible as the rise, and of an early end the rise is visible too.
    let end = in_use.min(flat_from.saturating_mul(4)).max(flat_from.saturating_add(flat_from / 4));
    let moments = [(0, 0), (flat_from, tuples), (end, tuples)];
    moments.map(|(at_ns, tuples)| PlanMoment { at_ns, tuples }).to_vec()
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Number of parts of the fill in a plan.
const PARTS: usize = 16;

/// Number of simulated fills of one pair. The figures of a plan are their mean.
const REPEATS: u64 = 5;

/// Size of the sample, in connections, for a fleet that is too large to simulate completely. A larger sample would not change a mean.
const SAMPLE: u64 = 20_000_000;

/// The expected connections, from which a plan calculates their use of ports.
///
/// ```
/// use std::time::Duration;
/// use fourtuple::dial::Strategy;
/// use fourtuple::ports::Closer;
/// use fourtuple_observe::plan::Plan;
///
/// let plan = Plan { arrival_per_s: Some(2_000.0), closer: Closer::Us, ..Plan::new(Strategy::KernelDefault) };
/// let outcome = plan.outcome().unwrap();
/// assert_eq!(outcome.cliff_connections, Some(14_116));
/// assert_eq!(outcome.cliff_after, Some(Duration::from_millis(7_058)));
/// assert_eq!(outcome.exhausted_after, Some(Duration::from_millis(14_116)));
/// assert_eq!(outcome.sources_needed, 9);
///
/// // The last sixteenth of the ports costs more than 100 times as much as the first: `connect()` searches half of the range in vain.
/// let (first, last) = (outcome.by_fill[0], outcome.by_fill[15]);
/// assert!(last.fill == 1.0 && last.mean_ns > 100 * first.mean_ns, "{last:?}");
/// assert_eq!((outcome.fleet.pairs, outcome.fleet.connected), (1, 28_232));
/// assert_eq!(plan.budget().unwrap().capacity(), outcome.capacity);
/// assert_eq!(plan.in_use(), Duration::from_secs(60));
/// ```
#[derive(Clone, Debug)]
#[allow(clippy::exhaustive_structs, reason = "of the feature `plan`, without a promise of stability")]
pub struct Plan {
    /// The range of the namespace.
    pub range: PortRange,
    /// Reserved ports (`ip_local_reserved_ports`). Ports outside of the range have no effect.
    pub reserved: PortSet,
    /// Source addresses, at least 1.
    pub sources: u64,
    /// Destinations (address and port), at least 1, equally loaded.
    pub destinations: u64,
    /// New connections per second over all destinations; `None`: unknown.
    pub arrival_per_s: Option<f64>,
    /// Duration of a connection.
    pub hold: Duration,
    /// The end that closes first.
    pub closer: Closer,
    /// Time in TIME_WAIT, if this end closes first: [`TIME_WAIT`] on Linux; 15 s on OS X, 1 s where net.ipv4.tcp_tw_reuse applies.
    pub time_wait: Duration,
    /// The kernel's search of a window.
    pub search: WindowSearch,
    /// Strategy of all dials; not [`Strategy::Auto`].
    pub strategy: Strategy,
    /// Costs of a dial.
    pub costs: CostsByFill,
    /// Maximum number of connections to simulate. Of a larger fleet the plan simulates a sample of the pairs.
    pub simulate_at_most: u64,
    /// Seed of all random choices.
    pub seed: u64,
}

/// Input that allows no plan.
///
/// ```
/// use fourtuple::dial::Strategy;
/// use fourtuple_observe::plan::{Plan, PlanError};
///
/// assert_eq!(Plan::new(Strategy::Auto).outcome(), Err(PlanError::Undecided));
/// let plan = Plan { arrival_per_s: Some(-1.0), ..Plan::new(Strategy::FullRange) };
/// assert_eq!(plan.outcome(), Err(PlanError::Rate(-1.0)));
/// ```
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// There is no tuple.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// The rate is negative or not finite.
    #[error("{0} new connections per second is not a rate: expected a finite number of at least 0")]
    Rate(f64),
    /// The strategy is [`Strategy::Auto`], which depends on the kernel.
    #[error("the strategy auto depends on the kernel: plan with the strategy that it chooses there")]
    Undecided,
}

/// The result of a plan.
///
/// Example: [`Plan`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PlanOutcome {
    /// Maximum number of simultaneous connections over all pairs; saturates.
    pub capacity: u64,
    /// Number of connections from which on connect() searches half of the range in vain; `None`: the strategy has no such cliff.
    pub cliff_connections: Option<u64>,
    /// Tuples in use in the steady state; `None` without an arrival rate.
    pub steady_tuples: Option<u64>,
    /// Time from an empty table to the cliff; `None`: the cliff is never reached.
    pub cliff_after: Option<Duration>,
    /// Time from an empty table until the ports run out; `None`: they never do.
    pub exhausted_after: Option<Duration>,
    /// Number of source addresses with which the ports never run out and the cliff is never reached at this rate; 1 without a rate.
    pub sources_needed: u64,
    /// Dials that fail although ports are free while one pair is filled once: the mean of five fills.
    pub failed_dials: u64,
    /// Cost of connect() by sixteenth of the fill of one pair, the mean of five fills. A part without a successful dial has no
    /// point.
    pub by_fill: Vec<PlanPoint>,
    /// Dials of the whole fleet from an empty table to the steady state, or without a rate until all ports are in use.
    pub fleet: DialTotals,
    /// Number of simulated connections.
    pub simulated: u64,
}

/// Sums over many dials.
///
/// Example: [`Plan`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct DialTotals {
    /// Number of dialed (source, destination) pairs.
    pub pairs: u64,
    /// Dials that got a port.
    pub connected: u64,
    /// Dials that failed although ports were free.
    pub failed: u64,
    /// Predicted mean time in connect(), in nanoseconds; `None` if no dial got a port.
    pub mean_ns: Option<u64>,
}

impl Plan {
    /// Creates a plan for one source and one destination without a rate, on Linux 6.8 or later with the default range.
    pub fn new(strategy: Strategy) -> Self {
        Plan {
            range: PortRange::KERNEL_DEFAULT,
            reserved: PortSet::new(),
            sources: 1,
            destinations: 1,
            arrival_per_s: None,
            hold: Duration::ZERO,
            closer: Closer::Them,
            time_wait: TIME_WAIT,
            search: WindowSearch::Linear,
            strategy,
            costs: Costs::reference().into(),
            simulate_at_most: 1_000_000_000,
            seed: 0,
        }
    }

    /// Returns the time for which a connection uses its tuple: its duration, and its time in TIME_WAIT if this end closes first.
    pub fn in_use(&self) -> Duration {
        self.hold.saturating_add(self.time_in_time_wait())
    }

    fn time_in_time_wait(&self) -> Duration {
        match self.closer {
            Closer::Us => self.time_wait,
            Closer::Them => Duration::ZERO,
        }
    }

    /// Returns the tuples that there are for these sources and destinations.
    ///
    /// # Errors
    ///
    /// [`PlanError::Undecided`] for [`Strategy::Auto`]; [`PlanError::Budget`] where there is no tuple.
    pub fn budget(&self) -> Result<Budget, PlanError> {
        if self.strategy == Strategy::Auto {
            return Err(PlanError::Undecided);
        }
        let by_parity = halves(self.strategy, self.search);
        Ok(Budget::new(self.range, &self.reserved, by_parity, self.sources, self.destinations)?)
    }

    /// Calculates the plan. The duration is proportional to the simulated connections: a few nanoseconds for each.
    ///
    /// # Errors
    ///
    /// See [`PlanError`].
    pub fn outcome(&self) -> Result<PlanOutcome, PlanError> {
        if self.strategy == Strategy::Auto {
            return Err(PlanError::Undecided);
        }
        if let Some(rate) = self.arrival_per_s
            && !(rate.is_finite() && rate >= 0.0)
        {
            return Err(PlanError::Rate(rate));
        }
        let by_parity = halves(self.strategy, self.search);
        let budget = self.budget()?;
        let capacity = budget.capacity();
        let cliff_connections = by_parity.then(|| budget.before_the_cliff());
        let steady = self.arrival_per_s.map(|rate| steady_tuples(rate, self.in_use()));

        let one = self.fleet(REPEATS, REPEATS * u64::from(budget.ports())).simulate();
        let (pairs, connections) = self.sample(&budget, steady.unwrap_or(capacity).min(capacity));
        let all = self.fleet(pairs, connections).simulate();

        Ok(PlanOutcome {
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
        })
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

    /// Returns the simultaneous connections of one pair if closed connections stay in TIME_WAIT, else `None`.
    fn open_in_a_pair(&self) -> Option<u32> {
        let rate = self.arrival_per_s.filter(|_| !self.time_in_time_wait().is_zero())?;
        let pairs = self.sources as f64 * self.destinations as f64;
        // `as` saturates, and a number above the ports of the range means all ports.
        Some((rate * self.hold.as_secs_f64() / pairs).ceil() as u32)
    }

    /// Returns the pairs and connections to simulate for `connections` over all pairs: all of them if the limit allows it.
    fn sample(&self, budget: &Budget, connections: u64) -> (u64, u64) {
        let each = connections.div_ceil(budget.pairs()).max(1);
        let pairs = budget.pairs().min(connections).max(1);
        // The start of a pair costs about as much as 32 connections.
        if pairs.saturating_mul(each.max(32)) <= self.simulate_at_most {
            return (pairs, connections);
        }
        let pairs = pairs.min(self.simulate_at_most.min(SAMPLE) / each.max(32)).max(1);
        (pairs, connections.min(pairs.saturating_mul(each)))
    }

    /// Returns the time from an empty table until `tuples` are in use. No tuple becomes free before the steady state.
    fn reached_after(&self, tuples: u64, steady: Option<u64>) -> Option<Duration> {
        let rate = self.arrival_per_s.filter(|_| steady > Some(tuples))?;
        // Whole nanoseconds, as in records. `as` saturates at 584 years.
        Some(Duration::from_nanos((tuples as f64 / rate * 1e9) as u64))
    }

    fn sources_needed(&self, budget: &Budget, by_parity: bool, steady: u64) -> u64 {
        let all = budget.capacity();
        let usable = Some(budget.before_the_cliff()).filter(|&half| by_parity && half > 0).unwrap_or(all);
        // Computed in 128 bits, because both factors may be large.
        let needed = (u128::from(steady) * u128::from(self.sources)).div_ceil(u128::from(usable));
        u64::try_from(needed).unwrap_or(u64::MAX).max(1)
    }

    fn points(&self, fill: &Fill) -> Vec<PlanPoint> {
        let parts = fill.parts.iter().enumerate();
        let point = |(index, part)| {
            let mean_ns = self.costs.mean_ns(part, middle(index))?.round() as u64;
            Some(PlanPoint {
                fill: (index + 1) as f64 / PARTS as f64,
                probes: part.probes_per_dial()?,
                mean_ns,
            })
        };
        parts.filter_map(point).collect()
    }

    fn dialing(&self, pairs: u64, fill: &Fill) -> DialTotals {
        let connected = fill.connected();
        let parts = fill.parts.iter().enumerate();
        let time = |(index, part): (usize, &FillPart)| {
            Some(self.costs.mean_ns(part, middle(index))? * part.connected as f64)
        };
        let sum: f64 = parts.filter_map(time).sum();
        let mean_ns = (connected > 0).then(|| (sum / connected as f64).round() as u64);
        DialTotals { pairs, connected, failed: fill.failed(), mean_ns }
    }
}

/// Returns the share of ports in use in the middle of a part.
fn middle(part: usize) -> f64 {
    (part as f64 + 0.5) / PARTS as f64
}

/// A simulation of the dials to many destinations, connection by connection.
///
/// Tuples of different (source, destination) pairs do not conflict. So each worker thread fills one table after another, and needs
/// memory for one table only.
///
/// ```
/// use fourtuple::dial::Strategy;
/// use fourtuple::ports::{PortRange, PortSet};
/// use fourtuple_observe::plan::{Fleet, WindowSearch};
///
/// let fleet = Fleet {
///     range: PortRange::KERNEL_DEFAULT,
///     reserved: &PortSet::new(),
///     search: WindowSearch::Linear,
///     strategy: Strategy::FullRange,
///     pairs: 100,
///     connections: 100_000,
///     open: None,
///     parts: 16,
///     seed: 1,
/// };
/// let fill = fleet.simulate();
/// assert_eq!((fill.connected(), fill.failed()), (100_000, 0));
/// ```
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs, reason = "of the feature `plan`, without a promise of stability")]
pub struct Fleet<'a> {
    /// The range of the namespace.
    pub range: PortRange,
    /// Reserved ports.
    pub reserved: &'a PortSet,
    /// The kernel's search of a window.
    pub search: WindowSearch,
    /// Strategy of all dials.
    pub strategy: Strategy,
    /// Number of (source, destination) pairs: sources x destinations.
    pub pairs: u64,
    /// Dials over all pairs, distributed evenly.
    pub connections: u64,
    /// Simultaneous connections of one pair, as for [`Fill::dial`].
    pub open: Option<u32>,
    /// Number of parts of the fill to report.
    pub parts: usize,
    /// Seed of all random choices. The result does not depend on the number of processors.
    pub seed: u64,
}

impl Fleet<'_> {
    /// Simulates all dials, with one worker thread per processor.
    ///
    /// # Panics
    ///
    /// Panics for [`Strategy::Auto`], as [`Strategy::step`] does.
    pub fn simulate(&self) -> Fill {
        let workers = thread::available_parallelism().map_or(1, NonZeroUsize::get) as u64;
        let share = self.pairs.div_ceil(workers).max(1);
        let mut sum = Fill::new(self.parts);
        thread::scope(|scope| {
            let workers: Vec<_> = (0..workers)
                .map(|worker| worker.saturating_mul(share))
                .take_while(|&first| first < self.pairs)
                .map(|first| {
                    let pairs = first..first.saturating_add(share).min(self.pairs);
                    let share = pairs.clone();
                    let started =
                        thread::Builder::new().spawn_scoped(scope, move || self.simulate_pairs(share));
                    (started, pairs)
                })
                .collect();
            for (worker, pairs) in workers {
                match worker.map(thread::ScopedJoinHandle::join) {
                    Ok(Ok(fill)) => sum.merge(&fill),
                    Ok(Err(panic)) => std::panic::resume_unwind(panic),
                    // The thread could not be created: this thread simulates its share, with the same result.
                    Err(_) => sum.merge(&self.simulate_pairs(pairs)),
                }
            }
        });
        sum
    }

    fn simulate_pairs(&self, pairs: std::ops::Range<u64>) -> Fill {
        let mut fill = Fill::new(self.parts);
        let mut random = Random::with_seed(self.seed);
        let mut table = TupleTable::new(self.range, self.search, self.reserved, &mut random);
        let (each, more) = (self.connections / self.pairs, self.connections % self.pairs);
        for pair in pairs {
            // Each pair has its own random sequence, independent of the worker thread.
            random.seed(self.seed.wrapping_add(pair.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
            table.reset(&mut random);
            let dials = each + u64::from(pair < more);
            fill.dial(&mut table, self.strategy, dials, self.open, &mut random);
        }
        fill
    }
}
