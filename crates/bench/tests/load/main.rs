//! Runs of all engines against real servers, honest and hostile.

mod arrivals;
mod failures;
mod hostile;
mod http2;
mod phases;
mod run;
mod sources;
mod tls;
mod workloads;
