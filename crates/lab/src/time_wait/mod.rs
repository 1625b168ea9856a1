//! `lab time-wait`: when does a client that closes its connections run out of ports, for how long, and what helps?
//!
//! Published: seed 002 ("Benchmarkers, Beware the Ephemeral Port Limit"): 16,300 transactions took 12.03 s, 16,384 took
//! 21.73 s, because the range had 16,383 ports.

mod advice;
mod client;

use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use fourtuple::ports::PortRange;
use fourtuple_record::{Remark, TimeWaitResults, TimeWaitRun, TimeWaitSettings};

use crate::namespace::Namespace;
use crate::{LabError, Watch};

pub use advice::advice;

/// How long Linux keeps a socket in TIME_WAIT (TCP_TIMEWAIT_LEN in include/net/tcp.h): a constant, whatever
/// tcp_fin_timeout says.
pub const TIME_WAIT: Duration = Duration::from_secs(60);

/// What is changed against a client that opens and closes from one source as fast as it can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Nothing; one transaction fewer than there are ports.
    NoneUnder,
    /// Nothing; some transactions more than there are ports.
    NoneOver,
    /// Four source addresses.
    MoreSources,
    /// net.ipv4.ip_local_port_range = 1024 65535.
    WiderRange,
    /// net.ipv4.tcp_tw_reuse = 1, which needs TCP timestamps on both sides.
    TcpTwReuse,
    /// The server closes first, so that TIME_WAIT stays there.
    ServerClosesFirst,
    /// A hundred transactions per connection.
    KeepAlive,
}

impl Remedy {
    /// All of them, the ailment first.
    pub const ALL: [Remedy; 7] = [
        Remedy::NoneUnder,
        Remedy::NoneOver,
        Remedy::MoreSources,
        Remedy::WiderRange,
        Remedy::TcpTwReuse,
        Remedy::ServerClosesFirst,
        Remedy::KeepAlive,
    ];

    /// The name it has in records.
    pub fn name(self) -> &'static str {
        match self {
            Remedy::NoneUnder => "none-under",
            Remedy::NoneOver => "none-over",
            Remedy::MoreSources => "more-sources",
            Remedy::WiderRange => "wider-range",
            Remedy::TcpTwReuse => "tcp-tw-reuse",
            Remedy::ServerClosesFirst => "server-closes-first",
            Remedy::KeepAlive => "keep-alive",
        }
    }

    /// The remedy of a name.
    pub fn named(name: &str) -> Option<Remedy> {
        Remedy::ALL.into_iter().find(|remedy| remedy.name() == name)
    }

    fn sources(self) -> u32 {
        if self == Remedy::MoreSources { 4 } else { 1 }
    }

    fn per_connection(self) -> u64 {
        if self == Remedy::KeepAlive { 100 } else { 1 }
    }
}

/// The settings of the experiment.
#[derive(Clone, Debug)]
pub struct TimeWait {
    /// The namespace's ephemeral range.
    pub range: PortRange,
    /// What to try, in this order.
    pub remedies: Vec<Remedy>,
    /// Longest time to sit out a stall.
    pub patience: Duration,
}

impl TimeWait {
    /// Checks what can be checked without a kernel.
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

    /// The settings as a record keeps them.
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

    /// Beyond the ports by a few, so that the run has an end after the stall.
    fn transactions(&self, remedy: Remedy) -> u64 {
        match remedy {
            Remedy::NoneUnder => self.ports() - 1,
            _ => self.ports() + self.ports() / 16,
        }
    }

    /// Ports that can be used up before one has to come back.
    fn tuples(&self, remedy: Remedy) -> u64 {
        match remedy {
            Remedy::WiderRange => u64::from(wide().len()),
            _ => self.ports() * u64::from(remedy.sources()),
        }
    }

    /// The transaction that finds no port, if any will.
    fn predicted_stall_at(&self, remedy: Remedy) -> Option<u64> {
        let first = self.tuples(remedy) * remedy.per_connection() + 1;
        (remedy != Remedy::ServerClosesFirst && first <= self.transactions(remedy)).then_some(first)
    }

    /// Runs one remedy after the other; a run that stalls goes on waiting while the next ones work.
    pub fn run(&self, watch: &Watch<'_>) -> Result<(TimeWaitResults, Vec<Remark>), LabError> {
        self.check()?;
        // One run works at a time, lest they take the processor from each other; who waits for ports gives way.
        let turn = Mutex::new(());
        let (first_sender, first) = std::sync::mpsc::channel();
        let ended: Vec<Result<TimeWaitRun, LabError>> = thread::scope(|scope| {
            let mut handles = Vec::new();
            for remedy in self.remedies.iter().take_while(|_| !watch.stopped()) {
                watch.progress.begin(remedy.name(), self.transactions(*remedy));
                let begun = first_sender.clone();
                let turn = &turn;
                handles.push(scope.spawn(move || {
                    let run = Namespace::run(|namespace| {
                        client::run(self, *remedy, namespace, watch, turn, &begun)
                    });
                    // Also when it failed: the next one must not wait for ever.
                    let _ = begun.send(());
                    run
                }));
                // The next begins when this one is done, or waits for ports.
                let _ = first.recv();
            }
            handles
                .into_iter()
                .map(|handle| handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
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
        // What was measured is worth keeping; where nothing was, the failure is the answer.
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

/// The range of [`Remedy::WiderRange`]: all that need no privilege to bind.
fn wide() -> PortRange {
    PortRange::new(1024, u16::MAX).expect("not backwards")
}
