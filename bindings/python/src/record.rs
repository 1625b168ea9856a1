//! Records as JSON.

use std::collections::BTreeMap;
use std::path::Path;

use fourtuple_record::{Host, Record, Remark, SCHEMA, SCHEMA_JSON, Saved};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Serialize;
use serde_json::Error;

/// Returns a record as JSON.
pub(crate) fn json<S, R>(
    command: &str,
    started: &str,
    host: Host,
    settings: S,
    validity: Vec<Remark>,
    results: R,
) -> Result<String, Error>
where
    Record<S, R>: Serialize,
{
    serde_json::to_string(&Record {
        schema: SCHEMA.to_owned(),
        command: command.to_owned(),
        started: started.to_owned(),
        host,
        settings,
        validity,
        results,
    })
}

/// Returns the host of a record with the named sysctls and probed capabilities.
pub(crate) fn host(sysctls: &[&str], capabilities: BTreeMap<String, String>) -> Host {
    Host { capabilities, ..fourtuple_observe::host::read(Path::new("/"), sysctls) }
}

/// Converts an error of serialization, which no record causes.
pub(crate) fn unwritable(error: Error) -> PyErr {
    PyValueError::new_err(format!("the record cannot be written: {error}"))
}

/// Checks that a text is a record of this version, with every field of its command.
#[pyfunction]
pub(crate) fn check_record(text: &str) -> PyResult<()> {
    Saved::parse(text).map(drop).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Returns the JSON schema of all records.
#[pyfunction]
pub(crate) fn schema() -> &'static str {
    SCHEMA_JSON
}
