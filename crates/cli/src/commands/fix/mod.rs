mod accept;
mod ports;

use std::env;
use std::fmt;
use std::net::SocketAddr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple_fix::PrintRequest;
use fourtuple_fix::print::{PortRangeOption, Program, Snapshot};
use ipnet::IpNet;

use crate::exit::{Exit, UsageError};
use crate::output::{self, Output};
use crate::units;
pub(crate) use ports::source;

/// Fix connections of running programs from outside, without a restart
///
/// Everything is undone at the end. --print writes the setting of a program that can be changed instead, with this host's numbers, ready to paste.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, arg_required_else_help = true)]
pub(crate) struct Fix {
    #[command(flatten)]
    print: PrintFlags,
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

/// Flags of `fix --print`.
#[derive(Debug, Args)]
#[group(id = "printing")]
pub(super) struct PrintFlags {
    /// Print the setting of a program, such as nginx or go
    ///
    /// It repairs the connects of the program, has this host's numbers, and changes nothing.
    #[arg(long, value_name = "PROGRAM", value_parser = program())]
    print: Option<Program>,
    /// With --print: destination in the text
    #[arg(long, value_name = "ADDR:PORT", value_parser = units::socket_address, requires = "print")]
    to: Option<SocketAddr>,
    /// With --print: source addresses in the text
    ///
    /// This host's addresses within this prefix, at most 64.
    #[arg(long, value_name = "CIDR", value_parser = ports::source, requires = "print")]
    source: Option<IpNet>,
    /// With --print systemd: the service to keep fixed
    ///
    /// Without it, the text is a template unit.
    #[arg(long, value_name = "NAME", value_parser = unit, requires = "print")]
    unit: Option<String>,
}

fn program() -> impl TypedValueParser<Value = Program> {
    let values = Program::ALL.map(|program| PossibleValue::new(program.name).help(program.about));
    PossibleValuesParser::new(values)
        .try_map(|name| Program::named(&name).ok_or_else(|| format!("{name:?} is not a program")))
}

/// Parses the name of a unit: the characters of systemd.unit(5).
fn unit(text: &str) -> Result<String, String> {
    let is_valid = |character: char| {
        character.is_ascii_alphanumeric() || matches!(character, ':' | '-' | '_' | '.' | '@' | '\\')
    };
    if !text.is_empty() && text.chars().all(is_valid) {
        Ok(text.to_owned())
    } else {
        Err(format!("{text:?} is not the name of a unit: expected one such as nginx.service or nginx"))
    }
}

impl PrintFlags {
    pub(super) fn run(self) -> anyhow::Result<Exit> {
        // clap requires a subcommand or --print.
        let program = self.print.ok_or_else(|| UsageError("--print is missing".to_owned()))?;
        let refuse = |flag: &str| {
            Err(UsageError(format!("'--{flag}' has no effect with '--print {}'; remove it", program.name)))
        };
        if !program.has_addresses && self.to.is_some() {
            refuse("to")?;
        }
        if !program.has_addresses && self.source.is_some() {
            refuse("source")?;
        }
        if !program.has_unit && self.unit.is_some() {
            refuse("unit")?;
        }
        let request = PrintRequest {
            destination: self.to,
            prefix: self.source,
            unit: self.unit,
            program: env::current_exe()?.display().to_string(),
        };
        let option = match capabilities::probe()?.local_port_range {
            LocalPortRange::Absent => PortRangeOption::Absent,
            LocalPortRange::Linear => PortRangeOption::Linear,
            // Without a proof the text does not promise a short search.
            _ => PortRangeOption::Parity,
        };
        output::print(&program.text(&Snapshot::read(request, option)?))?;
        Ok(Exit::Fine)
    }
}
