//! The counts of a worker, which other threads read while it runs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use fourtuple_record::ServeWorker;

/// A counter that one thread writes and others read, without atomic read-modify-write instructions.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    /// Adds to the counter. Only the worker that owns the counter may call this.
    pub(crate) fn add(&self, more: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counts of one worker, on separate cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counts {
    pub(crate) accepted: Count,
    pub(crate) requests: Count,
    pub(crate) received_bytes: Count,
    pub(crate) sent_bytes: Count,
    errors: Mutex<BTreeMap<String, u64>>,
}

impl Counts {
    /// Counts a failure by name. Failures are rare, so a lock is acceptable.
    pub(crate) fn error(&self, name: &str) {
        self.errors(name, 1);
    }

    /// Counts several failures of one name.
    pub(crate) fn errors(&self, name: &str, more: u64) {
        if more == 0 {
            return;
        }
        let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        match errors.get_mut(name) {
            Some(count) => *count += more,
            None => drop(errors.insert(name.to_owned(), more)),
        }
    }

    /// Returns the current counts.
    pub(crate) fn now(&self) -> ServeWorker {
        ServeWorker {
            accepted: self.accepted.get(),
            requests: self.requests.get(),
            received_bytes: self.received_bytes.get(),
            sent_bytes: self.sent_bytes.get(),
            errors: self.errors.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}
