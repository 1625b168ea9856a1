//! What the benchmarks share: ports in use, the longest interval for which work keeps the thread of a current-thread runtime from its other
//! tasks, and figures as text.
#![allow(dead_code, reason = "each benchmark uses a part")]

use std::error::Error;
use std::fs;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::parking::Parking;
use fourtuple_syscalls::resource;
use fourtuple_syscalls::socket::{self, Transport};
use tokio::task;

/// Holds ports towards the listener without a descriptor for each socket. Option 51 with one port chooses the port as an unmodified connect()
/// does: a bind by number would change the cost of the kernel's search.
pub(crate) fn hold(
    ports: impl Iterator<Item = u16>,
    listener: &TcpListener,
) -> Result<Parking, Box<dyn Error>> {
    let address = listener.local_addr()?;
    let mut held = Parking::new()?;
    for port in ports {
        let socket = socket::open(Transport::Tcp, address, false)?;
        if option::set_local_port_range(socket.as_fd(), port, port)? == Answer::Absent {
            return Err("this kernel has no IP_LOCAL_PORT_RANGE".into());
        }
        socket::connect(socket.as_fd(), address)?;
        for socket in [socket, OwnedFd::from(listener.accept()?.0)] {
            if held.park(socket) {
                held.settle()?;
            }
        }
    }
    Ok(held)
}

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

/// Measures the longest stall while `work` runs beside a task that yields in a loop.
pub(crate) async fn stall(
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

/// Returns the median and the quartiles of some samples.
pub(crate) fn quartiles(samples: &[f64]) -> String {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let [low, median, high] = [1, 2, 3].map(|quarter| sorted[(sorted.len() - 1) * quarter / 4]);
    format!("median {median:.3}, quartiles {low:.3} and {high:.3}")
}

/// Returns the load average of the machine.
pub(crate) fn load() -> String {
    fs::read_to_string("/proc/loadavg").map_or_else(|error| error.to_string(), |text| text.trim().to_owned())
}
