//! What a worker did, to be read while it goes on.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use fourtuple_record::ServeWorker;

/// A count that one thread writes and others read: no locked instruction is needed.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    /// Only the worker whose count it is may call this.
    pub(crate) fn add(&self, more: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counts of one worker, on cache lines of their own.
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
    /// Counts a failure by name. Failures are rare: they may take a lock.
    pub(crate) fn error(&self, name: &str) {
        let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        match errors.get_mut(name) {
            Some(count) => *count += 1,
            None => drop(errors.insert(name.to_owned(), 1)),
        }
    }

    /// How things stand.
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
