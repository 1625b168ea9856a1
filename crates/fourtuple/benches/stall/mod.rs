//! The longest interval for which work keeps the thread of a current-thread runtime from its other tasks.

use std::error::Error;
use std::time::{Duration, Instant};

use fourtuple_syscalls::resource;
use tokio::task;

/// The longest intervals between two polls of a task.
#[derive(Clone, Copy, Default)]
pub(crate) struct Stall {
    /// By the clock.
    pub(crate) clock: Duration,
    /// CPU time of the thread: work on the runtime's thread.
    pub(crate) cpu: Duration,
    /// By the clock, only intervals with a voluntary context switch, as in a lock, a page fault or a blocking system call.
    pub(crate) asleep: Duration,
    /// Voluntary context switches.
    pub(crate) switches: u64,
}

/// Counters of the runtime's thread.
struct Counters {
    clock: Instant,
    cpu: Duration,
    switches: u64,
}

impl Counters {
    fn read() -> Counters {
        Counters {
            clock: Instant::now(),
            cpu: resource::thread_cpu_time(),
            switches: resource::voluntary_switches(),
        }
    }
}

/// Runs `work` beside a task that yields in a loop.
pub(crate) async fn measure(
    work: impl Future<Output = Result<(), Box<dyn Error>>>,
) -> Result<Stall, Box<dyn Error>> {
    let mut longest = Stall::default();
    let watch = async {
        let mut last = Counters::read();
        loop {
            task::yield_now().await;
            let now = Counters::read();
            let clock = now.clock - last.clock;
            longest.clock = longest.clock.max(clock);
            longest.cpu = longest.cpu.max(now.cpu.saturating_sub(last.cpu));
            if now.switches > last.switches {
                longest.asleep = longest.asleep.max(clock);
                longest.switches += now.switches - last.switches;
            }
            last = now;
        }
    };
    // The second task is polled once more after the last call.
    let work = async {
        let done = work.await;
        task::yield_now().await;
        done
    };
    tokio::select! {
        biased;
        () = watch => {}
        done = work => done?,
    }
    Ok(longest)
}
