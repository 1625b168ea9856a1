mod accept;
mod causes;
mod connect;
mod filter;
mod flame;
mod live;
mod locks;
mod runner;

use clap::{Args, Subcommand};

use crate::exit::Exit;

/// Trace where programs of this host spend time in the kernel, without changing the programs
#[derive(Debug, Args)]
pub(crate) struct Trace {
    #[command(subcommand)]
    target: Target,
}

#[derive(Debug, Subcommand)]
enum Target {
    Accept(accept::AcceptFlags),
    Connect(connect::ConnectFlags),
    Locks(locks::LocksFlags),
}

impl Trace {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        match self.target {
            Target::Accept(flags) => flags.run(),
            Target::Connect(flags) => flags.run(),
            Target::Locks(flags) => flags.run(),
        }
    }
}
