use std::path::Path;
use std::process::ExitCode;

use fourtuple::listen::ListenError;
use fourtuple_forward::ForwardError;
use fourtuple_lab::LabError;
use fourtuple_load::LoadError;
use fourtuple_serve::ServeError;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// It did what was asked.
    Fine,
    /// Bad usage.
    Usage,
    /// There is a result, and a reason not to believe it wholly.
    NotValid,
    /// This environment cannot do it.
    Environment,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(match exit {
            Exit::Fine => 0,
            Exit::Usage => 2,
            Exit::NotValid => 3,
            Exit::Environment => 4,
        })
    }
}

/// A value that was understood and cannot be met.
#[derive(Debug)]
pub(crate) struct UsageError(pub(crate) String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

impl std::error::Error for UsageError {}

/// There is no result that may be believed.
#[derive(Debug)]
pub(crate) struct NotValid(pub(crate) String);

impl std::fmt::Display for NotValid {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

impl std::error::Error for NotValid {}

/// The exit code of a command that failed: usage where other flags would have helped, not valid
/// when it was interrupted or gave nothing to believe, else the environment.
pub(crate) fn of(error: &anyhow::Error) -> Exit {
    let usage = error.chain().any(|cause| {
        cause.is::<UsageError>()
            || cause.downcast_ref::<LabError>().is_some_and(LabError::is_usage)
            || cause.downcast_ref::<ServeError>().is_some_and(ServeError::is_usage)
            || cause.downcast_ref::<ForwardError>().is_some_and(ForwardError::is_usage)
            || matches!(cause.downcast_ref::<LoadError>(), Some(LoadError::Setting(_)))
    });
    let not_valid = error.chain().any(|cause| {
        cause.is::<NotValid>() || matches!(cause.downcast_ref::<LabError>(), Some(LabError::Interrupted))
    });
    if usage {
        Exit::Usage
    } else if not_valid {
        Exit::NotValid
    } else {
        Exit::Environment
    }
}

/// One line: what failed, then each cause that says more. A setting is called by its flag.
pub(crate) fn message(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = setting(cause).unwrap_or_else(|| cause.to_string());
        // Many errors quote their cause, so that they say all by themselves.
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    line.replace('\n', " ")
}

/// A setting that cannot be met, called by its flag.
fn setting(cause: &(dyn std::error::Error + 'static)) -> Option<String> {
    let line = |setting: &str, value: &dyn std::fmt::Display, accepted: &str| {
        format!("invalid value '{value}' for '--{setting}': {accepted}")
    };
    if let Some(LabError::Setting { setting, value, accepted }) = cause.downcast_ref() {
        return Some(line(setting, value, accepted));
    }
    if let Some(LabError::Listen(error @ ListenError::Impossible { policy, .. })) = cause.downcast_ref() {
        return Some(line("policy", policy, &error.to_string()));
    }
    let free = "expected a path that is free, or a socket that nobody listens on";
    let at = |path: &Path| format!("unix:{}", path.display());
    match cause.downcast_ref()? {
        ServeError::Setting { setting, value, accepted } => Some(line(setting, value, accepted)),
        ServeError::Group(ListenError::PathInUse { path }) => {
            Some(line("listen", &at(path), &format!("another program listens there; {free}")))
        }
        ServeError::Group(ListenError::NotASocket { path }) => {
            Some(line("listen", &at(path), &format!("there is something else than a socket; {free}")))
        }
        ServeError::Group(ListenError::Impossible { policy, .. }) => {
            Some(line("policy", policy, &cause.to_string()))
        }
        _ => None,
    }
}
