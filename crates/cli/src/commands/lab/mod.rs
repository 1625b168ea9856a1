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

use crate::commands::lab::run::Experiment;
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
    name: Option<Name>,
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
            None => all::run(self.output),
        }
    }
}
