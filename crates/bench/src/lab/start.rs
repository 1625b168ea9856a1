//! Starts the threads of an experiment, and lets several of them begin at the same moment.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope, ScopedJoinHandle};

use crate::lab::LabError;

/// Starts a thread of `scope`.
///
/// # Errors
///
/// [`LabError::Call`] if the thread cannot be created: EAGAIN at RLIMIT_NPROC or at pids.max of the cgroup.
pub(crate) fn thread<'scope, R: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> R + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, R>, LabError> {
    thread::Builder::new().spawn_scoped(scope, work).map_err(LabError::call("start a thread"))
}

/// A common start for several threads. Unlike a barrier, the start can be cancelled if one of the threads cannot be
/// created.
#[derive(Debug, Default)]
pub(crate) struct Start {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: usize,
    /// Whether to begin; `None` until this is decided.
    begins: Option<bool>,
}

impl Start {
    /// Waits for the start. Returns false if the start was cancelled.
    pub(crate) fn wait(&self) -> bool {
        let mut state = self.state();
        state.waiting += 1;
        self.changed.notify_all();
        loop {
            if let Some(begins) = state.begins {
                return begins;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until `threads` threads wait, and lets them begin.
    pub(crate) fn begin(&self, threads: usize) {
        let mut state = self.state();
        while state.waiting < threads {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.begins = Some(true);
        self.changed.notify_all();
    }

    /// Cancels the start: threads that wait now, or that arrive later, return without running.
    pub(crate) fn cancel(&self) {
        self.state().begins = Some(false);
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_begin_together_or_not_at_all() {
        for begins in [true, false] {
            let start = Start::default();
            let begun: Vec<bool> = thread::scope(|scope| {
                let threads: Vec<_> = (0..3).map(|_| thread(scope, || start.wait()).unwrap()).collect();
                if begins {
                    start.begin(3)
                } else {
                    start.cancel()
                }
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(begun, [begins; 3]);
        }
    }
}
