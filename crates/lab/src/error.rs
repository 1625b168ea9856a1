use std::io;

use fourtuple::dial::{BuildError, DialError};
use fourtuple::listen::ListenError;
use fourtuple::ports::CostError;
use fourtuple_forward::ForwardError;

/// Why an experiment could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// A setting that no run can meet.
    #[error("invalid {setting} {value}: {accepted}")]
    Setting {
        /// Which one, as it is called in records: `range`.
        setting: &'static str,
        /// What it was.
        value: String,
        /// What is accepted instead, and why.
        accepted: String,
    },
    /// The costs that were measured make no model.
    #[error(transparent)]
    Costs(#[from] CostError),
    /// No namespace is to be had.
    #[error(
        "cannot make a network namespace: {0}. Run as root, or allow user namespaces \
         (user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
    )]
    Namespace(#[source] io::Error),
    /// A sysctl of the experiment's own namespace could not be set.
    #[error("cannot set {name} = {value} in the experiment's namespace: {error}")]
    Sysctl {
        /// Dotted name.
        name: String,
        /// What it was to be.
        value: String,
        /// Why not.
        #[source]
        error: io::Error,
    },
    /// A system call that the experiment cannot do without.
    #[error("{what}: {error}")]
    Call {
        /// What it was for.
        what: String,
        /// Why not.
        #[source]
        error: io::Error,
    },
    /// Too few descriptors even for the experiment's own hands.
    #[error(
        "the limit on descriptors (RLIMIT_NOFILE) is {limit}; at least {needed} are needed: ulimit -n {needed}"
    )]
    Descriptors {
        /// The hard limit.
        limit: u64,
        /// What is needed.
        needed: u64,
    },
    /// Ended by the watcher before there was anything to keep.
    #[error("interrupted before there was a result")]
    Interrupted,
    /// A dialer could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A dial failed in a way that is no result.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// Workers could not be put behind a listener, or failed there.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Planes could not be started, or failed.
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

    /// Whether other settings would have helped, rather than another environment.
    pub fn is_usage(&self) -> bool {
        matches!(self, LabError::Setting { .. } | LabError::Listen(ListenError::Impossible { .. }))
    }
}
