//! Selectors for the SO_REUSEPORT groups of a running server.
//!
//! However a fix ends, the kernel's hash chooses again: without heartbeats the program stops to choose, and a guard process detaches it. No
//! descriptor of a server stays open here: a duplicate lives for one step, because the server's close() has no effect as long as it exists.

mod discover;
mod error;
mod group;
mod guard;
mod heart;
mod server;
mod session;
mod settings;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_record::Remark;

use crate::accept::guard::Guard;
use crate::accept::session::Session;

pub use error::AcceptError;
pub use settings::{Accept, AcceptOutcome, AcceptProgress, AcceptTarget};

/// Interval at which the sockets of the server are listed. A listener that joins gets no connections until then, as long as others of
/// its group are open.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);
/// Interval at which new addresses of a process are looked for, which reads /proc.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum time from a stop request to the end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

impl Accept {
    /// Chooses listeners until the time has passed, `stop` is true or the process of the target has ended. Calls `attached` once with
    /// the addresses of the groups, when the selectors are attached, and `progress` five times a second. The calling process must
    /// have one thread, because the guard process is forked.
    ///
    /// # Errors
    ///
    /// [`AcceptError`]
    pub fn run(
        &self,
        stop: &AtomicBool,
        attached: impl FnOnce(&[String]),
        mut progress: impl FnMut(&AcceptProgress),
    ) -> Result<AcceptOutcome, AcceptError> {
        let guard =
            if self.dry_run { None } else { Some(Guard::start(self.target).map_err(AcceptError::Guard)?) };
        let mut session = Session::attach(self, guard)?;
        let start = Instant::now();
        attached(&session.addresses());
        let (mut followed, mut looked) = (Duration::ZERO, Duration::ZERO);
        let mut has_ended = false;
        let elapsed = loop {
            let elapsed = start.elapsed();
            let remaining = self.time.map_or(POLL_INTERVAL, |time| time.saturating_sub(elapsed));
            if remaining.is_zero() || has_ended || stop.load(Ordering::Relaxed) {
                break elapsed;
            }
            if elapsed >= followed + FOLLOW_INTERVAL {
                let is_time_to_look = elapsed >= looked + LOOK_INTERVAL;
                if is_time_to_look {
                    looked = elapsed;
                }
                session.follow(is_time_to_look)?;
                has_ended = session.has_ended();
                progress(&session.progress(elapsed, elapsed - followed)?);
                followed = elapsed;
            }
            thread::sleep(remaining.min(POLL_INTERVAL));
        };
        let mut validity = Vec::new();
        let seconds = elapsed.as_secs_f64();
        if has_ended {
            let message = format!("the process ended after {seconds:.1} s; the figures cover that time");
            validity.push(Remark::new("target-ended", message));
        } else if self.time.is_some_and(|time| elapsed < time) {
            let message = format!("stopped after {seconds:.1} s; the figures cover that time");
            validity.push(Remark::new("interrupted", message));
        }
        let (results, remarks) = session.finish(elapsed)?;
        validity.extend(remarks);
        Ok(AcceptOutcome { results, validity })
    }
}
