use std::io;

use fourtuple_bpf::BpfError;

use crate::target::TargetError;

/// The reason why a fix could not start, or could not be read.
#[derive(Debug, thiserror::Error)]
pub enum FixError {
    /// The BPF programs could not be loaded or attached, or their maps could not be read.
    #[error("cannot fix ports: {0}")]
    Bpf(#[from] BpfError),
    /// The programs to fix were not found.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// No address of `--source` is an address of this host.
    #[error(
        "invalid value '{0}' for '--source': no address of it is local in the network namespace of the programs; expected a \
         prefix with addresses of this host, such as 192.0.2.0/28"
    )]
    NoSource(String),
    /// The addresses of `--source` and `--to` have different IP versions.
    #[error(
        "invalid value '{prefix}' for '--source': expected addresses of the IP version of --to {destination}"
    )]
    Version {
        /// The value of `--source`.
        prefix: String,
        /// The value of `--to`.
        destination: String,
    },
    /// net.ipv4.ip_local_port_range could not be read.
    #[error("cannot print a setting: {0}")]
    Sysctl(io::Error),
    /// The directory of the cgroup could not be opened.
    #[error("cannot fix ports: the directory of the cgroup: {0}")]
    Cgroup(io::Error),
    /// The cgroup was removed before the programs were attached, as systemd does when it stops a unit.
    #[error(
        "cannot fix ports: the cgroup was removed before the programs were attached: was the service restarted?"
    )]
    Removed,
    /// With source addresses, and no process in the cgroup: its network namespace is not known.
    #[error(
        "cannot fix ports: the cgroup has no process, whose network namespace would have the addresses of --source: is the service \
         being restarted?"
    )]
    Empty,
    /// The caller stopped the fix before the programs were attached.
    #[error("cannot fix ports: interrupted before the programs were attached")]
    Interrupted,
}

impl FixError {
    /// Returns whether other flags would avoid the error.
    pub fn is_usage(&self) -> bool {
        match self {
            FixError::Target(error) => error.is_usage(),
            FixError::NoSource(_) | FixError::Version { .. } => true,
            _ => false,
        }
    }

    /// Returns whether the same command can succeed on the same host later.
    pub fn is_not_valid(&self) -> bool {
        matches!(self, FixError::Removed | FixError::Empty | FixError::Interrupted)
    }
}
