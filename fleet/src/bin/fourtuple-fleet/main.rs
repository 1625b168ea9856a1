//! `fourtuple fleet` and `fourtuple agent`: the command replaces itself by this program.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

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
use fourtuple_bench::load::SYSCTLS;
use fourtuple_cli::exit::{self, Exit};
use fourtuple_cli::{help, output, refuse, stop};
use fourtuple_fleet::FleetError;
use fourtuple_fleet::agent::Agent;
use fourtuple_fleet::coordinator::Selection;
use fourtuple_fleet::nats::Connection;
use fourtuple_fleet::permission::{Permission, Permissions};
use fourtuple_syscalls::resource;
use ipnet::IpNet;

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
    Agent(AgentFlags),
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
    fourtuple_syscalls::resource::restrict_static_lookups();
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

/// Flags of the connection to NATS.
#[derive(Clone, Debug, Args)]
pub(crate) struct ConnectFlags {
    /// Servers of NATS
    ///
    /// Several with commas; tls://HOST encrypts.
    #[arg(long, value_name = "URL", default_value = "nats://127.0.0.1:4222")]
    nats: String,
    /// Credentials (JWT and seed), as nsc writes them
    #[arg(long, value_name = "FILE")]
    creds: Option<PathBuf>,
    /// Seed of an nkey
    #[arg(long, value_name = "FILE", conflicts_with = "creds")]
    nkey: Option<PathBuf>,
    /// Authority of the server (PEM); requires TLS
    #[arg(long, value_name = "FILE")]
    nats_ca: Option<PathBuf>,
}

impl ConnectFlags {
    pub(crate) fn connection(&self) -> Connection {
        Connection {
            url: self.nats.clone(),
            credentials: self.creds.clone(),
            nkey: self.nkey.clone(),
            ca: self.nats_ca.clone(),
        }
    }
}

/// Flags that select hosts.
#[derive(Clone, Debug, Args)]
pub(crate) struct SelectFlags {
    /// Hosts with this label only; repeatable
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    label: Vec<(String, String)>,
}

impl SelectFlags {
    pub(crate) fn selection(&self, workers: Option<u32>) -> Selection {
        Selection { labels: self.label.clone(), workers }
    }

    /// Returns the labels as they were given.
    pub(crate) fn labels(&self) -> Vec<String> {
        self.label.iter().map(|(key, value)| format!("{key}={value}")).collect()
    }
}

pub(crate) fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not accepted: expected KEY=VALUE, such as zone=eu")),
    }
}

/// Perform on this host what `fourtuple fleet` requests over NATS
///
/// load, doctor, lab ports, trace connect, serve and plan. A request carries typed settings, never a shell command. Requests and refusals are logged on stderr. Ends with Ctrl-C or
/// SIGTERM.
#[derive(Debug, Args)]
pub(crate) struct AgentFlags {
    #[command(flatten)]
    connect: ConnectFlags,
    /// Name of this host [default: the host name]
    ///
    /// Letters, digits, - and _.
    #[arg(long, value_name = "HOST")]
    name: Option<String>,
    /// Label, which `fleet --label` selects; repeatable
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    label: Vec<(String, String)>,
    /// Commands that this host performs [default: all]
    ///
    /// Of load, doctor, lab, trace, serve and plan.
    #[arg(long, value_name = "COMMAND,...", value_delimiter = ',')]
    allow: Vec<Permission>,
    /// Network of loads and servers; repeatable
    ///
    /// That a load may connect to, and a server listen on [default: 127.0.0.0/8 and ::1]
    #[arg(long, value_name = "CIDR", value_parser = network)]
    allow_target: Vec<IpNet>,
    /// Directory for the results of runs
    ///
    /// By default fourtuple in $STATE_DIRECTORY, $XDG_STATE_HOME, ~/.local/state or /tmp.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

fn network(text: &str) -> Result<IpNet, String> {
    let address = || text.parse().ok().map(|address: std::net::IpAddr| IpNet::from(address));
    text.parse().ok().or_else(address).ok_or_else(|| {
        format!("{text:?} is not accepted: expected a network such as 10.0.0.0/8, or an address")
    })
}

impl AgentFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let stop = stop::flag()?;
        resource::raise_descriptor_limit()
            .context("cannot raise the limit on descriptors (RLIMIT_NOFILE)")?;
        let agent = Agent {
            connection: self.connect.connection(),
            name: self.name.unwrap_or_else(host_name),
            labels: self.label,
            permissions: Permissions::new(self.allow, self.allow_target),
            directory: self.state.unwrap_or_else(state_directory),
            host: output::host(&SYSCTLS, &[]),
            program: fourtuple()?,
        };
        agent.run(&stop, log)?;
        Ok(Exit::Fine)
    }
}

/// Returns the name of this host in its UTS namespace, without characters that a subject of NATS cannot have.
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_');
    name.trim().chars().map(|letter| if is_part(letter) { letter } else { '-' }).take(64).collect()
}

fn state_directory() -> PathBuf {
    let home = || Some(PathBuf::from(env::var_os("HOME")?).join(".local/state"));
    let given = ["STATE_DIRECTORY", "XDG_STATE_HOME"].into_iter().find_map(env::var_os).map(PathBuf::from);
    given.or_else(home).unwrap_or_else(env::temp_dir).join("fourtuple")
}

fn log(line: &str) {
    // The write fails if the reader of the log is gone.
    output::say(&format!("fourtuple agent: {line}"));
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
