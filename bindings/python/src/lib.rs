//! The extension module `fourtuple._native`: the dialer of the crate `fourtuple` for sockets of Python, and the records of `plan` and
//! `doctor`.
//!
//! Python owns the sockets and calls connect(). The module sets the options of a socket before connect() and chooses the next step
//! after a failure; records cross the border as JSON. The package in `python/fourtuple` makes the public interface of it.
#![forbid(unsafe_code)]

mod dialer;
mod errors;
mod records;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::dialer::{Attempt, Dialer, family_open_to_choice, probe};
    #[pymodule_export]
    use crate::records::{check_record, doctor, plan, schema};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
