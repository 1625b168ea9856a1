//! Selectors for the SO_REUSEPORT groups of a running server, and turns for workers that share a listener (`rotate`).
//!
//! However a fix ends, the kernel's hash chooses again: without heartbeats the program stops to choose, and a guard process detaches it. No
//! descriptor of a server stays open here: a duplicate lives for one step, because the server's close() has no effect as long as it exists.

mod discover;
mod group;
mod mover;
mod rotate;
mod session;

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fourtuple_bpf::fix_accept::{MEMBERS, Selection};
use fourtuple_bpf::{BpfError, Control, FixAccept};
use fourtuple_record::{FixAcceptResults, Remark};
use fourtuple_syscalls::pidfd::Pidfd;
use fourtuple_syscalls::{Errno, resource, socket};

use crate::Budget;
use crate::accept::mover::Mover;
use crate::accept::rotate::Rotation;
use crate::accept::session::Session;

/// Interval at which the sockets of the server are listed, unless that uses more than [`SHARE`]. A listener that joins gets no connections
/// until then, as long as others of its group are open.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum share of a processor that lists the sockets of the server: the kernel passes over all UDP sockets of the namespace.
const SHARE: f64 = 0.05;
/// Interval at which new addresses of a process are looked for, which reads /proc.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum time from a stop request to the end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

impl Accept {
    /// Loads the programs that count, and chooses for no group.
    ///
    /// # Errors
    ///
    /// [`AcceptError::Bpf`]: this host or this user cannot do it.
    pub fn verify() -> Result<(), AcceptError> {
        FixAccept::attach()?;
        Ok(())
    }

    /// Chooses listeners until the time has passed, `stop` is true or the process of the target has ended. Calls `attached` once with
    /// the addresses of the groups, when the selectors are attached, and `progress` five times a second. The calling process must
    /// have one thread, because the guard process is forked.
    ///
    /// # Errors
    ///
    /// [`AcceptError`]
    pub fn run(
        &self,
        stop: &AtomicBool,
        attached: impl FnOnce(&[String]),
        progress: impl FnMut(&AcceptProgress),
    ) -> Result<AcceptOutcome, AcceptError> {
        match self.rule {
            AcceptRule::Rotate => {
                let mover = (!self.dry_run).then(Mover::start).transpose().map_err(AcceptError::Guard)?;
                self.drive(Rotation::attach(self, mover)?, stop, attached, progress)
            }
            AcceptRule::Select(selection) => {
                let guard = (!self.dry_run).then(|| group::guard(&self.target)).transpose();
                let session = Session::attach(self, selection, guard.map_err(AcceptError::Guard)?)?;
                self.drive(session, stop, attached, progress)
            }
        }
    }

    fn drive(
        &self,
        mut fixing: impl Fixing,
        stop: &AtomicBool,
        attached: impl FnOnce(&[String]),
        mut progress: impl FnMut(&AcceptProgress),
    ) -> Result<AcceptOutcome, AcceptError> {
        let start = Instant::now();
        attached(&fixing.addresses());
        let (mut reported, mut looked) = (Duration::ZERO, Duration::ZERO);
        let mut budget = Budget::of(SHARE);
        let mut has_ended = false;
        let elapsed = loop {
            let elapsed = start.elapsed();
            let remaining = self.time.map_or(POLL_INTERVAL, |time| time.saturating_sub(elapsed));
            if remaining.is_zero() || has_ended || stop.load(Ordering::Relaxed) {
                break elapsed;
            }
            if elapsed >= reported + FOLLOW_INTERVAL {
                let now = Instant::now();
                if budget.allows(now) {
                    let is_time_to_look = elapsed >= looked + LOOK_INTERVAL;
                    if is_time_to_look {
                        looked = elapsed;
                    }
                    let used = resource::process_cpu_time();
                    fixing.follow(is_time_to_look)?;
                    budget.spend(now, resource::process_cpu_time().saturating_sub(used));
                }
                has_ended = fixing.has_ended();
                progress(&fixing.progress(elapsed, elapsed - reported)?);
                reported = elapsed;
            }
            fixing.wait(remaining.min(POLL_INTERVAL))?;
        };
        let mut validity = Vec::new();
        let seconds = elapsed.as_secs_f64();
        if has_ended {
            let message = format!("the process ended after {seconds:.1} s; the figures cover that time");
            validity.push(Remark::new("target-ended", message));
        } else if self.time.is_some_and(|time| elapsed < time) {
            let message = format!("stopped after {seconds:.1} s; the figures cover that time");
            validity.push(Remark::new("interrupted", message));
        }
        let (results, remarks) = fixing.finish(elapsed)?;
        validity.extend(remarks);
        Ok(AcceptOutcome { results, validity })
    }
}

/// What `drive` drives.
trait Fixing {
    /// Returns the addresses of the server.
    fn addresses(&self) -> Vec<String>;
    /// Returns whether the process of the target has ended.
    fn has_ended(&self) -> bool;
    /// Follows the server. `looks`: also its processes.
    fn follow(&mut self, looks: bool) -> Result<(), AcceptError>;
    /// Does what is to be done meanwhile.
    fn wait(&mut self, time: Duration) -> Result<(), AcceptError>;
    fn progress(&mut self, elapsed: Duration, since: Duration) -> Result<AcceptProgress, AcceptError>;
    fn finish(self, elapsed: Duration) -> Result<(FixAcceptResults, Vec<Remark>), AcceptError>;
}

/// The server whose groups get a selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AcceptTarget {
    /// The sockets at this address in the network namespace of this process.
    Address(SocketAddr),
    /// The unix sockets that were bound to this path, or to `@` and an abstract name, in the network namespace of this process; for
    /// [`AcceptRule::Rotate`] only.
    Unix(String),
    /// The sockets of this process and its descendants, in the network namespace of the process.
    Process(u32),
}

impl AcceptTarget {
    fn open_process(&self) -> Result<Option<Pidfd>, AcceptError> {
        match self {
            AcceptTarget::Process(number) => {
                Pidfd::of_process(*number).map(Some).map_err(|_| AcceptError::NoProcess(*number))
            }
            AcceptTarget::Address(_) | AcceptTarget::Unix(_) => Ok(None),
        }
    }

    /// Returns the error of a server that does not listen.
    fn nothing(&self) -> AcceptError {
        let here = "fourtuple; --pid finds the listeners of a process in another namespace";
        match self {
            AcceptTarget::Address(address) => AcceptError::Nothing(format!("at {address}"), here),
            AcceptTarget::Unix(path) => AcceptError::NothingUnix(path.clone(), here),
            AcceptTarget::Process(process) => {
                AcceptError::Nothing(format!("for process {process} or its descendants"), "the process")
            }
        }
    }
}

/// Returns whether the process of a target has ended.
fn has_ended(process: Option<&Pidfd>) -> bool {
    let is_over = |process: &Pidfd| socket::wait_readable(process.as_fd(), Some(Duration::ZERO));
    process.is_some_and(|process| is_over(process).unwrap_or(false))
}

/// Who gets a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptRule {
    /// The listener of a SO_REUSEPORT group that a selector chooses.
    Select(Selection),
    /// Of workers that wait for one listener with EPOLLEXCLUSIVE, the one whose last accept() is the longest ago.
    Rotate,
}

/// A fix of accept() for a server.
#[derive(Clone, Debug)]
pub struct Accept {
    /// The server.
    pub target: AcceptTarget,
    pub rule: AcceptRule,
    /// The control packets, which one socket of each UDP group gets and no other packets.
    pub control: Option<Control>,
    /// How long; `None` means until the caller sets `stop`.
    pub time: Option<Duration>,
    /// Whether to count only.
    pub dry_run: bool,
}

/// Figures of a running fix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AcceptProgress {
    /// Time since the start.
    pub elapsed: Duration,
    /// Groups; with [`AcceptRule::Rotate`] listeners.
    pub groups: usize,
    /// Listeners, or UDP sockets; with [`AcceptRule::Rotate`] workers.
    pub listeners: usize,
    /// Choices since the start; in a dry run the connections that the kernel distributed; with [`AcceptRule::Rotate`] moves.
    pub chosen: u64,
    /// Choices per second since the previous progress.
    pub chosen_per_s: f64,
    pub open: u64,
    /// Packets for which the kernel's hash chose.
    pub left: u64,
    /// The longest queue at this moment: connections, or bytes for UDP.
    pub longest_queue: u32,
}

/// The results of a fix, and the limits of their validity.
#[derive(Clone, Debug)]
pub struct AcceptOutcome {
    pub results: FixAcceptResults,
    /// Reasons to doubt the results; empty for a valid run.
    pub validity: Vec<Remark>,
}

/// The reason why a selector could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// The BPF programs could not be loaded or attached, or their maps could not be read.
    #[error("cannot fix accept: {0}")]
    Bpf(#[from] BpfError),
    /// The process does not exist.
    #[error("invalid value '{0}' for '--pid': there is no such process")]
    NoProcess(u32),
    /// The network namespace of the process could not be opened.
    #[error(
        "cannot fix accept: the network namespace of process {process}: {} ({source}){}",
        fourtuple_syscalls::errno_name(source),
        remedy(source)
    )]
    Namespace {
        process: u32,
        /// The error from the kernel.
        source: io::Error,
    },
    /// No socket listens there.
    #[error(
        "cannot fix accept: nothing listens {0} (TCP), and no UDP socket is bound there, in the network namespace of {1}"
    )]
    Nothing(String, &'static str),
    /// The listeners are of MPTCP.
    #[error(
        "cannot fix accept: {0} is a listener of MPTCP, and the maps of a selector take none (reuseport_array_update_check of the kernel); \
         programs in Go listen with MPTCP since 1.24: start it again with GODEBUG=multipathtcp=0 in its environment"
    )]
    Mptcp(String),
    /// No unix socket listens there.
    #[error(
        "cannot fix accept: no unix socket that was bound to {0} listens in the network namespace of {1}"
    )]
    NothingUnix(String, &'static str),
    /// Fewer than two workers wait with EPOLLEXCLUSIVE.
    #[error(
        "cannot fix accept: {}; --select rotate is for workers that share a listener with EPOLLEXCLUSIVE, as those of nginx without \
         `reuseport`",
        ladder(listener, *waiting)
    )]
    NoLadder {
        /// The listener with its process.
        listener: String,
        /// Processes that wait with EPOLLEXCLUSIVE.
        waiting: usize,
    },
    /// The sockets are in no group.
    #[error("cannot fix accept: {socket} is in no SO_REUSEPORT group; {}", discover::setting(command))]
    NoGroup {
        /// The socket with its process.
        socket: String,
        /// Name of the process.
        command: String,
    },
    /// The groups have one socket each.
    #[error(
        "cannot fix accept: {0} is the only socket of its SO_REUSEPORT group, so there is no choice; the server needs a listener \
         for each worker"
    )]
    Single(String),
    /// The group already has a selector.
    #[error(
        "cannot fix accept: the group of {socket} already has a selector ({program}); a server with a selector of its own, or \
         another fix, would lose it, so end that one first"
    )]
    HasSelector {
        /// The socket with its process.
        socket: String,
        program: String,
    },
    /// A socket is in a map of sockets, or in another use that excludes maps.
    #[error(
        "cannot fix accept: {0} is in a map of sockets of another BPF program, or in use by the kernel (EBUSY)"
    )]
    InUse(String),
    /// Sockets of the group belong to invisible processes.
    #[error(
        "cannot fix accept: {seen} of the {members} listeners of the group at {address} belong to processes that fourtuple sees; \
         the others would get no connections. Run it in the PID namespace of the host, as root"
    )]
    Unseen {
        address: String,
        /// Visible listeners.
        seen: usize,
        /// Listeners of the group.
        members: u32,
    },
    /// More sockets than the maps have entries.
    #[error("cannot fix accept: more than {0}, which are the entries of the maps of BPF")]
    TooMany(String),
    /// More sockets in a group than a selector compares.
    #[error(
        "cannot fix accept: a selector compares at most {MEMBERS} of the {members} listeners of the group of {socket}, because the \
         kernel's verifier bounds its loop"
    )]
    TooLarge {
        /// The socket with its process.
        socket: String,
        /// Listeners of the group.
        members: u32,
    },
    /// A selector by the payload, and no UDP group.
    #[error(
        "invalid value '{0}': a SYN has no payload, so this is for UDP only, and {1} is not a UDP socket; for TCP use least-busy, cpu \
         or random"
    )]
    OnlyUdp(&'static str, String),
    /// Descriptors of the server could not be duplicated.
    #[error(
        "cannot fix accept: pidfd_getfd of process {process}: {} ({source}){}",
        fourtuple_syscalls::errno_name(source),
        remedy(source)
    )]
    Duplicate {
        process: u32,
        /// The error from the kernel.
        source: io::Error,
    },
    /// The guard process could not be started or told.
    #[error("cannot fix accept: the guard process: {0}")]
    Guard(io::Error),
    /// The sockets of the host could not be listed.
    #[error("cannot fix accept: cannot list the sockets: {0}")]
    List(io::Error),
    /// A thread could not be started.
    #[error("cannot fix accept: cannot start a thread: {0}")]
    Thread(io::Error),
}

fn ladder(listener: &str, waiting: usize) -> String {
    match waiting {
        0 => format!(
            "no process waits for {listener} with EPOLLEXCLUSIVE, so that the kernel wakes none before the others"
        ),
        _ => format!("only one process waits for {listener} with EPOLLEXCLUSIVE, so there are no turns"),
    }
}

/// Returns what a call on another process needs, if its error says so.
fn remedy(error: &io::Error) -> &'static str {
    match Errno::of(error) {
        Some(Errno::EPERM | Errno::EACCES) => "; it needs CAP_SYS_PTRACE (root has it)",
        Some(Errno::ENOSYS) => "; it needs Linux 5.6",
        _ => "",
    }
}

impl AcceptError {
    /// Returns whether a later attempt with the same sockets would fail as well.
    fn is_lasting(&self) -> bool {
        matches!(self, AcceptError::HasSelector { .. } | AcceptError::InUse(_) | AcceptError::TooLarge { .. })
    }

    /// Returns whether other flags would avoid the error.
    pub fn is_usage(&self) -> bool {
        matches!(self, AcceptError::NoProcess(_) | AcceptError::OnlyUdp(..))
    }
}
