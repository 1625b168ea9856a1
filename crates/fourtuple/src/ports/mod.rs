//! Source ports as numbers: ranges, reserved ports and budgets.
//!
//! Nothing in this module opens a socket, reads a clock or draws random numbers: callers pass all of these in, so that each
//! claim can be tested.
//!
//! Example: [`Budget`].

mod budget;
mod range;

pub use budget::{Budget, BudgetError, Closer, TIME_WAIT, steady_tuples};
pub use range::{PortRange, PortSet, Random, RangeError};
