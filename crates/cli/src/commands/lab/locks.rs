use std::num::NonZeroUsize;
use std::thread;

use clap::Args;
use fourtuple_bench::lab::locks::{self, Change};
use fourtuple_record::{LabLocksSettings, Saved};
use time::OffsetDateTime;

use crate::commands::lab::{Experiment, given, with_watch};
use crate::exit::Exit;
use crate::output::{self, Output, Random};
use crate::units;

/// Short-lived connections with less lock contention, before and after
///
/// Queries per second, CPU time and lock waits. Repeats the before and after of "TCP stack lock contention with short-lived connections" (freebsd-net, 2013) with the means
/// of Linux: a listener for each worker, several source addresses, a search of the full port range. The default takes about a
/// minute. Lock waits need root and BPF, and are counted in separate trials; without them only rate and CPU time are measured.
#[derive(Debug, Args)]
pub(super) struct LocksFlags {
    /// Changes to measure [default: all]
    ///
    /// In this order, of reuseport, sources and full-range.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = change)]
    change: Vec<String>,
    /// Threads that respond [default: half of the CPUs]
    ///
    /// 2 to 256, by default at least 2.
    #[arg(long, value_name = "N", value_parser = units::up_to::<256>, allow_hyphen_values = true)]
    workers: Option<u32>,
    /// Threads that connect [default: as many as CPUs]
    ///
    /// 2 to 256, by default at least 4.
    #[arg(long, value_name = "N", value_parser = units::up_to::<256>, allow_hyphen_values = true)]
    clients: Option<u32>,
    /// Queries of one trial, 100 to 30000
    ///
    /// Each connects, sends a byte, receives a byte and closes.
    #[arg(long, value_name = "N", default_value = "10000", value_parser = units::up_to::<30_000>, allow_hyphen_values = true)]
    queries: u32,
    /// Source addresses [default: as many as clients]
    ///
    /// 2 to 1024, of the trials that use several.
    #[arg(long, value_name = "N", value_parser = units::up_to::<1024>, allow_hyphen_values = true)]
    sources: Option<u32>,
    /// Pairs of trials, in turn A B B A
    ///
    /// From 8 on there is an interval.
    #[arg(long, value_name = "N", default_value = "8", value_parser = units::up_to::<100>, allow_hyphen_values = true)]
    repeats: u32,
    /// Do not count lock waits
    #[arg(long)]
    no_trace: bool,
    #[command(flatten)]
    random: Random,
    #[command(flatten)]
    output: Output,
}

fn change(text: &str) -> Result<String, String> {
    let found = Change::named(text).map(|change| change.name().to_owned());
    found.ok_or_else(|| {
        let names = Change::ALL.map(Change::name).join(", ");
        format!("{text:?} is not a change: expected {names}")
    })
}

impl Experiment for LocksFlags {
    fn comparable(&self) -> Result<bool, String> {
        let message =
            "lab locks compares by itself, before against after; '--change' says what, '--repeats' how often";
        Err(message.to_owned())
    }

    fn run(&self) -> anyhow::Result<Exit> {
        let settings = self.settings();
        locks::check(&settings)?;
        let started = OffsetDateTime::now_utc();
        let (result, host) = with_watch(&self.output, |watch, found| locks::run(&settings, found, watch))?;
        let (results, validity) = result;
        let record = output::record("lab locks", started, host, settings, validity, results);
        self.output.finish(&Saved::LabLocks(record))
    }
}

impl LocksFlags {
    fn settings(&self) -> LabLocksSettings {
        let cpus = thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let usual = locks::usual(u32::try_from(cpus).unwrap_or(u32::MAX));
        let clients = self.clients.unwrap_or(usual.clients);
        LabLocksSettings {
            changes: given(&self.change, usual.changes),
            workers: self.workers.unwrap_or(usual.workers),
            clients,
            queries: self.queries.into(),
            // At least two: `sources` compares several addresses with one.
            sources: self.sources.unwrap_or(clients.max(2)),
            repeats: self.repeats,
            traced: if self.no_trace { 0 } else { usual.traced },
            seed: self.random.seed,
            ..usual
        }
    }
}
