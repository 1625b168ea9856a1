//! The heartbeat without which the selectors choose no more.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fourtuple_bpf::fix_accept::Heartbeat;

/// Ten heartbeats fit into the timeout, so that a busy host does not miss it.
const INTERVAL: Duration = Duration::from_millis(Heartbeat::TIMEOUT_MS / 10);

/// A thread that sends heartbeats until this value is dropped. A thread of its own, because reading /proc may take long.
pub(super) struct Heart {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Heart {
    pub(super) fn start(heartbeat: Heartbeat) -> io::Result<Heart> {
        heartbeat.beat();
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let beat = move || {
            while !flag.load(Ordering::Relaxed) {
                heartbeat.beat();
                thread::park_timeout(INTERVAL);
            }
        };
        let thread = thread::Builder::new().name("heartbeat".to_owned()).spawn(beat)?;
        Ok(Heart { stop, thread: Some(thread) })
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}
