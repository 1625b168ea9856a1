mod accept;
mod connect;
mod filter;
mod flame;
mod line;
mod live;
mod locks;

use clap::{Args, Subcommand};

use crate::exit::Exit;

/// Where the programs of this host spend their time in the kernel, without a change to them
#[derive(Debug, Args)]
pub(crate) struct Trace {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Accept(accept::AcceptFlags),
    Connect(connect::ConnectFlags),
    Locks(locks::LocksFlags),
}

impl Trace {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        match self.what {
            What::Accept(flags) => flags.run(),
            What::Connect(flags) => flags.run(),
            What::Locks(flags) => flags.run(),
        }
    }
}
