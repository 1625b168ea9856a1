//! `fourtuple fleet` and `fourtuple agent`: the command replaces itself by this program.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod agent;
mod connect;
mod load;
#[cfg(feature = "manual")]
mod manual;
mod overview;
mod up;

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use fourtuple_cli::exit::{self, Exit};
use fourtuple_cli::{help, output, refuse};
use fourtuple_fleet::FleetError;

/// Run one load on many hosts as one result
#[derive(Debug, Parser)]
#[command(
    name = "fourtuple",
    bin_name = "fourtuple",
    version,
    propagate_version = true,
    disable_help_subcommand = true
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Fleet(Fleet),
    Agent(agent::AgentFlags),
}

/// Run one load on many hosts as one result, and compare the hosts
///
/// Every host runs `fourtuple agent`.
#[derive(Debug, Args)]
struct Fleet {
    #[command(subcommand)]
    command: FleetCommand,
}

#[derive(Debug, Subcommand)]
enum FleetCommand {
    Up(up::UpFlags),
    Load(load::FleetLoadFlags),
    Collect(load::CollectFlags),
    Agents(overview::AgentsFlags),
    Doctor(overview::DoctorFlags),
    #[command(subcommand)]
    Lab(overview::Lab),
    #[command(subcommand)]
    Trace(overview::Trace),
    Plan(overview::PlanFlags),
    Serve(overview::FleetServeFlags),
}

fn main() -> ExitCode {
    fourtuple_syscalls::resolver::restrict_static_lookups();
    #[cfg(feature = "manual")]
    if let Some(directory) = manual::requested() {
        let own = definitions();
        let all = own.get_subcommands().fold(fourtuple_cli::command(), |all, command| {
            all.mut_subcommand(command.get_name(), |_| command.clone())
        });
        return manual::run(all, &directory);
    }
    let arguments = match parse(env::args_os()) {
        Ok(arguments) => arguments,
        Err(error) => return refuse(&error),
    };
    match arguments.command.run() {
        Ok(exit) => exit.into(),
        Err(error) => {
            // An error while writing to stderr cannot be reported.
            output::say(&format!("fourtuple: {}", exit::message(&error)));
            exit_of(&error).into()
        }
    }
}

/// Returns the commands with all that their help shares with that of `fourtuple`.
fn definitions() -> clap::Command {
    help::dress(Arguments::command())
}

fn parse(line: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Arguments, clap::Error> {
    let mut command = definitions();
    let mut matches = command.try_get_matches_from_mut(line)?;
    Arguments::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// Returns the path of `fourtuple`, which performs doctor, lab, trace, plan and serve: the program that this process was, or else the one
/// beside this program.
fn fourtuple() -> anyhow::Result<PathBuf> {
    if let Some(program) = env::var_os("FOURTUPLE_PROGRAM") {
        return Ok(program.into());
    }
    let own = env::current_exe().context("cannot find this program")?;
    let program = own.with_file_name("fourtuple");
    anyhow::ensure!(program.is_file(), "there is no program fourtuple beside {}", own.display());
    Ok(program)
}

fn exit_of(error: &anyhow::Error) -> Exit {
    let is =
        |test: fn(&FleetError) -> bool| error.chain().any(|cause| cause.downcast_ref().is_some_and(test));
    if is(FleetError::is_usage) {
        Exit::Usage
    } else if is(FleetError::is_not_valid) {
        Exit::NotValid
    } else {
        exit::of(error)
    }
}

impl Command {
    fn run(self) -> anyhow::Result<Exit> {
        match self {
            Command::Agent(flags) => flags.run(),
            Command::Fleet(Fleet { command }) => match command {
                FleetCommand::Up(flags) => flags.run(),
                FleetCommand::Load(flags) => flags.run(),
                FleetCommand::Collect(flags) => flags.run(),
                FleetCommand::Agents(flags) => flags.run(),
                FleetCommand::Doctor(flags) => flags.run(),
                FleetCommand::Lab(lab) => lab.run(),
                FleetCommand::Trace(trace) => trace.run(),
                FleetCommand::Plan(flags) => flags.run(),
                FleetCommand::Serve(flags) => flags.run(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn each(command: &clap::Command, path: &str, visit: &mut impl FnMut(&clap::Command, &str)) {
        for below in command.get_subcommands() {
            let path = format!("{path} {}", below.get_name());
            visit(below, path.trim());
            each(below, &path, visit);
        }
    }

    #[test]
    fn every_command_has_two_examples_that_parse() {
        each(&definitions(), "", &mut |command, path| {
            let line = ["fourtuple"].into_iter().chain(path.split(' ')).chain(["--help"]);
            let help = definitions().term_width(80).try_get_matches_from(line).unwrap_err().to_string();
            let examples: Vec<&str> = help.lines().skip_while(|line| *line != "Examples:").skip(1).collect();
            assert!(examples.len() >= 2 || command.has_subcommands(), "{path}: {help}");
            for example in examples {
                assert!(example.starts_with(&format!("  fourtuple {path}")), "{path}: {example}");
                parse(example.split_whitespace()).unwrap_or_else(|error| panic!("{example}: {error}"));
            }
        });
    }

    #[test]
    fn the_short_help_has_a_line_for_each_flag() {
        each(&definitions(), "", &mut |_, path| {
            let line = ["fourtuple"].into_iter().chain(path.split(' ')).chain(["-h"]);
            let help = definitions().term_width(80).try_get_matches_from(line).unwrap_err().to_string();
            let is_continued = |line: &str| line.len() > 80 || line.starts_with("        ");
            assert!(!help.lines().any(is_continued), "{help}");
            let flags =
                |section: &str| section.lines().filter(|line| line.trim_start().starts_with('-')).count();
            let is_alone = |section: &str| flags(section) == 1 && !section.starts_with("Options:");
            assert!(!help.split("\n\n").any(is_alone), "{help}");
        });
    }
}
