//! Source ports as numbers: ranges, reserved ports, budgets, what a search costs, and the kernel's search itself, in
//! memory.
//!
//! Nothing in this module opens a socket, reads a clock or draws its own randomness: all of it is passed in, so that
//! every claim can be tested.

mod advice;
mod budget;
mod cost;
mod counted;
mod fleet;
mod free;
mod kernel;
mod plan;
mod range;
mod simulate;
pub mod words;

pub use budget::{Budget, BudgetError, Closer, TIME_WAIT, steady_tuples};
pub use cost::{CostError, Costs, CostsByFill, ProbeCost, expected_probes, halves};
pub use fleet::Fleet;
pub use kernel::{Found, Probes, Search, TupleTable};
pub use plan::{Dialing, Outcome, Plan, PlanError, Point};
pub use range::{PortRange, PortSet, RangeError};
pub use simulate::{Dialed, Fill, FillPart, dial};
