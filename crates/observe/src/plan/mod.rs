//! The cost of a port search, a simulation of the kernel's search, and plans: as a record with the settings as understood, the figures,
//! and advice in sentences.
//!
//! `fourtuple plan` and the Python package share it. The module measures nothing and reads nothing: [`Plan`] has all input.
#![warn(clippy::disallowed_methods, clippy::disallowed_types)]

mod advice;
mod cost;
mod kernel;
mod model;
mod simulate;

use std::collections::BTreeMap;
use std::time::Duration;

use fourtuple::dial::Strategy;
use fourtuple::ports::Closer;
use fourtuple_record::{PlanMoment, PlanOther, PlanPoint, PlanResults, PlanSettings};

pub use cost::{CostError, Costs, CostsByFill, ProbeCost, expected_probes, halves};
pub use kernel::{Probes, SearchResult, TupleTable, WindowSearch};
pub use model::{DialTotals, FillPoint, Fleet, Plan, PlanError, PlanOutcome};
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
        by_fill: outcome
            .by_fill
            .iter()
            .map(|point| PlanPoint { fill: point.fill, probes: point.probes, mean_ns: point.mean_ns })
            .collect(),
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
