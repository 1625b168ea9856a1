use std::io;

use fourtuple_bpf::BpfError;
use fourtuple_bpf::fix_accept::MEMBERS;

use crate::accept::server;

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
        "cannot fix accept: the network namespace of process {process}: {} ({source}); it needs CAP_SYS_PTRACE (root has it)",
        fourtuple_syscalls::errno_name(source)
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
    /// The sockets are in no group.
    #[error("cannot fix accept: {socket} is in no SO_REUSEPORT group; {}", server::setting(command))]
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
        "invalid value '{0}': a SYN has no payload, so this is for UDP only, and {1} is no UDP socket; for TCP use least-busy, cpu \
         or random"
    )]
    OnlyUdp(&'static str, String),
    /// Descriptors of the server could not be duplicated.
    #[error(
        "cannot fix accept: pidfd_getfd of process {process}: {} ({source}); it needs CAP_SYS_PTRACE (root has it) and Linux 5.6",
        fourtuple_syscalls::errno_name(source)
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

impl AcceptError {
    /// Returns whether a later attempt with the same sockets would fail as well.
    pub(super) fn is_lasting(&self) -> bool {
        matches!(self, AcceptError::HasSelector { .. } | AcceptError::InUse(_) | AcceptError::TooLarge { .. })
    }

    /// Returns whether other flags would avoid the error.
    pub fn is_usage(&self) -> bool {
        matches!(self, AcceptError::NoProcess(_) | AcceptError::OnlyUdp(..))
    }
}
