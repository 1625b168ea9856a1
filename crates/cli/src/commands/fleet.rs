//! `fourtuple fleet` and `fourtuple agent` are the program `fourtuple-fleet`, which brings a client of NATS. It is a program of its own, as
//! commands of git are, so that a build of this one needs none.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Context;
use clap::Args;

use crate::exit::Exit;

/// The name of the program, beside this one or in PATH.
const PROGRAM: &str = "fourtuple-fleet";

/// Run one load on many hosts as one result, and compare the hosts
#[derive(Debug, Args)]
#[command(disable_help_flag = true, disable_version_flag = true)]
pub(crate) struct Fleet {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<OsString>,
}

/// Perform on this host what `fourtuple fleet` requests over NATS
#[derive(Debug, Args)]
#[command(disable_help_flag = true, disable_version_flag = true)]
pub(crate) struct Agent {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<OsString>,
}

impl Fleet {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        become_program("fleet", &self.arguments)
    }
}

impl Agent {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        become_program("agent", &self.arguments)
    }
}

/// Replaces this process by the program. Returns only if that fails.
fn become_program(command: &str, arguments: &[OsString]) -> anyhow::Result<Exit> {
    let own = env::current_exe().context("cannot find this program")?;
    let beside = own.with_file_name(PROGRAM);
    let program = if beside.is_file() { beside.into_os_string() } else { PROGRAM.into() };
    // The agent runs this program for doctor, lab and trace.
    let error = Command::new(program).arg(command).args(arguments).env("FOURTUPLE_PROGRAM", &own).exec();
    if error.kind() == io::ErrorKind::NotFound {
        anyhow::bail!(
            "`{command}` is the program {PROGRAM}, which is neither beside {} nor in PATH: it is part of the package; \
             docs/install.md says how to build it",
            own.display()
        );
    }
    Err(error).context(format!("cannot run {PROGRAM}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit;

    #[test]
    fn without_the_program_the_error_says_how_to_get_it() {
        // The tests of this crate have no such program beside them.
        let error = Fleet { arguments: vec!["agents".into()] }.run().unwrap_err();
        assert_eq!(exit::of(&error), Exit::Environment);
        let line = exit::message(&error);
        assert!(line.contains("docs/install.md") && !line.contains('\n'), "{line}");
    }
}
