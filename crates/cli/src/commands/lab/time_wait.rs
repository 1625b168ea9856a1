use std::time::Duration;

use clap::Args;
use fourtuple::ports::PortRange;
use fourtuple_bench::compare::needs_one_name;
use fourtuple_bench::lab::time_wait::{Remedy, TimeWait};
use fourtuple_record::Saved;
use time::OffsetDateTime;

use crate::commands::lab::{Experiment, with_watch};
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::units;

/// When a client that closes runs out of ports, and what helps
///
/// Repeats the stall of "Benchmarkers, Beware the Ephemeral Port Limit" (Useful Platitudes) on this kernel.
#[derive(Debug, Args)]
pub(super) struct TimeWaitFlags {
    /// Ephemeral range
    ///
    /// Of the lab's namespace, 64 to 32768 ports from 1024 on.
    #[arg(long, value_name = "LOW-HIGH", default_value = "49152-65535", allow_hyphen_values = true)]
    range: PortRange,
    /// Remedies to try [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', long_help = format!("Remedies to try: {} [default: all]", Remedy::names()))]
    remedy: Vec<Remedy>,
    /// Limit of the wait for a stall's end
    ///
    /// TIME_WAIT lasts 60 s.
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = units::duration, allow_hyphen_values = true)]
    patience: Duration,
    #[command(flatten)]
    output: Output,
}

impl Experiment for TimeWaitFlags {
    fn comparable(&self) -> Result<bool, String> {
        if self.remedy.len() == 1 { Ok(false) } else { Err(needs_one_name("lab time-wait", "--remedy")) }
    }

    fn run(&self) -> anyhow::Result<Exit> {
        let settings = TimeWait {
            range: self.range,
            remedies: if self.remedy.is_empty() { Remedy::ALL.to_vec() } else { self.remedy.clone() },
            patience: self.patience,
        };
        settings.check()?;
        let started = OffsetDateTime::now_utc();
        let (result, host) = with_watch(&self.output, |watch, _| settings.run(watch))?;
        let (results, validity) = result;
        let record = output::record("lab time-wait", started, host, settings.settings(), validity, results);
        self.output.finish(&Saved::TimeWait(record))
    }
}
