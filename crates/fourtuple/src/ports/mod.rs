//! Source ports as numbers: ranges, reserved ports, budgets, what a search costs, and the kernel's search itself, in
//! memory.
//!
//! Nothing in this module opens a socket, reads a clock or draws its own randomness: all of it is passed in, so that
//! every claim can be tested.

mod counted;
mod fleet;
mod free;
mod kernel;
mod range;
mod simulate;

pub use fleet::Fleet;
pub use kernel::{Found, Probes, Search, TupleTable};
pub use range::{PortRange, PortSet, RangeError};
pub use simulate::{Dialed, Fill, FillPart, dial};
