//! Source ports as numbers: ranges, reserved ports and budgets; with the feature `plan` also the cost of a port search, a
//! simulation of the kernel's search, and plans.
//!
//! Nothing in this module opens a socket, reads a clock or draws random numbers: callers pass all of these in, so that each
//! claim can be tested.
//!
//! Example: [`Budget`]; with the feature `plan`, `Plan` predicts the time of connect(). The feature promises no stability.

mod budget;
#[cfg(feature = "plan")]
mod cost;
#[cfg(feature = "plan")]
mod kernel;
#[cfg(feature = "plan")]
mod plan;
mod range;
#[cfg(feature = "plan")]
mod simulate;

pub use budget::{Budget, BudgetError, Closer, TIME_WAIT, steady_tuples};
#[cfg(feature = "plan")]
pub use cost::{CostError, Costs, CostsByFill, ProbeCost, expected_probes, halves};
#[cfg(feature = "plan")]
pub use kernel::{Probes, SearchResult, TupleTable, WindowSearch};
#[cfg(feature = "plan")]
pub use plan::{DialTotals, Fleet, Plan, PlanError, PlanOutcome, PlanPoint};
pub use range::{PortRange, PortSet, Random, RangeError};
#[cfg(feature = "plan")]
pub use simulate::{Fill, FillPart, SimulatedDial, dial};
