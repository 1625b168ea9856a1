use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use fourtuple_bench::load::SYSCTLS;
use fourtuple_fleet::LoadRequest;
use fourtuple_fleet::coordinator::{Coordinator, FleetLoad, FleetProgress};
use fourtuple_fleet::protocol::{MAX_RUN, MAX_WORKERS};
use fourtuple_record::measure::words::counted;
use fourtuple_record::{Saved, Second, format_duration, format_time};
use indicatif::HumanCount;
use time::OffsetDateTime;

use crate::{ConnectFlags, SelectFlags};
use fourtuple_cli::exit::{Exit, UsageError};
use fourtuple_cli::line::Line;
use fourtuple_cli::output::{self, Output};
use fourtuple_cli::save::save;
use fourtuple_cli::{load_flags, stop, units};

/// Time beyond the end of a run after which a worker stops by itself.
const SLACK: Duration = Duration::from_secs(30);

/// Deadline of a run that is limited by operations only.
const UNLIMITED: Duration = Duration::from_secs(600);

/// Number of hosts that the progress shows.
const SHOWN: usize = 16;

/// Run one load on several hosts, with one merged result
///
/// The rate, operations, connections and seed are split. What follows -- is a command line of `load`. Every host makes its preflight first; one refusal refuses the run. A worker that is
/// lost is reported and not replaced (exit code 3). Ctrl-C stops all workers and keeps what was measured.
#[derive(Debug, Args)]
pub(crate) struct FleetLoadFlags {
    #[command(flatten)]
    connect: ConnectFlags,
    #[command(flatten)]
    select: SelectFlags,
    /// Number of workers, one per host
    #[arg(long, value_name = "N", value_parser = units::up_to::<MAX_WORKERS>, allow_hyphen_values = true)]
    workers: u32,
    /// Skew of a start in a valid run
    ///
    /// Maximum distance of a worker's start from the common start, with the error of its clock.
    #[arg(long, value_name = "TIME", default_value = "250ms", value_parser = units::duration, allow_hyphen_values = true)]
    max_skew: Duration,
    /// Time until workers stop by themselves
    ///
    /// From the start [default: --warm-up, --for and --timeout plus 30s; without --for 10m]
    #[arg(long, value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    deadline: Option<Duration>,
    /// The command: load TARGET ...
    #[arg(last = true, required = true, value_name = "load TARGET ...")]
    command: Vec<String>,
}

/// Fetch the results of a run
///
/// After the coordinator or NATS was gone, or while the run is in progress.
#[derive(Debug, Args)]
pub(crate) struct CollectFlags {
    #[command(flatten)]
    connect: ConnectFlags,
    /// Name of the run, as `fleet load` printed it
    run: String,
    /// Write histograms per second (HdrHistogram log)
    #[arg(long, value_name = "FILE")]
    hdr: Option<std::path::PathBuf>,
    #[command(flatten)]
    output: Output,
}

impl FleetLoadFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let refuse = |why: String| UsageError(format!("'{}': {why}", self.command.join(" ")));
        let flags = load_flags(&self.command).map_err(refuse)?;
        let load = flags.for_workers(self.workers)?;
        let Output { quiet, .. } = flags.output;
        if load.length.is_none() && load.operations.is_none() {
            return Err(refuse("expected --for or --operations".to_owned()).into());
        }
        let stop = stop::flag()?;
        let length = load.length.map(|length| load.warm_up + length + load.timeout + SLACK);
        let host = output::host(&SYSCTLS, &[]);
        let deadline = self.deadline.or(length).unwrap_or(UNLIMITED);
        if deadline > MAX_RUN {
            let (given, most) = (format_time(deadline), format_time(MAX_RUN));
            return Err(UsageError(format!(
                "a worker would stop {given} after the start: expected --warm-up, --for, --timeout and --deadline of at most {most} together"
            ))
            .into());
        }
        let fleet = FleetLoad {
            selection: self.select.selection(Some(self.workers)),
            request: LoadRequest::new(&load, flags.sources(), flags.anyway())
                .map_err(fourtuple_fleet::FleetError::from)?,
            most_skew: self.max_skew,
            deadline,
            started: output::rfc3339(OffsetDateTime::now_utc()),
            host,
            log: load.log,
        };
        let coordinator = Coordinator::connect(&self.connect.connection())?;
        let outcome = show(quiet, |progress| coordinator.load(&fleet, &stop, progress))?;
        flags.finish(outcome.record, outcome.log)
    }
}

impl CollectFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let stop: std::sync::Arc<AtomicBool> = stop::flag()?;
        let coordinator = Coordinator::connect(&self.connect.connection())?;
        let log = self.hdr.is_some();
        let outcome =
            show(self.output.quiet, |progress| coordinator.collect(&self.run, log, &stop, progress))?;
        let exit = self.output.finish(&Saved::Load(outcome.record))?;
        if let (Some(path), Some(log)) = (&self.hdr, outcome.log) {
            save(path, &log)?;
        }
        Ok(exit)
    }
}

/// Calls `run` with a progress callback that prints the name of the run once, and then shows a picture on a terminal.
fn show<T, E>(
    quiet: bool,
    run: impl FnOnce(&mut dyn FnMut(&FleetProgress<'_>)) -> Result<T, E>,
) -> Result<T, E> {
    let line = Line::new(quiet);
    let mut named = false;
    let result = run(&mut |progress| {
        if !std::mem::replace(&mut named, true) && !quiet {
            // The write fails if the reader is gone.
            output::say(&format!("fourtuple: run {0}; fourtuple fleet collect {0} fetches it", progress.run));
        }
        if line.is_visible() {
            line.set(&words(progress));
            line.set_picture(&hosts(progress));
        }
    });
    line.finish();
    result
}

fn words(progress: &FleetProgress<'_>) -> Vec<String> {
    let mut words = vec![format_time(progress.elapsed)];
    words.extend(progress.last.map(second));
    words.push(format!("{} done", HumanCount(progress.operations)));
    if progress.errors > 0 {
        words.push(format!("{} failed", HumanCount(progress.errors)));
    }
    if !progress.connected {
        words.push("NATS is unreachable; the workers continue".to_owned());
    }
    words
}

fn second(second: &Second) -> String {
    let time = format_duration;
    let left = second.ports_left.map_or(String::new(), |left| format!("  {} left", counted(left, "port")));
    let failed = match second.errors {
        0 => String::new(),
        errors => format!("  {} failed", HumanCount(errors)),
    };
    format!(
        "{}/s  p50 {} p99 {}{failed}{left}",
        HumanCount(second.operations),
        time(second.p50_ns),
        time(second.p99_ns)
    )
}

fn hosts(progress: &FleetProgress<'_>) -> String {
    let mut lines = String::new();
    for (name, last, lost) in progress.hosts.iter().take(SHOWN) {
        let state = match (lost, last) {
            (true, _) => "lost".to_owned(),
            (false, Some(last)) => second(last),
            (false, None) => "waiting for its first second".to_owned(),
        };
        lines.push_str(&format!("  {name:<20} {state}\n"));
    }
    if progress.hosts.len() > SHOWN {
        lines.push_str(&format!("  and {}\n", counted((progress.hosts.len() - SHOWN) as u64, "more host")));
    }
    lines
}
