//! `fourtuple lab`: one file per lab with its flags, and one for all labs in short.

mod accept;
mod all;
mod keepalive;
mod list;
mod locks;
mod planes;
mod pool_flags;
mod ports;
mod run;
mod time_wait;

use clap::{Args, Subcommand};

use crate::exit::Exit;
use crate::output::Output;

/// Measure what this kernel does, in network namespaces of its own; without a name: ports, time-wait and accept in short
///
/// No lab changes the host or needs root: without root, lab makes a user namespace first. Without the name of a lab it runs
/// ports, time-wait and accept in a short form, says what this kernel does and what to set here, and writes report.html
/// (or --html FILE).
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Lab {
    #[command(subcommand)]
    experiment: Option<Experiment>,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Subcommand)]
enum Experiment {
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
        let refuse = |why: &str| Err(why.to_owned());
        match &self.experiment {
            Some(Experiment::Ports(flags)) => flags.comparable().map(|()| true),
            Some(Experiment::TimeWait(flags)) => flags.comparable().map(|()| false),
            Some(Experiment::Accept(_) | Experiment::Keepalive(_)) => refuse(
                "lab accept and lab keepalive compare by themselves: give '--policy' several names, and '--repeats'",
            ),
            Some(Experiment::Locks(_)) => refuse(
                "lab locks compares by itself, before against after; '--change' says what, '--repeats' how often",
            ),
            Some(Experiment::Planes(_)) => refuse(
                "lab planes compares by itself: give '--plane', '--planes' or '--spread' several names, and '--repeats'",
            ),
            None => refuse("a bare lab gives many numbers; lab ports and lab time-wait are compared"),
        }
    }

    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        match self.experiment {
            Some(Experiment::Ports(flags)) => flags.run(),
            Some(Experiment::TimeWait(flags)) => flags.run(),
            Some(Experiment::Accept(flags)) => flags.run(),
            Some(Experiment::Keepalive(flags)) => flags.run(),
            Some(Experiment::Locks(flags)) => flags.run(),
            Some(Experiment::Planes(flags)) => flags.run(),
            None => all::run(self.output),
        }
    }
}
