//! Before the first packet: what this host has for a run, whether that is enough, and what to type instead. After the
//! last one: the same in hindsight.
//!
//! [`Snapshot::read`] asks the kernel; everything else here is arithmetic on what it said.

mod findings;
mod forecast;
mod hindsight;
mod judge;
mod read;
mod remedy;
mod snapshot;

pub use forecast::{ASSUMED_CONNECTIONS_PER_S, ASSUMED_REQUESTS_PER_S, LATEST_TIMER, Stall, predict_live};
pub use hindsight::{Hindsight, NoPort, Offered, Seen, hindsight};
pub use judge::{Closer, Finding, Need, Preflight, Severity, Transport, judge};
pub use read::ReadError;
pub use remedy::Remedy;
pub use snapshot::{Conntrack, Descriptors, ListenQueue, Snapshot, Taken};
