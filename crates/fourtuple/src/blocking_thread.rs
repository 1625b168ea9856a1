//! Work on the blocking threads of a tokio runtime.

use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, PoisonError};

use fourtuple_syscalls::Errno;
use tokio::runtime::Handle;

/// Runs `work` on a blocking thread of the current runtime. A panic of `work` continues in the caller.
///
/// # Errors
///
/// EAGAIN, and `work` never runs: the runtime has no blocking thread, and the system has none left (RLIMIT_NPROC, pids.max). An error
/// without an errno: the runtime shuts down.
///
/// # Panics
///
/// Outside of a tokio runtime.
pub(crate) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let runtime = Handle::current();
    // spawn_blocking() queues the task, and then panics if it cannot start a thread.
    let work = Arc::new(Mutex::new(Some(work)));
    let queued = Arc::clone(&work);
    let take = |work: &Mutex<Option<_>>| work.lock().unwrap_or_else(PoisonError::into_inner).take();
    let begin = || runtime.spawn_blocking(move || take(&queued).map(|work| work()));
    let Ok(task) = panic::catch_unwind(AssertUnwindSafe(begin)) else {
        take(&work);
        return Err(no_thread());
    };
    match task.await {
        Ok(done) => done.ok_or_else(no_thread),
        Err(error) => match error.try_into_panic() {
            Ok(payload) => panic::resume_unwind(payload),
            Err(error) => Err(io::Error::other(error)),
        },
    }
}

fn no_thread() -> io::Error {
    io::Error::from(Errno::EAGAIN)
}
