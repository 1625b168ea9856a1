mod accept;
mod ports;

use clap::{Args, Subcommand};

use crate::exit::Exit;

/// Fix the connections of running programs from outside, without a restart; everything is undone at the end
#[derive(Debug, Args)]
pub(crate) struct Fix {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Accept(Box<accept::AcceptFlags>),
    Ports(Box<ports::PortsFlags>),
}

impl Fix {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        match self.what {
            What::Accept(flags) => flags.run(),
            What::Ports(flags) => flags.run(),
        }
    }
}
