mod control;
mod events;
mod evidence;
mod policy;
mod repairs;
mod running;
mod service;
mod watcher;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use fourtuple_fix::{Accept, Ports};
use fourtuple_observe::host::cgroup;
use fourtuple_observe::host::guard::SOCKET;
use fourtuple_record::{GuardResults, GuardSettings, Saved};
use fourtuple_syscalls::resource;
use time::OffsetDateTime;

use crate::exit::Exit;
use crate::output::{self, Output};
use crate::stop;
use crate::units::{self, nanoseconds};
use crate::watch::TargetFlags;
use control::{RequestKind, ask};
use policy::Policy;
use running::Running;

/// Watch this host and repair connections by policy, as a service
///
/// Attaches `fix ports` and `fix accept` to the programs that a policy names while they need it, and lets go afterwards. Never changes a sysctl, a
/// configuration or a program. Without --config it changes nothing, and says what it would do. Prints its events as lines of JSON. Needs root and
/// cgroups of version 2. Ends with Ctrl-C or SIGTERM; however it ends, nothing stays attached. SIGHUP starts a successor with the same flags, which
/// takes over.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Guard {
    #[command(flatten)]
    flags: GuardFlags,
    #[command(subcommand)]
    what: Option<What>,
}

#[derive(Debug, Subcommand)]
enum What {
    Status(StatusFlags),
    Pause(PauseFlags),
    Resume(ResumeFlags),
}

#[derive(Clone, Debug, Args)]
struct GuardFlags {
    /// What guard may do, a TOML file [default: nothing]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Change nothing, say what would be changed
    #[arg(long)]
    dry_run: bool,
    /// Time between two readings [default: 5s]
    ///
    /// At least 100ms. Without it the policy says.
    #[arg(long, value_name = "TIME", value_parser = units::interval, allow_hyphen_values = true)]
    every: Option<Duration>,
    /// Socket of guard
    #[arg(long, value_name = "PATH", default_value = SOCKET)]
    socket: PathBuf,
    /// Take over from the guard at the socket
    ///
    /// Without a gap: its fixes are attached here before it ends.
    #[arg(long)]
    takeover: bool,
    /// Serve the metrics and the page of `export` too
    #[arg(long, value_name = "ADDR:PORT", value_parser = units::socket_address)]
    listen: Option<SocketAddr>,
    /// Load no BPF program to trace
    ///
    /// The programs behind TIME_WAIT sockets are then not known.
    #[arg(long)]
    no_trace: bool,
    /// Print no events
    #[arg(long)]
    quiet: bool,
}

impl Guard {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        match self.what {
            Some(What::Status(flags)) => flags.run(),
            Some(What::Pause(flags)) => flags.run(),
            Some(What::Resume(flags)) => flags.run(),
            None => self.flags.run(),
        }
    }
}

impl GuardFlags {
    fn run(self) -> anyhow::Result<Exit> {
        let (policy, observes) = match &self.config {
            Some(path) => (policy::read(path)?, self.dry_run),
            None => (Policy::of_all(), true),
        };
        // Before the first thread.
        resource::keep_little_memory();
        if !observes {
            require(&policy)?;
        }
        let stop = stop::flag_without_hangup()?;
        let reload = stop::hangup()?;
        let namespace = TargetFlags::own().open()?;
        Running::new(self, policy, observes)?.run(&namespace, &stop, &reload)
    }
}

/// Returns why this host cannot make the fixes of a policy. Asked at the start: a guard that cannot act would only seem to protect.
fn require(policy: &Policy) -> anyhow::Result<()> {
    if policy.ports.is_some() || policy.accept.is_some() {
        let mounted = cgroup::mount_point(Path::new("/"));
        mounted.map_err(|error| {
            let remedy = cgroup::remedy(&error);
            anyhow::Error::new(error)
                .context(format!("guard needs cgroups of version 2, and none are mounted{remedy}"))
        })?;
    }
    if policy.ports.is_some() {
        Ports::verify().context("guard")?;
    }
    if policy.accept.is_some() {
        Accept::verify().context("guard")?;
    }
    Ok(())
}

/// Show what the running guard does
///
/// The fixes that are attached, their effect, and the last events.
#[derive(Debug, Args)]
struct StatusFlags {
    #[command(flatten)]
    socket: SocketFlag,
    #[command(flatten)]
    output: Output,
}

/// Detach all fixes, and attach none
///
/// The guard continues to watch. Without --for until `fourtuple guard resume`, or until the guard is started again.
#[derive(Debug, Args)]
struct PauseFlags {
    /// Time after which the guard resumes
    #[arg(long = "for", value_name = "TIME", value_parser = units::limit, allow_hyphen_values = true)]
    duration: Option<Duration>,
    #[command(flatten)]
    socket: SocketFlag,
}

/// End a pause
#[derive(Debug, Args)]
struct ResumeFlags {
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
    fn run(self) -> anyhow::Result<Exit> {
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
    fn run(self) -> anyhow::Result<Exit> {
        ask(&self.socket.socket, &RequestKind::Pause { for_ns: self.duration.map(nanoseconds) })?;
        Ok(Exit::Fine)
    }
}

impl ResumeFlags {
    fn run(self) -> anyhow::Result<Exit> {
        ask(&self.socket.socket, &RequestKind::Resume)?;
        Ok(Exit::Fine)
    }
}
