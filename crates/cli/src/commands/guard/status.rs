use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use fourtuple_observe::host::guard::SOCKET;
use fourtuple_record::{GuardResults, GuardSettings, Saved};
use time::OffsetDateTime;

use crate::commands::guard::control::{RequestKind, ask};
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::units::{self, nanoseconds};

/// Show what the running guard does
///
/// The fixes that are attached, their effect, and the last events.
#[derive(Debug, Args)]
pub(crate) struct StatusFlags {
    #[command(flatten)]
    socket: SocketFlag,
    #[command(flatten)]
    output: Output,
}

/// Detach all fixes, and attach none
///
/// The guard continues to watch. Without --for until `fourtuple guard resume`, or until the guard is started again.
#[derive(Debug, Args)]
pub(crate) struct PauseFlags {
    /// Time after which the guard resumes
    #[arg(long = "for", value_name = "TIME", value_parser = units::limit, allow_hyphen_values = true)]
    duration: Option<Duration>,
    #[command(flatten)]
    socket: SocketFlag,
}

/// End a pause
#[derive(Debug, Args)]
pub(crate) struct ResumeFlags {
    #[command(flatten)]
    socket: SocketFlag,
}

#[derive(Debug, Args)]
struct SocketFlag {
    /// Socket of the guard
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    socket: PathBuf,
}

impl StatusFlags {
    pub(super) fn run(self) -> anyhow::Result<Exit> {
        let path = &self.socket.socket;
        let status = ask(path, &RequestKind::Status)?;
        let results: GuardResults = serde_json::from_value(status)
            .with_context(|| format!("the guard at {} is of another version", path.display()))?;
        let settings = GuardSettings { socket: path.display().to_string() };
        let started = OffsetDateTime::now_utc();
        let record =
            output::record("guard status", started, output::host(&[], &[]), settings, Vec::new(), results);
        self.output.finish(&Saved::GuardStatus(record))
    }
}

impl PauseFlags {
    pub(super) fn run(self) -> anyhow::Result<Exit> {
        ask(&self.socket.socket, &RequestKind::Pause { for_ns: self.duration.map(nanoseconds) })?;
        Ok(Exit::Fine)
    }
}

impl ResumeFlags {
    pub(super) fn run(self) -> anyhow::Result<Exit> {
        ask(&self.socket.socket, &RequestKind::Resume)?;
        Ok(Exit::Fine)
    }
}
