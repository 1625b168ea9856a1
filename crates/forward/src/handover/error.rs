use std::io;
use std::path::PathBuf;
use std::time::Duration;

use fourtuple_syscalls::errno_name;

/// An error of a takeover. The running process continues.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandoverError {
    /// A system call failed.
    #[error("{call} for {}: {} ({source})", path.display(), errno_name(source))]
    Call {
        /// The name of the call.
        call: &'static str,
        /// The path of the socket.
        path: PathBuf,
        /// The error of the call.
        source: io::Error,
    },
    /// The peer process belongs neither to this user nor to root.
    #[error("the process at the other end of {} is of user {user}: neither this one nor root", path.display())]
    Stranger {
        /// The path of the socket.
        path: PathBuf,
        /// The user of the peer process.
        user: u32,
    },
    /// The peer process sent nothing within the time limit.
    #[error("the process at the other end of {} has said nothing for {} s", path.display(), after.as_secs())]
    Silent {
        /// The path of the socket.
        path: PathBuf,
        /// The time since its last message.
        after: Duration,
    },
    /// The peer process has ended or closed the connection.
    #[error("the process at the other end of {} went away before the sockets were handed over", path.display())]
    Gone {
        /// The path of the socket.
        path: PathBuf,
    },
    /// The peer process sent a message of another version.
    #[error("the process at the other end of {} says {said:?}, which is not of this version: {expected}", path.display())]
    Unexpected {
        /// The path of the socket.
        path: PathBuf,
        /// The beginning of the message.
        said: String,
        /// The expected message.
        expected: &'static str,
    },
    /// The settings of the new process do not fit the sockets of the running process: a restart is needed.
    #[error("the one at work cannot be taken over: {why}")]
    Differs {
        /// The difference.
        why: String,
    },
    /// The peer process gave up and sent the reason.
    #[error("the other one: {why}")]
    Refused {
        /// The reason, as received.
        why: String,
    },
}
