//! `lab time-wait`: measures when a client that closes its connections runs out of ports, for how long, and which remedy
//! helps.
//!
//! Published: "Benchmarkers, Beware the Ephemeral Port Limit" (Daniel Mendel): 16,300 transactions took 12.03 s, 16,384 took
//! 21.73 s, because the range had 16,383 ports.

mod advice;
mod client;
mod remedy;

use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use fourtuple::ports::PortRange;
use fourtuple_record::{Remark, TimeWaitResults, TimeWaitRun, TimeWaitSettings};

use crate::namespace::Namespace;
use crate::{LabError, Watch, start};

pub use advice::advice;
pub use remedy::Remedy;

/// The time that Linux keeps a socket in TIME_WAIT (TCP_TIMEWAIT_LEN in include/net/tcp.h): a constant, which
/// tcp_fin_timeout does not change.
pub const TIME_WAIT: Duration = Duration::from_secs(60);

/// The settings of the experiment.
#[derive(Clone, Debug)]
pub struct TimeWait {
    /// The namespace's ephemeral range.
    pub range: PortRange,
    /// Remedies to try, in this order.
    pub remedies: Vec<Remedy>,
    /// Maximum time to wait in a stall.
    pub patience: Duration,
}

impl TimeWait {
    /// Checks the settings, without system calls.
    pub fn check(&self) -> Result<(), LabError> {
        if self.range.low() < 1024 || self.range.len() < 64 || self.range.len() > 32_768 {
            return Err(LabError::setting(
                "range",
                self.range,
                "accepted are ranges of 64 to 32768 ports from port 1024 on, so that a wider range is left to try",
            ));
        }
        Ok(())
    }

    /// Returns the settings as a record keeps them.
    pub fn settings(&self) -> TimeWaitSettings {
        TimeWaitSettings {
            low: self.range.low(),
            high: self.range.high(),
            remedies: self.remedies.iter().map(|remedy| remedy.name().to_owned()).collect(),
            patience_ns: self.patience.as_nanos() as u64,
        }
    }

    fn ports(&self) -> u64 {
        u64::from(self.range.len())
    }

    /// Returns the range of a run: with a wider range, all ports that need no privilege to bind.
    fn range(&self, remedy: Remedy) -> PortRange {
        if remedy.widens_range { PortRange::new(1024, u16::MAX).expect("not backwards") } else { self.range }
    }

    /// Returns the number of transactions: a few more than the ports, so that the run goes on after the stall.
    fn transactions(&self, remedy: Remedy) -> u64 {
        if remedy.exceeds_ports { self.ports() + self.ports() / 16 } else { self.ports() - 1 }
    }

    /// Returns the number of 4-tuples available before a port must leave TIME_WAIT.
    fn tuples(&self, remedy: Remedy) -> u64 {
        u64::from(self.range(remedy).len()) * u64::from(remedy.sources)
    }

    /// Returns the number of the first transaction that will find no free port, if any.
    fn predicted_stall_at(&self, remedy: Remedy) -> Option<u64> {
        let first = self.tuples(remedy) * remedy.per_connection + 1;
        (!remedy.server_closes_first && first <= self.transactions(remedy)).then_some(first)
    }

    /// Runs the remedies in order. A run that stalls keeps waiting while the next remedies run.
    pub fn run(&self, watch: &Watch<'_>) -> Result<(TimeWaitResults, Vec<Remark>), LabError> {
        self.check()?;
        // Only one run works at a time, so that runs do not compete for the CPU; a run that waits for ports releases the lock.
        let turn = Mutex::new(());
        let (first_sender, first) = std::sync::mpsc::channel();
        let ended: Vec<Result<TimeWaitRun, LabError>> = thread::scope(|scope| {
            let mut handles = Vec::new();
            for remedy in self.remedies.iter().take_while(|_| !watch.stopped()) {
                watch.progress.begin(remedy.name(), self.transactions(*remedy));
                let begun = first_sender.clone();
                let turn = &turn;
                let started = start::thread(scope, move || {
                    let run = Namespace::run(|namespace| {
                        client::run(self, *remedy, namespace, watch, turn, &begun)
                    });
                    // Sent after a failure too: the next run waits for this message.
                    let _ = begun.send(());
                    run
                });
                // The next run begins when this run has ended or waits for ports.
                if started.is_ok() {
                    let _ = first.recv();
                }
                handles.push(started);
            }
            handles
                .into_iter()
                .map(|started| started?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect()
        });
        let mut remarks = Vec::new();
        let mut runs = Vec::new();
        let mut failed = None;
        for (remedy, run) in self.remedies.iter().zip(ended) {
            match run {
                Ok(run) if run.completed > 0 => runs.push(run),
                Ok(_) => {}
                Err(error) => {
                    remarks.push(Remark::new("failed", format!("{} failed: {error}", remedy.name())));
                    failed.get_or_insert(error);
                }
            }
        }
        // Completed runs are kept; without any completed run the first error is returned.
        if let (Some(error), true) = (failed, runs.is_empty()) {
            return Err(error);
        }
        if watch.stopped() {
            remarks.push(Remark::new("interrupted", "interrupted: runs are cut short or missing"));
        }
        let mut results = TimeWaitResults {
            ports: self.ports(),
            time_wait_ns: TIME_WAIT.as_nanos() as u64,
            ceiling_per_s: self.ports() as f64 / TIME_WAIT.as_secs_f64(),
            runs,
            advice: Vec::new(),
        };
        results.advice = advice(&results);
        Ok((results, remarks))
    }
}
