//! Experiments on this kernel: a question, what others published, this kernel's answer.
//!
//! Every experiment makes real connections in a network namespace of its own, so it neither sees nor disturbs the host,
//! and has nothing to put back. It does not print: results are records, progress goes to whoever watches.
#![forbid(unsafe_code)]

pub mod accept;
mod calibrate;
mod error;
pub mod keepalive;
pub mod locks;
mod namespace;
pub mod planes;
pub mod pool;
pub mod ports;
pub mod time_wait;

use std::sync::atomic::{AtomicBool, Ordering};

pub use calibrate::calibrate;
pub use error::LabError;
pub use namespace::{Family, Namespace, prepare_process};

/// Who watches an experiment, and may end it early.
pub struct Watch<'a> {
    /// Set from outside to end the experiment; what was measured until then is kept.
    pub stop: &'a AtomicBool,
    /// Told how far it is.
    pub progress: &'a dyn Progress,
}

impl Watch<'_> {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// A display of progress.
pub trait Progress: Sync {
    /// A new part begins, of `total` steps.
    fn begin(&self, part: &str, total: u64);
    /// So many steps of it are done.
    fn at(&self, done: u64);
}

/// No display.
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _part: &str, _total: u64) {}
    fn at(&self, _done: u64) {}
}
