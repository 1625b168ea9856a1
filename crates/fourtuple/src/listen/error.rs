use std::io;
use std::path::PathBuf;

use fourtuple_syscalls::{Endpoint, errno_name};

use crate::listen::policy::{Family, Policy};

const FREE: &str = "a path that is free, or a socket that nobody listens on";

/// Why there is no listener, or no further connection of it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// No kernel can do this.
    #[error("{policy} is not possible over {family}: {why}")]
    Impossible {
        /// The policy that was asked for.
        policy: Policy,
        /// The family of the address.
        family: Family,
        /// The reason.
        why: &'static str,
    },
    /// This process may not do it.
    #[error("{policy} is not permitted here: {call}: {} ({source}); {needs}", errno_name(.source))]
    NotPermitted {
        /// The policy that was asked for.
        policy: Policy,
        /// What was refused.
        call: &'static str,
        /// Which permission it takes.
        needs: &'static str,
        /// The errno.
        source: io::Error,
    },
    /// This kernel has not got it.
    #[error("{policy} is not possible here: {what}: {} ({source})", errno_name(.source))]
    Absent {
        /// The policy that was asked for.
        policy: Policy,
        /// What is missing.
        what: &'static str,
        /// The errno.
        source: io::Error,
    },
    /// A dispatcher that cannot be had.
    #[error("a group with {policy} gives no dispatcher: {why}")]
    NoDispatcher {
        /// The policy of the group.
        policy: Policy,
        /// The reason.
        why: &'static str,
    },
    /// The program that uses this crate was built without it.
    #[error("{policy} is not in this build: the crate fourtuple needs its feature {feature}")]
    NotBuilt {
        /// The policy that was asked for.
        policy: Policy,
        /// The feature.
        feature: &'static str,
    },
    /// The program that chooses was not loaded, or not attached.
    #[cfg(feature = "bpf")]
    #[error(transparent)]
    Bpf(fourtuple_bpf::BpfError),
    /// All seats are taken.
    #[error("all {seats} seats of the group are taken")]
    Full {
        /// As many as the group was opened with.
        seats: usize,
    },
    /// There is something at this path that is not a socket, and which is therefore not removed.
    #[error("{path:?}: there is something else than a socket; accepted is {FREE}")]
    NotASocket {
        /// The path of the unix socket.
        path: PathBuf,
    },
    /// Somebody accepts on this path already.
    #[error("{path:?}: another program listens there; accepted is {FREE}")]
    PathInUse {
        /// The path of the unix socket.
        path: PathBuf,
    },
    /// `Recycle::Measured` where a runtime keeps the connections.
    #[error(
        "what a kept connection waits for its runtime is not measured: take another Recycle than Measured, or workers without \
         a runtime"
    )]
    NotMeasurable,
    /// A call that failed otherwise.
    #[error("{call} for {endpoint}: {} ({source}){}", errno_name(.source), hint(.source))]
    Call {
        /// The call.
        call: &'static str,
        /// Where the group listens.
        endpoint: Endpoint,
        /// The errno.
        source: io::Error,
    },
}

impl ListenError {
    /// Whether other settings would have helped, and not another environment.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            ListenError::Impossible { .. }
                | ListenError::NotASocket { .. }
                | ListenError::PathInUse { .. }
                | ListenError::NotMeasurable
        )
    }
}

fn hint(error: &io::Error) -> &'static str {
    match errno_name(error).as_str() {
        "EADDRINUSE" => "; stop the program that has it, or take another port",
        "EADDRNOTAVAIL" => "; the address must be one of this host",
        "EACCES" => {
            "; ports below net.ipv4.ip_unprivileged_port_start (1024) need root, a path a directory to write in"
        }
        _ => "",
    }
}
