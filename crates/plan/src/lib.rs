//! A plan of source ports as a record: the settings as understood, the figures, and advice in sentences.
//!
//! `fourtuple plan` and the Python package share it. The crate measures nothing and reads nothing: [`fourtuple::ports::Plan`] has all
//! input.
#![forbid(unsafe_code)]

mod advice;

use std::time::Duration;

use fourtuple::dial::Strategy;
use fourtuple::ports::{Closer, Plan, PlanError, WindowSearch};
use fourtuple_record::{PlanPoint, PlanResults, PlanSettings};

/// The source of the costs of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CostSource {
    /// Measured on this host.
    Calibrated,
    /// The reference figures of fourtuple.
    Reference,
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

/// Computes the plan and returns the results of the record.
///
/// # Errors
///
/// [`PlanError`]
pub fn results(plan: &Plan) -> Result<PlanResults, PlanError> {
    let outcome = plan.outcome()?;
    let advice = advice::lines(plan, &plan.budget()?, &outcome);
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
        simulated: outcome.simulated,
        advice,
    })
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
