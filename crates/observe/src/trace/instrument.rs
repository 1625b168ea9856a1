//! The runner that all traces share: attach, read the counters until the end, detach.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_record::{Remark, format_time};

use crate::trace::error::TraceError;

/// Maximum time from a stop request to the end of the trace, and interval of [`Session::poll`].
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A kind of trace with its settings.
pub trait Instrument {
    /// The attached BPF programs.
    type Session: Session;

    /// Loads and attaches the BPF programs.
    ///
    /// # Errors
    ///
    /// The variant of [`TraceError`] for this kind of trace.
    fn attach(&self) -> Result<Self::Session, TraceError>;

    /// Returns how long to trace; `None` means until the caller sets `stop`.
    fn duration(&self) -> Option<Duration>;

    /// Traces until [`Instrument::duration`] has passed or `stop` is true. Calls `attached` once, when the kernel has begun
    /// to count, and `progress` every [`Session::PROGRESS_INTERVAL`].
    ///
    /// # Errors
    ///
    /// The errors of [`Instrument::attach`], and errors from reading BPF maps.
    fn run(
        &self,
        stop: &AtomicBool,
        attached: impl FnOnce(),
        mut progress: impl FnMut(&Progress<Self>),
    ) -> Result<Outcome<Results<Self>>, TraceError> {
        let mut session = self.attach()?;
        let start = Instant::now();
        attached();
        let mut reported = Duration::ZERO;
        loop {
            let elapsed = start.elapsed();
            let remaining = self.duration().map_or(POLL_INTERVAL, |time| time.saturating_sub(elapsed));
            session.poll(elapsed)?;
            if remaining.is_zero() || stop.load(Ordering::Relaxed) {
                break;
            }
            if elapsed >= reported + Self::Session::PROGRESS_INTERVAL {
                reported = elapsed;
                progress(&session.progress(elapsed)?);
            }
            // Wake at multiples of the interval since the start, where columns of the heat map end.
            let past = start.elapsed().as_nanos() % POLL_INTERVAL.as_nanos();
            thread::sleep(remaining.min(POLL_INTERVAL - Duration::from_nanos(past as u64)));
        }
        let elapsed = start.elapsed();
        let mut outcome = session.finish(elapsed)?;
        if self.duration().is_some_and(|time| elapsed < time) {
            let message = format!("stopped after {}; the figures cover that time", format_time(elapsed));
            outcome.validity.insert(0, Remark::new("interrupted", message));
        }
        Ok(outcome)
    }
}

/// A running trace.
pub trait Session {
    /// Figures for a live display.
    type Progress;
    type Results;
    /// Interval between two calls of [`Session::progress`].
    const PROGRESS_INTERVAL: Duration;

    /// Drains what the kernel keeps for a short time only. The runner calls it every 50 ms.
    ///
    /// # Errors
    ///
    /// Errors from reading BPF maps.
    fn poll(&mut self, elapsed: Duration) -> Result<(), TraceError> {
        let _ = elapsed;
        Ok(())
    }

    /// Reads the counters at `elapsed` after the start.
    ///
    /// # Errors
    ///
    /// Errors from reading BPF maps.
    fn progress(&mut self, elapsed: Duration) -> Result<Self::Progress, TraceError>;

    /// Detaches the programs and reads the final counters. `elapsed` is how long they were attached.
    ///
    /// # Errors
    ///
    /// Errors from reading BPF maps.
    fn finish(self, elapsed: Duration) -> Result<Outcome<Self::Results>, TraceError>;
}

/// Figures for a live display of an instrument.
pub type Progress<I> = <<I as Instrument>::Session as Session>::Progress;
pub type Results<I> = <<I as Instrument>::Session as Session>::Results;

/// Stacks for a flame graph: frames joined by `;`, outermost first, with a weight.
pub type Folded = Vec<(String, u64)>;

/// The results of a trace and the limits of their validity.
#[derive(Clone, Debug)]
pub struct Outcome<R> {
    pub results: R,
    /// Reasons to doubt the results; empty for a valid run.
    pub validity: Vec<Remark>,
    /// Stacks for a flame graph, sorted; empty where the trace takes none.
    pub folded: Folded,
}

#[cfg(test)]
pub(crate) mod tests {
    use fourtuple_bpf::BpfError::{Absent, NotPermitted};
    use fourtuple_testing::skip;

    use super::*;

    /// Returns the attached programs, or `None` after reporting a skipped test where the host lacks what they need.
    pub(crate) fn attached<S>(test: &str, attached: Result<S, TraceError>) -> Option<S> {
        match attached {
            Err(
                error @ (TraceError::Bpf(NotPermitted { .. } | Absent { .. })
                | TraceError::Locks(NotPermitted { .. } | Absent { .. })
                | TraceError::Accept(NotPermitted { .. } | Absent { .. })),
            ) => {
                skip(test, "bpf", &error.to_string());
                None
            }
            attached => Some(attached.map_err(|error| error.to_string()).unwrap()),
        }
    }
}
