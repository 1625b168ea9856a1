use std::fs;
use std::panic;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_record::format_time;
use fourtuple_syscalls::{child, netns, procfs, schedule};

use crate::compare::CompareError;
use crate::compare::server::{POLL, ServerAddress, ServerCommand};

/// The servers of both sides, and how trials run beside them.
#[derive(Debug)]
pub struct Servers {
    /// The commands of A's and B's server.
    pub commands: [ServerCommand; 2],
    /// The addresses to which the loads of A and B connect.
    pub addresses: [ServerAddress; 2],
    /// Maximum time until a server listens.
    pub wait: Duration,
    /// The CPUs of client and server; `None` leaves placement to the kernel.
    pub cpus: Option<CpuSplit>,
}

impl Servers {
    /// Returns the testbed of side 0 (A) or 1 (B).
    pub(crate) fn testbed(&self, side: usize) -> Testbed<'_> {
        Testbed {
            server: &self.commands[side],
            address: &self.addresses[side],
            wait: self.wait,
            cpus: self.cpus.as_ref(),
        }
    }
}

/// The CPUs of the client and of the server: the first and the second half of the CPUs that this process may use.
#[derive(Debug)]
pub struct CpuSplit {
    client: Vec<usize>,
    server: Vec<usize>,
}

impl CpuSplit {
    /// Splits the CPUs of the calling thread (sched_getaffinity(2)).
    ///
    /// # Errors
    /// [`CompareError::Environment`] if the thread may use one CPU only; [`CompareError::Call`] if the kernel does not
    /// tell.
    pub fn of_this_process() -> Result<CpuSplit, CompareError> {
        let mut client = schedule::allowed_cpus()
            .map_err(CompareError::call("cannot read which CPUs this process may use"))?;
        if client.len() < 2 {
            let message = "'--pin' keeps client and server apart, and this process may use one CPU only";
            return Err(CompareError::Environment(message.to_owned()));
        }
        let server = client.split_off(client.len() / 2);
        Ok(CpuSplit { client, server })
    }
}

/// A network namespace with a server in it, made for one trial.
pub(crate) struct Testbed<'a> {
    server: &'a ServerCommand,
    address: &'a ServerAddress,
    wait: Duration,
    cpus: Option<&'a CpuSplit>,
}

/// The end of a trial in a testbed.
pub(crate) enum TestbedOutcome<R> {
    /// The trial ended, and its server still ran.
    Done(R),
    /// The server ended before the trial did; the text says how.
    ServerEnded(String),
    /// The stop flag was set before the trial began.
    Interrupted,
}

impl Testbed<'_> {
    /// Makes a network namespace, starts the server in it, waits until the server listens and runs the trial there. All
    /// processes of the namespace have ended on return, also after an error.
    pub(crate) fn run<R: Send>(
        &self,
        side: &str,
        stop: &AtomicBool,
        trial: impl FnOnce() -> Result<R, CompareError> + Send,
    ) -> Result<TestbedOutcome<R>, CompareError> {
        thread::scope(|scope| {
            let thread = thread::Builder::new()
                .spawn_scoped(scope, || {
                    netns::enter_new().map_err(CompareError::Namespace)?;
                    self.run_in_this_namespace(side, stop, trial)
                })
                .map_err(CompareError::call("start a thread"))?;
            thread.join().unwrap_or_else(|payload| panic::resume_unwind(payload))
        })
    }

    fn run_in_this_namespace<R>(
        &self,
        side: &str,
        stop: &AtomicBool,
        trial: impl FnOnce() -> Result<R, CompareError>,
    ) -> Result<TestbedOutcome<R>, CompareError> {
        // Declared first, so that it is dropped after the server has ended.
        let _cleanup = NamespaceCleanup;
        // A child process inherits the CPUs and the namespace of the thread that starts it.
        self.pin(|cpus| &cpus.server)?;
        let mut server = self.server.start()?;
        self.pin(|cpus| &cpus.client)?;
        let begun = Instant::now();
        while !self.address.has_listener()? {
            let address = self.address.to_string();
            let command = &self.server.text;
            if stop.load(Ordering::Relaxed) {
                return Ok(TestbedOutcome::Interrupted);
            }
            if let Some(status) = server.exit_status()? {
                let said = server.last_words();
                return Err(CompareError::Environment(format!(
                    "the server of {side}, '{command}', ended ({status}) before it listened on {address}{said}"
                )));
            }
            if begun.elapsed() >= self.wait {
                let wait = format_time(self.wait);
                let said = server.last_words();
                return Err(CompareError::Environment(format!(
                    "the server of {side}, '{command}', does not listen on {address} after {wait} (--server-wait){said}"
                )));
            }
            thread::sleep(POLL);
        }
        let result = trial()?;
        Ok(match server.exit_status()? {
            Some(status) if !stop.load(Ordering::Relaxed) => TestbedOutcome::ServerEnded(format!(
                "its server ended ({status}) before the load did{}",
                server.last_words()
            )),
            _ => TestbedOutcome::Done(result),
        })
    }

    fn pin(&self, half: impl Fn(&CpuSplit) -> &Vec<usize>) -> Result<(), CompareError> {
        let Some(cpus) = self.cpus else { return Ok(()) };
        schedule::pin_among(half(cpus)).map_err(CompareError::call("cannot keep to some CPUs (--pin)"))
    }
}

/// Kills every other process in the calling thread's network namespace when dropped: children of the server that the
/// server did not end.
struct NamespaceCleanup;

impl Drop for NamespaceCleanup {
    fn drop(&mut self) {
        const MAX_WAIT: Duration = Duration::from_secs(1);
        let Ok(own) = fs::read_link("/proc/thread-self/ns/net") else { return };
        let begun = Instant::now();
        // Repeated: a process may fork between the listing of /proc and its SIGKILL.
        while begun.elapsed() < MAX_WAIT {
            let is_inside = |id: &u32| {
                *id != process::id()
                    && fs::read_link(format!("/proc/{id}/ns/net")).is_ok_and(|found| found == own)
            };
            let inside: Vec<u32> = procfs::processes("/").filter(is_inside).collect();
            if inside.is_empty() {
                return;
            }
            for id in inside {
                let _ = child::kill(id);
            }
            thread::sleep(POLL);
        }
    }
}
