//! Runs of both engines against real servers, honest and hostile.

mod arrivals;
mod failures;
mod hostile;
mod phases;
mod run;
mod sources;
mod tls;
mod workloads;
