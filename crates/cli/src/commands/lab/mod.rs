//! `fourtuple lab`: one file per lab with its flags, and one for all labs in short.

mod accept;
mod all;
mod keepalive;
mod locks;
mod planes;
mod ports;
mod time_wait;

use clap::{Args, Subcommand};
use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple_bench::lab::{LabError, Namespace, Watch};
use fourtuple_record::Host;

use crate::exit::Exit;
use crate::output::{self, Output, Random};
use crate::progress::Bars;
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
    TimeWait(time_wait::TimeWaitFlags),
    Accept(accept::AcceptFlags),
    Keepalive(keepalive::KeepaliveFlags),
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
            None => all::run(self.random.seed, self.output),
        }
    }
}

/// Returns the items in their order, each once.
pub(super) fn without_duplicates<T: Copy + PartialEq>(items: &[T]) -> Vec<T> {
    let mut unique = Vec::new();
    for item in items {
        if !unique.contains(item) {
            unique.push(*item);
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
