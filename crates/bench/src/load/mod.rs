//! A load generator for connections, which reports what limited its own measurement.
//!
//! A run combines an engine (system calls), a workload (the protocol of a connection) and an arrival process (when operations
//! begin). [`Load::run`] executes it. [`preflight`] checks before the run whether this host has the ports, descriptors and
//! queues that the run needs, and explains the results after it.

mod arrival;
mod driver;
mod engine;
mod error;
mod origin;
pub mod preflight;
mod prepared;
mod ramp;
mod run;
mod settings;
mod tally;
mod target;
mod workload;

pub use arrival::Arrival;
pub use engine::EngineChoice;
pub use error::LoadError;
pub use prepared::{Measured, Prepared, SYSCTLS};
pub use ramp::Ramp;
pub use run::{Outcome, RunProgress};
pub use settings::{
    Close, Load, MAX_BODY, MAX_BYTES, MAX_CONNECTIONS, MAX_COUNT, MAX_HELD, MAX_RATE, MAX_STREAMS,
    MAX_THREADS, MAX_TIME,
};
pub use tally::{Coordination, Interval, IntervalSink};
pub use target::{HostAddresses, Scheme, Target, TargetError};
#[doc(hidden)]
pub use workload::fuzzing;
pub use workload::{HttpRequest, Order, RequestList, TlsOptions, Trust, Workload};
