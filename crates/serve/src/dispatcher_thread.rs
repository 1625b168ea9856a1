//! The thread of the policy `dispatcher`: it accepts connections and hands readable ones to the workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use fourtuple::listen::{AcceptWaker, Dispatcher, DispatcherStats};

use crate::error::ServeError;

/// The dispatcher thread. Dropping this value ends the thread.
pub(crate) struct DispatcherThread {
    thread: Option<JoinHandle<DispatcherStats>>,
    stop: Arc<AtomicBool>,
    waker: AcceptWaker,
}

impl DispatcherThread {
    pub(crate) fn start(mut dispatcher: Dispatcher) -> Result<DispatcherThread, ServeError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (waker, flag) = (dispatcher.waker(), Arc::clone(&stop));
        let thread = thread::Builder::new()
            .name("serve-dispatcher".to_owned())
            // After an error the thread ends, and has_failed() reports it.
            .spawn(move || {
                let _ = dispatcher.run(&flag);
                dispatcher.stats()
            })
            .map_err(|source| ServeError::Worker { worker: 0, call: "a new thread", source })?;
        Ok(DispatcherThread { thread: Some(thread), stop, waker })
    }

    /// Returns whether the thread has ended before it was stopped.
    pub(crate) fn has_failed(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl DispatcherThread {
    /// Ends the thread and returns its failures by name. After a panic the list is empty.
    pub(crate) fn end(&mut self) -> Vec<(&'static str, u64)> {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
        let Some(Ok(stats)) = self.thread.take().map(JoinHandle::join) else { return Vec::new() };
        vec![
            ("dispatcher accept: EMFILE", stats.out_of_process_descriptors),
            ("dispatcher accept: ENFILE", stats.out_of_host_descriptors),
            ("dispatcher accept: ENOMEM", stats.out_of_memory),
            ("dispatcher epoll_ctl: ENOSPC", stats.unwatched),
            ("dispatcher lost: EMFILE", stats.lost),
            ("idle-closed", stats.idle_closed),
        ]
    }
}

impl Drop for DispatcherThread {
    fn drop(&mut self) {
        self.end();
    }
}
