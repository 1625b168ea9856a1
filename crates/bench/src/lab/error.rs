use std::io;
use std::time::Duration;

use fourtuple::dial::{BuildError, DialError};
use fourtuple::listen::ListenError;
use fourtuple_forward::ForwardError;
use fourtuple_observe::plan::CostError;
use fourtuple_syscalls::netns;

/// The reason why an experiment failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// A setting is out of range.
    #[error("invalid {setting} {value}: {accepted}")]
    Setting {
        /// The name of the setting in records, such as `range`.
        setting: &'static str,
        /// The value that was given.
        value: String,
        /// The accepted values, and the reason.
        accepted: String,
    },
    /// The measured costs do not fit the cost model.
    #[error(transparent)]
    Costs(#[from] CostError),
    /// A network namespace could not be created.
    #[error("cannot make a network namespace: {0}{remedy}", remedy = netns::remedy(.0))]
    Namespace(#[source] io::Error),
    /// A sysctl of the experiment's own namespace could not be set.
    #[error("cannot set {name} = {value} in the experiment's namespace: {error}{}", way_out(error))]
    Sysctl {
        /// Dotted name.
        name: String,
        /// The value that was to be set.
        value: String,
        /// The error of the write.
        #[source]
        error: io::Error,
    },
    /// A system call that the experiment needs has failed.
    #[error("{what}: {error}")]
    Call {
        /// The purpose of the call.
        what: String,
        /// The error of the call.
        #[source]
        error: io::Error,
    },
    /// RLIMIT_NOFILE is too low for the experiment's own descriptors.
    #[error(
        "the limit on descriptors (RLIMIT_NOFILE) is {limit}; at least {needed} are needed: ulimit -n {needed}"
    )]
    Descriptors {
        limit: u64,
        /// The limit that the experiment needs.
        needed: u64,
    },
    /// The watcher ended the experiment before the first result.
    #[error("interrupted before there was a result")]
    Interrupted,
    /// The machine is too slow for the calibration: it was not done after this time.
    #[error("not done after {} s on this machine", .0.as_secs())]
    TooSlow(Duration),
    /// A dialer could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A dial failed with an error that is not a result.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// Workers could not join a listener group, or failed in it.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Data planes could not be started, or failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
}

impl LabError {
    pub(crate) fn setting(
        setting: &'static str,
        value: impl ToString,
        accepted: impl Into<String>,
    ) -> LabError {
        LabError::Setting { setting, value: value.to_string(), accepted: accepted.into() }
    }

    pub(crate) fn call(what: impl Into<String>) -> impl FnOnce(io::Error) -> LabError {
        let what = what.into();
        move |error| LabError::Call { what, error }
    }

    /// Returns whether different settings would avoid the error, as opposed to a different environment.
    pub fn is_usage(&self) -> bool {
        matches!(self, LabError::Setting { .. } | LabError::Listen(ListenError::Impossible { .. }))
    }
}

/// Returns what to do about a sysctl that is missing.
fn way_out(error: &io::Error) -> &'static str {
    match error.kind() {
        // Linux 6.1 hides net.core.somaxconn there.
        io::ErrorKind::NotFound => "; some kernels hide it in user namespaces: run as root",
        _ => "",
    }
}
