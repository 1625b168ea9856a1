use std::io;

use fourtuple_syscalls::{Endpoint, errno_name};

use crate::listen::policy::{Family, Policy};

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
    #[error("{policy} is not permitted here: {call}: {}; {needs}", errno_name(.source))]
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
    #[error("{policy} is not possible here: {what}: {}", errno_name(.source))]
    Absent {
        /// The policy that was asked for.
        policy: Policy,
        /// What is missing.
        what: &'static str,
        /// The errno.
        source: io::Error,
    },
    /// All seats are taken.
    #[error("all {seats} seats of the group are taken")]
    Full {
        /// As many as the group was opened with.
        seats: usize,
    },
    /// The path of a unix socket is something else.
    #[error("{path} exists and is no socket; it is left alone")]
    NotASocket {
        /// The path.
        path: String,
    },
    /// Another server answers on the path of a unix socket.
    #[error("another server listens on {path}; stop it, or take another path")]
    PathInUse {
        /// The path.
        path: String,
    },
    /// `Recycle::Measured` where a runtime keeps the connections.
    #[error(
        "what a kept connection waits for its runtime is not measured: take another Recycle than Measured, or workers without \
         a runtime"
    )]
    NotMeasurable,
    /// A call that failed otherwise.
    #[error("{call} for {endpoint}: {}{}", errno_name(.source), hint(.source))]
    Call {
        /// The call.
        call: &'static str,
        /// Where the group listens.
        endpoint: Endpoint,
        /// The errno.
        source: io::Error,
    },
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
