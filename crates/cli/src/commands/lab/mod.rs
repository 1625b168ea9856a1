//! `fourtuple lab`: the flags of the labs by subject, and all labs in short.

mod locks;
mod planes;
mod pool;
mod ports;

use std::time::Duration;

use clap::{Args, Subcommand};
use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple::listen::{self, AcceptPolicy};
use fourtuple::ports::PortRange;
use fourtuple_bench::lab::accept::{self, Load};
use fourtuple_bench::lab::pool::Named;
use fourtuple_bench::lab::{LabError, Namespace, Watch, time_wait};
use fourtuple_record::{
    AcceptResults, AcceptSettings, Host, LabResults, LabSettings, PortsSettings, Remark, Saved,
};
use time::OffsetDateTime;

use crate::exit::Exit;
use crate::line::Bars;
use crate::output::{self, Output, Random};
use crate::stop;

/// Measure what this kernel does, in network namespaces of its own
///
/// No lab changes the host or needs root: without root, lab makes a user namespace first. Without the name of a lab it runs
/// ports, time-wait and accept in a short form, says what this kernel does and what to set here, and writes report.html
/// (or --html FILE).
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Lab {
    #[command(subcommand)]
    name: Option<Name>,
    #[command(flatten)]
    random: Random,
    #[command(flatten)]
    output: Output,
}

/// Defines the subcommands from one row per lab: the variant, whose name is the lab's, and its flags.
macro_rules! labs {
    ($($name:ident($flags:ty),)*) => {
        #[derive(Debug, Subcommand)]
        enum Name {
            $($name($flags),)*
        }

        impl Name {
            fn experiment(&self) -> &dyn Experiment {
                match self {
                    $(Name::$name(flags) => flags,)*
                }
            }
        }
    };
}

labs! {
    Ports(ports::PortsFlags),
    TimeWait(ports::TimeWaitFlags),
    Accept(pool::AcceptFlags),
    Keepalive(pool::KeepaliveFlags),
    Locks(locks::LocksFlags),
    Planes(planes::PlanesFlags),
}

impl Lab {
    /// Returns whether the lab's records have times of connect(), if a run gives exactly one number for `compare`.
    ///
    /// # Errors
    /// A text for the user that names the flag to change.
    pub(crate) fn comparable(&self) -> Result<bool, String> {
        match &self.name {
            Some(name) => name.experiment().comparable(),
            None => Err("a bare lab gives many numbers; lab ports and lab time-wait are compared".to_owned()),
        }
    }

    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        match &self.name {
            Some(name) => name.experiment().run(),
            None => run_all(self.random.seed, self.output),
        }
    }
}

/// Returns the values on the command line, each once, or the usual ones.
pub(super) fn given<T: Clone + PartialEq>(values: &[T], usual: Vec<T>) -> Vec<T> {
    if values.is_empty() { usual } else { without_duplicates(values) }
}

/// Returns the names of values, as records have them.
pub(super) fn names_of<T: ToString>(values: &[T]) -> Vec<String> {
    values.iter().map(T::to_string).collect()
}

/// Returns the items in their order, each once.
pub(super) fn without_duplicates<T: Clone + PartialEq>(items: &[T]) -> Vec<T> {
    let mut unique = Vec::new();
    for item in items {
        if !unique.contains(item) {
            unique.push(item.clone());
        }
    }
    unique
}

/// The flags of one lab.
pub(super) trait Experiment {
    /// Returns whether the lab's records have times of connect(), if a run gives exactly one number for `compare`.
    ///
    /// # Errors
    /// A text for the user that names the flag to change.
    fn comparable(&self) -> Result<bool, String>;

    fn run(&self) -> anyhow::Result<Exit>;
}

/// Prepares the process, runs a lab with a progress bar until its end or Ctrl-C, and describes the host.
pub(super) fn with_watch<R>(
    output: &Output,
    lab: impl FnOnce(&Watch<'_>, LocalPortRange) -> Result<R, LabError>,
) -> anyhow::Result<(R, Host)> {
    // First, because a process with several threads cannot enter a user namespace.
    fourtuple_bench::lab::prepare_process()?;
    let stop = stop::flag()?;
    let bars = Bars::new(output.quiet);
    // The probe opens sockets, so it runs in a network namespace of its own.
    let found = Namespace::run(|_| Ok(capabilities::probe()))?.map_err(fourtuple::dial::BuildError::from)?;
    let result = lab(&Watch { stop: &stop, progress: &bars }, found.local_port_range)?;
    drop(bars);
    let host = output::host(
        &["net.ipv4.ip_local_port_range", "net.ipv4.tcp_tw_reuse", "net.core.somaxconn"],
        &[("ip_local_port_range", found.local_port_range.name())],
    );
    Ok((result, host))
}

/// Runs `ports`, `time-wait` and `accept` in a short form. `time-wait` shows the begin of the stall and does not wait for its
/// end, 60 s later.
fn run_all(seed: u64, mut output: Output) -> anyhow::Result<Exit> {
    let all_ports = PortRange::new(49152, 65535).expect("low is below high");
    let time_wait = ports::time_wait(all_ports, &[], Duration::from_millis(1500));
    let started = OffsetDateTime::now_utc();
    let (result, host) = with_watch(&output, |watch, found| {
        let ports = PortsSettings {
            low: PortRange::KERNEL_DEFAULT.low(),
            high: PortRange::KERNEL_DEFAULT.high(),
            strategies: names_of(&ports::all_strategies(found)),
            seed,
            ..PortsSettings::default()
        };
        let accept = short_accept();
        let settings =
            LabSettings { ports: ports.clone(), time_wait: time_wait.clone(), accept: Some(accept.clone()) };
        let (ports, mut remarks) = fourtuple_bench::lab::ports::run(&ports, watch)?;
        let (time_wait, more) = time_wait::run(&time_wait, watch)?;
        remarks.extend(more);
        let (accept, more) = run_accept(&accept, watch);
        remarks.extend(more);
        // One Ctrl-C ends all three labs, each of which remarks on it.
        remarks.dedup_by(|later, first| later.id == "interrupted" && first.id == later.id);
        Ok((settings, LabResults { ports, time_wait, accept }, remarks))
    })?;
    let (settings, results, validity) = result;
    let record = output::record("lab", started, host, settings, validity, results);
    output.html.get_or_insert_with(|| "report.html".into());
    output.finish(&Saved::Lab(record))
}

/// Returns settings that show the uneven distribution of EPOLLEXCLUSIVE and the even one of the rotating policy.
fn short_accept() -> AcceptSettings {
    AcceptSettings {
        clients: 1,
        families: vec![listen::Family::Unix.to_string()],
        policies: names_of(&[AcceptPolicy::Exclusive, AcceptPolicy::ROTATE]),
        load: vec![Load::Light.name().to_owned()],
        for_ns: 100_000_000,
        repeats: 1,
        ..fourtuple_bench::lab::pool::usual()
    }
}

/// Runs the last lab. An error becomes a remark, so that the results of the labs before it are kept.
fn run_accept(settings: &AcceptSettings, watch: &Watch<'_>) -> (Option<AcceptResults>, Vec<Remark>) {
    match accept::run(settings, Named { policies: true, families: true }, watch) {
        Ok((results, remarks)) => (Some(results), remarks),
        Err(LabError::Interrupted) => {
            (None, vec![Remark::new("interrupted", "interrupted before lab accept: it is missing")])
        }
        Err(error) => (None, vec![Remark::new("failed", format!("lab accept failed: {error}"))]),
    }
}
