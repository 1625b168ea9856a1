//! Experiments on this kernel: each answers a question, and compares the answer with published results.
//!
//! Every experiment makes real connections in a network namespace of its own, so it neither sees nor changes the host. The
//! module prints nothing: results are records, and progress goes to the [`Watch`].
//!
//! `accept`, `keepalive` and `locks` share the workers and clients of `pool` and use neither `load` nor `serve`: a misplaced wait needs the
//! worker, the start and the end of every request, which each response of the pool contains, and each request names its service time, so
//! that a seed gives the same requests under every policy.
//!
//! A lab that ends in any way leaves nothing to restore: it changes only the namespaces that it made. A stop flag ends it early, with the
//! results so far.

pub mod accept;
mod calibrate;
#[cfg(test)]
mod documented;
mod error;
pub mod keepalive;
pub mod locks;
mod namespace;
pub mod planes;
pub mod pool;
pub mod ports;
mod start;
pub mod time_wait;

use std::sync::atomic::{AtomicBool, Ordering};

pub use calibrate::calibrate;
pub use error::LabError;
pub use namespace::{Family, Namespace, prepare_process};

/// Receives the progress of an experiment, and may end it early.
pub struct Watch<'a> {
    /// Set by another thread to end the experiment; results so far are kept.
    pub stop: &'a AtomicBool,
    pub progress: &'a dyn Progress,
}

impl Watch<'_> {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

pub trait Progress: Sync {
    /// Reports that a part of `total` steps begins.
    fn begin(&self, part: &str, total: u64);
    /// Reports that `done` steps of the current part are done.
    fn at(&self, done: u64);
}

/// A display that shows nothing.
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _part: &str, _total: u64) {}
    fn at(&self, _done: u64) {}
}
