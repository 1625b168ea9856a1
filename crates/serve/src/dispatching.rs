//! The thread that accepts for all workers and hands out what has something to say.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use fourtuple::listen::{Dispatcher, Waker};

use crate::error::ServeError;

/// The thread; dropping it ends it.
pub(crate) struct Dispatching {
    thread: Option<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    waker: Waker,
}

impl Dispatching {
    pub(crate) fn start(mut dispatcher: Dispatcher) -> Result<Dispatching, ServeError> {
        let stop = Arc::new(AtomicBool::new(false));
        let (waker, told) = (dispatcher.waker(), Arc::clone(&stop));
        let thread = thread::Builder::new()
            .name("serve-dispatcher".to_owned())
            // Where it fails it ends, and everybody who looks sees that.
            .spawn(move || drop(dispatcher.run(&told)))
            .map_err(|source| ServeError::Worker { worker: 0, call: "a new thread", source })?;
        Ok(Dispatching { thread: Some(thread), stop, waker })
    }

    /// Whether it ended by itself, which it should not.
    pub(crate) fn has_failed(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Dispatching {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // It has nothing to say that has_failed() did not.
            let _ = thread.join();
        }
    }
}
