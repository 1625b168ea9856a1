mod accept;
mod ports;
mod print;

use std::fmt;

use clap::{Args, Subcommand};

use crate::exit::Exit;
use crate::output::{self, Output};
pub(crate) use ports::source;

/// Fix connections of running programs from outside, without a restart
///
/// Everything is undone at the end. --print writes the setting of a program that can be changed instead, with this host's numbers, ready to paste.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub(crate) struct Fix {
    #[command(flatten)]
    print: print::PrintFlags,
    #[command(subcommand)]
    what: Option<What>,
}

#[derive(Debug, Subcommand)]
enum What {
    Accept(Box<accept::AcceptFlags>),
    Ports(Box<ports::PortsFlags>),
}

impl Fix {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        match self.what {
            Some(What::Accept(flags)) => flags.run(),
            Some(What::Ports(flags)) => flags.run(),
            None => self.print.run(),
        }
    }
}

/// Says on stderr that a fix is attached, also where stderr is not a terminal, because scripts wait for this line.
pub(super) fn announce(output: &Output, is_dry_run: bool, what: fmt::Arguments<'_>) {
    if !output.quiet {
        let verb = if is_dry_run { "observing" } else { "fixing" };
        // Without stderr the fix works all the same.
        output::say(&format!("{verb} {what}"));
    }
}
