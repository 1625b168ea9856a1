use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use fourtuple_syscalls::errno_name;
use fourtuple_syscalls::socket::Transport;

use super::Snapshot;

/// Why there is no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A file of procfs that should be there.
    #[error("cannot read {}: {}", .path.display(), errno_name(.error))]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        error: io::Error,
    },
    /// A file that says something else than it should.
    #[error("cannot make sense of {}: {content:?}", .path.display())]
    Malformed {
        /// Which.
        path: PathBuf,
        /// What it says.
        content: String,
    },
    /// A system call.
    #[error("cannot {what}: {}", errno_name(.error))]
    Call {
        /// What was attempted.
        what: &'static str,
        /// Why it failed.
        #[source]
        error: io::Error,
    },
}

impl Snapshot {
    /// Reads what the calling thread's network namespace has for connections from `sources` (empty: the kernel's choice)
    /// to `destination`. `proc` is where procfs is mounted: `/proc`.
    ///
    /// # Errors
    ///
    /// See [`ReadError`]. What a kernel may lack (conntrack, tcp_tw_reuse_delay) is left out instead.
    pub fn read(
        proc: &Path,
        transport: Transport,
        destination: SocketAddr,
        sources: &[IpAddr],
    ) -> Result<Snapshot, ReadError> {
        let _ = (proc, transport, destination, sources);
        unimplemented!("follows")
    }

    /// The same for a run over unix sockets, which has no ports.
    pub fn read_without_ports(proc: &Path) -> Result<Snapshot, ReadError> {
        let _ = proc;
        unimplemented!("follows")
    }
}
