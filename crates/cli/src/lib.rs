//! The `fourtuple` command: parses flags, calls a crate of the workspace, prints its record. Each subcommand is a module of
//! `commands`. What is public is for `fourtuple-fleet` (`fleet/`), which is the commands `fleet` and `agent`.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod commands;
#[doc(hidden)]
pub mod exit;
#[doc(hidden)]
pub mod help;
mod input;
#[doc(hidden)]
pub mod line;
mod names;
#[doc(hidden)]
pub mod output;
#[doc(hidden)]
pub mod save;
#[doc(hidden)]
pub mod stop;
#[doc(hidden)]
pub mod units;
mod watch;

use std::ffi::OsString;
use std::io;
use std::process::ExitCode;

use clap::error::{ContextKind, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser};
use fourtuple_record::printable;

use commands::{Command, compare};
#[doc(hidden)]
pub use commands::{load::LoadFlags, serve::ServeFlags};

/// Make connections cheap: what this kernel does between socket() and the first byte, measured, explained and fixed.
#[derive(Debug, Parser)]
#[command(
    name = "fourtuple",
    version,
    propagate_version = true,
    disable_help_subcommand = true,
    after_help = "Exit codes: 0 fine, 1 `doctor` has findings or `load --expect` is not met, 2 bad usage, 3 the run is \
                  not valid, 4 this environment cannot do it; `run` has the exit code of its program."
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

/// Runs the command with the arguments of this process, and returns its exit code.
pub fn main() -> ExitCode {
    fourtuple_syscalls::resource::restrict_static_lookups();
    if watch::probe_if_requested() {
        return ExitCode::SUCCESS;
    }
    let arguments = match parse(std::env::args_os()) {
        Ok(arguments) => arguments,
        Err(error) => return refuse(&error),
    };
    match arguments.command.run() {
        Ok(exit) => exit.into(),
        Err(error) => {
            let exit = exit::of(&error);
            // An error while writing to stderr cannot be reported.
            output::say(&format!("fourtuple: {}", exit::message(&error)));
            exit.into()
        }
    }
}

/// Returns the command with all its flags.
#[doc(hidden)]
pub fn command() -> clap::Command {
    let command = help::dress(Arguments::command());
    let page = help::first_page(&command);
    command.help_template(page)
}

/// Parses a command line, the name of the program first.
pub(crate) fn parse(
    line: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Result<Arguments, clap::Error> {
    let mut command = command();
    let mut matches = command.try_get_matches_from_mut(line)?;
    Arguments::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// Parses the command line of the load that `fleet load` runs.
#[doc(hidden)]
pub fn load_flags(arguments: &[String]) -> Result<Box<LoadFlags>, String> {
    match compare::parse(arguments, "there is nothing to run")? {
        Command::Load(load) => Ok(load),
        _ => Err("expected load TARGET ...".to_owned()),
    }
}

/// Parses the command line of the server that `fleet serve` runs.
#[doc(hidden)]
pub fn serve_flags(arguments: &[String]) -> Result<Box<ServeFlags>, String> {
    match compare::parse(arguments, "there is nothing to run")? {
        Command::Serve(serve) => Ok(Box::new(serve)),
        _ => Err("expected serve PROTOCOL ...".to_owned()),
    }
}

/// Prints help and version like clap, and any other error as one line with the flag, the value and the accepted values.
#[doc(hidden)]
pub fn refuse(error: &clap::Error) -> ExitCode {
    if matches!(
        error.kind(),
        ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        return match error.print() {
            // The reader has closed the pipe, as in `fourtuple --help | head -1`.
            Err(failure) if failure.kind() != io::ErrorKind::BrokenPipe => {
                output::say(&format!("fourtuple: cannot write to stdout: {failure}"));
                exit::Exit::Environment.into()
            }
            _ if error.use_stderr() => exit::Exit::Usage.into(),
            _ => ExitCode::SUCCESS,
        };
    }
    output::say(&format!("fourtuple: {}", one_line(error)));
    exit::Exit::Usage.into()
}

/// Formats an error of clap as one line.
pub(crate) fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let message: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        // A word that begins with - is nowhere a value without a flag.
        .filter(|line| !line.is_empty() && !line.starts_with("tip: to pass "))
        .collect();
    // Flags of `load` and `serve` in front of -- are errors of place: clap's tip would make them words of the command.
    let behind =
        ["load TARGET", "serve PROTOCOL"].into_iter().find(|it| text.contains(&format!("-- <{it} ...>")));
    let is_behind = error.kind() == ErrorKind::UnknownArgument && behind.is_some();
    let mut message = message.join(" ").replace(" tip: ", "; ");
    if let (true, Some(behind), Some((first, _))) = (is_behind, behind, message.split_once("; ")) {
        message = format!("{first}; the command and its flags come behind --: -- {behind} ...");
    } else if let (true, Some(behind)) = (is_behind, behind) {
        message.push_str(&format!("; the command and its flags come behind --: -- {behind} ..."));
    }
    let message = printable(message.strip_prefix("error: ").unwrap_or(&message));
    // For these errors clap lists no accepted values.
    let is_word = error.get(ContextKind::InvalidArg).is_some_and(|word| !word.to_string().starts_with('-'));
    let more = match error.kind() {
        ErrorKind::UnknownArgument if is_behind => "",
        ErrorKind::UnknownArgument if is_word && text.contains("-- <PROGRAM>") => {
            "; write -- before the program"
        }
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand => "; --help lists what is accepted",
        _ => "",
    };
    exit::quoted_once(&format!("{message}{more}"))
}
