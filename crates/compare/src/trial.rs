use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use fourtuple_record::{Host, Saved};
use fourtuple_syscalls::child;

use crate::error::CompareError;
use crate::metric::{self, Metric, NoNumber};
use crate::side::Side;
use crate::testbed::{Testbed, TestbedOutcome};

/// Maximum time from Ctrl-C until the trial gets SIGINT.
const STOP_POLL: Duration = Duration::from_millis(20);

/// The outcome of one trial.
pub(crate) enum TrialOutcome {
    /// The trial was valid.
    Measured {
        /// The metric.
        value: f64,
        /// The host, as the trial's record describes it.
        host: Box<Host>,
        /// The client of the load was busy all the time.
        saturated: bool,
    },
    /// The trial ran and was not valid, for this reason; the next trial may be.
    Dropped(String),
    /// The preflight refused the load, for this reason, and would refuse every further trial.
    Refused(String),
    /// The stop flag was set.
    Interrupted,
}

impl Side {
    /// Runs one trial in a child process; with a testbed, beside a server in a network namespace of its own.
    pub(crate) fn run(
        &self,
        metric: Metric,
        testbed: Option<&Testbed<'_>>,
        stop: &AtomicBool,
    ) -> Result<TrialOutcome, CompareError> {
        if stop.load(Ordering::Relaxed) {
            return Ok(TrialOutcome::Interrupted);
        }
        let output = match testbed {
            None => self.output(stop)?,
            Some(testbed) => match testbed.run(self.name, stop, || self.output(stop))? {
                TestbedOutcome::Done(output) => output,
                TestbedOutcome::ServerEnded(why) => return Ok(TrialOutcome::Dropped(why)),
                TestbedOutcome::Interrupted => return Ok(TrialOutcome::Interrupted),
            },
        };
        if stop.load(Ordering::Relaxed) {
            return Ok(TrialOutcome::Interrupted);
        }
        self.judge(output, metric)
    }

    /// Reads the exit code, then the record.
    fn judge(&self, output: Output, metric: Metric) -> Result<TrialOutcome, CompareError> {
        let name = self.name;
        let line = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
        let line = line.strip_prefix("fourtuple: ").unwrap_or(&line).to_owned();
        let environment = |message: String| Err(CompareError::Environment(message));
        match output.status.code() {
            Some(0) => {}
            // Only the preflight of load ends with code 3 and no record; it would refuse the next trial too.
            Some(3) if output.stdout.is_empty() && self.load().is_some() => {
                return Ok(TrialOutcome::Refused(line));
            }
            // The record says below why the trial is not valid.
            Some(3) if !output.stdout.is_empty() => {}
            Some(2) => return Err(CompareError::Usage(line)),
            Some(3) => return Ok(TrialOutcome::Dropped(line)),
            Some(4) => return environment(line),
            Some(code) => return environment(format!("a trial of {name} ended with code {code}: {line}")),
            None => {
                let signal = output.status.signal().unwrap_or(0);
                return environment(format!("a trial of {name} was ended by signal {signal}"));
            }
        }
        let saved = String::from_utf8(output.stdout)
            .map_err(|error| error.to_string())
            .and_then(|text| Saved::parse(&text).map_err(|error| error.to_string()));
        let saved = match saved {
            Ok(saved) => saved,
            Err(why) => return environment(format!("the record of {name}: {why}")),
        };
        let (host, remarks) = (saved.common().host, saved.common().validity);
        let saturated = match metric::check_validity(remarks) {
            Ok(saturated) => saturated,
            Err(why) => return Ok(TrialOutcome::Dropped(why)),
        };
        match metric::numbers(&saved, metric).as_deref() {
            Ok(&[value]) => Ok(TrialOutcome::Measured { value, host: Box::new(host.clone()), saturated }),
            Ok(numbers) => environment(format!("{} numbers in the record of {name}", numbers.len())),
            Err(NoNumber::Usage(why)) => Err(CompareError::Usage(format!("{name}: {why}"))),
            Err(NoNumber::ThisRun(why)) => Ok(TrialOutcome::Dropped(why.clone())),
        }
    }

    /// Runs the command to its end; sends it SIGINT once the stop flag is set.
    fn output(&self, stop: &AtomicBool) -> Result<Output, CompareError> {
        let mut command = Command::new(&self.program);
        // The kernel kills the trial when compare is killed (prctl(PR_SET_PDEATHSIG)).
        child::end_with_this_thread(&mut command);
        let child = command
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(CompareError::call(format!("cannot start {}", self.program.display())))?;
        let id = child.id();
        let (sender, receiver) = mpsc::channel();
        let waiter = thread::Builder::new()
            .spawn(move || sender.send(child.wait_with_output()))
            .map_err(CompareError::call("cannot start a thread to wait for a trial"))?;
        let mut interrupted = false;
        let output = loop {
            match receiver.recv_timeout(STOP_POLL) {
                Ok(output) => break output,
                Err(RecvTimeoutError::Disconnected) => {
                    let message = format!("the thread that waits for a trial of {} has ended", self.name);
                    return Err(CompareError::Environment(message));
                }
                Err(RecvTimeoutError::Timeout) if !interrupted && stop.load(Ordering::Relaxed) => {
                    interrupted = true;
                    // ESRCH: the trial has ended by itself. A terminal has sent SIGINT to the trial already, and a
                    // second one ends it at once: the numbers of an interrupted trial are not used.
                    let _ = child::interrupt(id);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        let _ = waiter.join();
        output.map_err(CompareError::call(format!("cannot wait for a trial of {}", self.name)))
    }
}
