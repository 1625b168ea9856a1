//! The preflight compares the ports, descriptors and queues of this host with the need of a run, and proposes remedies.
//! After the run the hindsight judges the measurements in the same way.
//!
//! Only [`Snapshot::read`] queries the kernel; the rest is arithmetic on its result.

mod findings;
mod forecast;
mod hindsight;
mod judge;
mod read;
mod snapshot;

pub use findings::Remedy;
pub(crate) use forecast::Forecast;
pub use forecast::{ASSUMED_CONNECTIONS_PER_S, ASSUMED_REQUESTS_PER_S, LATEST_TIMER, Stall, predict_live};
pub use hindsight::{Hindsight, NoPort, Offered, RunMeasurements, hindsight};
pub use judge::{Closer, Finding, Need, Preflight, Severity, Transport, judge};
pub use read::ReadError;
pub use snapshot::{Conntrack, Descriptors, ListenQueue, Snapshot, Taken};
