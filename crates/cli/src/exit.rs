use std::path::Path;
use std::process::ExitCode;

use fourtuple::dial::BuildError;
use fourtuple::listen::ListenError;
use fourtuple_bench::lab::LabError;
use fourtuple_bench::load::LoadError;
use fourtuple_bench::serve::ServeError;
use fourtuple_fix::{AcceptError, FixError, RunError};
use fourtuple_forward::ForwardError;
use fourtuple_observe::host::namespace::NamespaceError;
use fourtuple_record::printable;

/// The exit status of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The command did what was requested (0).
    Fine,
    /// `doctor` found a fault, or a threshold of `load` is not met (1).
    Findings,
    /// The flags or arguments are wrong (2).
    Usage,
    /// The record has remarks on its validity (3).
    NotValid,
    /// The environment does not support the command (4).
    Environment,
    /// The exit code of a program that the command has run.
    Program(u8),
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(match exit {
            Exit::Fine => 0,
            Exit::Findings => 1,
            Exit::Usage => 2,
            Exit::NotValid => 3,
            Exit::Environment => 4,
            Exit::Program(code) => code,
        })
    }
}

/// A well-formed value that the command cannot accept.
#[derive(Debug)]
pub struct UsageError(pub String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

impl std::error::Error for UsageError {}

/// An error after which no result is valid.
#[derive(Debug)]
pub struct NotValid(pub String);

impl std::fmt::Display for NotValid {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

impl std::error::Error for NotValid {}

/// Returns the exit status for an error: usage if other flags would avoid it, not valid if the command was interrupted or
/// has no valid result, else environment.
pub fn of(error: &anyhow::Error) -> Exit {
    let usage = error.chain().any(|cause| {
        cause.is::<UsageError>()
            || cause.downcast_ref::<LabError>().is_some_and(LabError::is_usage)
            || cause.downcast_ref::<ServeError>().is_some_and(ServeError::is_usage)
            || cause.downcast_ref::<NamespaceError>().is_some_and(NamespaceError::is_usage)
            || cause.downcast_ref::<FixError>().is_some_and(FixError::is_usage)
            || cause.downcast_ref::<AcceptError>().is_some_and(AcceptError::is_usage)
            || cause.downcast_ref::<ForwardError>().is_some_and(ForwardError::is_usage)
            || matches!(cause.downcast_ref::<LoadError>(), Some(LoadError::Setting(_)))
            || matches!(cause.downcast_ref::<BuildError>(), Some(BuildError::Family { .. }))
    });
    let not_valid = error.chain().any(|cause| {
        cause.is::<NotValid>()
            || cause.downcast_ref::<FixError>().is_some_and(FixError::is_not_valid)
            || matches!(cause.downcast_ref::<LabError>(), Some(LabError::Interrupted))
    });
    if let Some(error) = error.chain().find_map(|cause| cause.downcast_ref::<RunError>()) {
        Exit::Program(error.exit_code())
    } else if usage {
        Exit::Usage
    } else if not_valid {
        Exit::NotValid
    } else {
        Exit::Environment
    }
}

/// Formats an error as one line: the error, then each cause whose text is not yet in the line. A setting has the name of its
/// flag.
pub fn message(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = setting(cause).unwrap_or_else(|| cause.to_string());
        // Many errors already contain the text of their cause.
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    quoted_once(&printable(&line))
}

/// Removes the second quotation of a refused value: the parser of a value does not know that its error is part of a line.
pub(crate) fn quoted_once(line: &str) -> String {
    let value = line.strip_prefix("invalid value '").and_then(|rest| rest.split_once("' for '"));
    match value {
        Some((value, _)) => line
            .replacen(&format!(": {value:?} is not accepted: expected "), ": expected ", 1)
            .replacen(&format!(": {value:?} is "), ": it is ", 1),
        None => line.to_owned(),
    }
}

/// Formats an error about a setting with the name of its flag; `None` for other errors.
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
    let free = "expected a free path, or a socket without a listener";
    let at = |path: &Path| format!("unix:{}", path.display());
    match cause.downcast_ref()? {
        ServeError::Setting { setting, value, accepted } => Some(line(setting, value, accepted)),
        ServeError::Group(ListenError::PathInUse { path, .. }) => {
            Some(line("listen", &at(path), &format!("another program listens there; {free}")))
        }
        ServeError::Group(ListenError::NotASocket { path, .. }) => {
            Some(line("listen", &at(path), &format!("there is something else than a socket; {free}")))
        }
        ServeError::Group(ListenError::Impossible { policy, .. }) => {
            Some(line("policy", policy, &cause.to_string()))
        }
        _ => None,
    }
}
