//! The thread of the policy `dispatcher`: it accepts connections and hands readable ones to the workers.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use fourtuple::listen::{AcceptWaker, Dispatcher, DispatcherStats};
use fourtuple_syscalls::errno_name;

use crate::error::ServeError;
use crate::policy_worker::into_io;

/// The dispatcher thread. Dropping this value ends the thread.
pub(crate) struct DispatcherThread {
    thread: Option<JoinHandle<(io::Result<()>, DispatcherStats)>>,
    stop: Arc<AtomicBool>,
    waker: AcceptWaker,
}

impl DispatcherThread {
    pub(crate) fn start(mut dispatcher: Dispatcher) -> Result<DispatcherThread, ServeError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (waker, flag) = (dispatcher.waker(), Arc::clone(&stop));
        let thread = thread::Builder::new()
            .name("serve-dispatcher".to_owned())
            // After an error the thread ends, has_failed() reports it, and end() returns it.
            .spawn(move || (dispatcher.run(&flag).map_err(into_io), dispatcher.stats()))
            .map_err(|source| ServeError::Worker { worker: 0, call: "a new thread", source })?;
        Ok(DispatcherThread { thread: Some(thread), stop, waker })
    }

    /// Returns whether the thread has ended before it was stopped.
    pub(crate) fn has_failed(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl DispatcherThread {
    /// Ends the thread and returns its failures by name. A second call returns none.
    pub(crate) fn end(&mut self) -> Vec<(String, u64)> {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
        let Some(thread) = self.thread.take() else { return Vec::new() };
        let Ok((ended, stats)) = thread.join() else {
            return vec![("dispatcher-ended: panic".to_owned(), 1)];
        };
        let failure = ended.err().map(|error| format!("dispatcher-ended: {}", errno_name(&error)));
        let counts = [
            ("dispatcher accept: EMFILE", stats.out_of_process_descriptors),
            ("dispatcher accept: ENFILE", stats.out_of_host_descriptors),
            ("dispatcher accept: ENOMEM", stats.out_of_memory),
            ("dispatcher accept: other", stats.other_failed_accepts),
            ("dispatcher epoll_ctl: ENOSPC", stats.unwatched),
            ("dispatcher lost: EMFILE", stats.lost),
            ("idle-closed", stats.idle_closed),
        ];
        let counts = counts.map(|(name, count)| (name.to_owned(), count));
        failure.map(|name| (name, 1)).into_iter().chain(counts).collect()
    }
}

impl Drop for DispatcherThread {
    fn drop(&mut self) {
        self.end();
    }
}
