//! Errors of the crate as exceptions of `fourtuple.errors`.

use std::io;

use fourtuple::dial::{BuildError, Census, DialError, Uncounted};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

const MODULE: &str = "fourtuple.errors";

const EPERM: i32 = 1;
const EIO: i32 = 5;
const EACCES: i32 = 13;
const ECONNRESET: i32 = 104;

/// Returns the exception for a failed dial.
pub(crate) fn dial(py: Python<'_>, error: &DialError) -> PyErr {
    build(py, error).unwrap_or_else(|failure| failure)
}

fn build(py: Python<'_>, error: &DialError) -> PyResult<PyErr> {
    let errno = error.raw_os_error().unwrap_or(EIO);
    let class = class_of(error, errno);
    let keywords = PyDict::new(py);
    keywords.set_item("retryable", error.is_retryable())?;
    let (source, destination) = addresses(error);
    keywords.set_item("source", source)?;
    keywords.set_item("destination", destination)?;
    match error {
        DialError::PortsExhausted { census: Ok(census), .. } => {
            let Census { ports, established, time_wait, otherwise, .. } = *census;
            keywords.set_item("census", (ports, established, time_wait, otherwise))?;
        }
        DialError::PortsExhausted { census: Err(Uncounted::Unseen(unseen)), .. } => {
            keywords.set_item("uncounted", unseen.to_string())?;
        }
        DialError::Call { call, .. } => keywords.set_item("call", *call)?,
        _ => {}
    }
    // Alerts search for the words of the kernel, such as "Connection refused".
    let words = io::Error::from_raw_os_error(errno).to_string();
    let words = words.split(" (os error").next().unwrap_or_default();
    let text = error.to_string();
    let text = if text.contains(words) { text } else { format!("{text} ({words})") };
    raised(py, class, (errno, text), Some(&keywords))
}

/// Returns the source and the destination that an error names, as text.
fn addresses(error: &DialError) -> (Option<String>, Option<String>) {
    match error {
        DialError::PortsExhausted { source_address, destination, .. }
        | DialError::Refused { destination, source_address, .. }
        | DialError::TimedOut { destination, source_address, .. } => {
            (source_address.map(|source| source.to_string()), Some(destination.to_string()))
        }
        DialError::SourceNotLocal { source_address, .. } => (Some(source_address.to_string()), None),
        DialError::TupleBusy { local, destination, .. }
        | DialError::WouldShadow { local, destination, .. }
        | DialError::CannotSee { local, destination, .. } => {
            (Some(local.to_string()), Some(destination.to_string()))
        }
        DialError::SelfConnect { destination, .. } => (None, Some(destination.to_string())),
        DialError::Call { address, source_address, .. } => {
            (source_address.map(|source| source.to_string()), Some(address.to_string()))
        }
        _ => (None, None),
    }
}

fn class_of(error: &DialError, errno: i32) -> &'static str {
    match error {
        // Python has subclasses of OSError for these.
        DialError::Call { .. } if matches!(errno, EPERM | EACCES) => "_Denied",
        DialError::Call { .. } if errno == ECONNRESET => "_Reset",
        DialError::PortsExhausted { .. } => "PortsExhausted",
        DialError::SourceNotLocal { .. } => "SourceNotLocal",
        DialError::TupleBusy { .. } | DialError::WouldShadow { .. } => "TupleBusy",
        DialError::Refused { .. } => "Refused",
        DialError::SelfConnect { .. } => "SelfConnect",
        DialError::TimedOut { .. } => "TimedOut",
        DialError::NotSupported { .. } => "NotSupported",
        DialError::CannotSee { .. } | DialError::Call { .. } => "CallFailed",
        _ => "DialError",
    }
}

/// Returns the exception for settings that no dialer can have, or for a kernel that could not be probed.
pub(crate) fn settings(py: Python<'_>, error: &BuildError) -> PyErr {
    match error {
        BuildError::Probe(probe) => os(&probe.error, error),
        BuildError::Range { error: cause, .. } => os(cause, error),
        _ => invalid(py, error),
    }
}

/// Returns `SettingsError`, which is a `ValueError`.
pub(crate) fn invalid(py: Python<'_>, message: impl ToString) -> PyErr {
    raised(py, "SettingsError", (message.to_string(),), None).unwrap_or_else(|failure| failure)
}

/// Returns `OSError`, or the subclass that Python has for the errno.
pub(crate) fn os(cause: &io::Error, message: impl ToString) -> PyErr {
    PyOSError::new_err((cause.raw_os_error().unwrap_or(EIO), message.to_string()))
}

fn raised<'py>(
    py: Python<'py>,
    class: &str,
    arguments: impl pyo3::call::PyCallArgs<'py>,
    keywords: Option<&Bound<'py, PyDict>>,
) -> PyResult<PyErr> {
    let class = py.import(MODULE)?.getattr(class)?;
    Ok(PyErr::from_value(class.call(arguments, keywords)?))
}
