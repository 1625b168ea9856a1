use std::io;
use std::path::PathBuf;
use std::time::Duration;

use fourtuple_syscalls::errno_name;

/// Why a process has not taken over from another one. The one that is at work goes on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandoverError {
    /// A call failed.
    #[error("{call} for {}: {} ({source})", path.display(), errno_name(source))]
    Call {
        /// Which.
        call: &'static str,
        /// The path of the socket.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Neither this user nor root is at the other end.
    #[error("the process at the other end of {} is of user {user}: neither this one nor root", path.display())]
    Stranger {
        /// The path of the socket.
        path: PathBuf,
        /// Whose it is.
        user: u32,
    },
    /// It says nothing.
    #[error("the process at the other end of {} has said nothing for {} s", path.display(), after.as_secs())]
    Silent {
        /// The path of the socket.
        path: PathBuf,
        /// How long.
        after: Duration,
    },
    /// It has ended, or gone away.
    #[error("the process at the other end of {} went away before the sockets were handed over", path.display())]
    Gone {
        /// The path of the socket.
        path: PathBuf,
    },
    /// It does not speak as this one does.
    #[error("the process at the other end of {} says {said:?}, which is not of this version: {expected}", path.display())]
    Unexpected {
        /// The path of the socket.
        path: PathBuf,
        /// The beginning of what it said.
        said: String,
        /// What was expected.
        expected: &'static str,
    },
    /// The new one cannot go on with the sockets of the one at work: that needs a new start.
    #[error("the one at work cannot be taken over: {why}")]
    Differs {
        /// What is different.
        why: String,
    },
    /// The other one has given up, and said why.
    #[error("the other one: {why}")]
    Refused {
        /// The reason, in its words.
        why: String,
    },
}
