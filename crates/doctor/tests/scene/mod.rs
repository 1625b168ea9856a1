//! The diagnosis of the calling thread's network namespace.

use std::path::Path;

use fourtuple_doctor::{Diagnosis, Limits, diagnose};
use fourtuple_host::snapshot::Reader;
use fourtuple_record::Finding;

/// Diagnoses the namespace as it is.
pub(crate) fn diagnosis() -> Diagnosis {
    diagnose(&Reader::new(Path::new("/")).read(), &Limits::default())
}

/// Returns the findings of a rule; fails if the rule could not be checked.
pub(crate) fn findings(id: &str) -> Vec<Finding> {
    let diagnosis = diagnosis();
    assert!(diagnosis.checked.iter().any(|checked| checked == id), "{id}: {:?}", diagnosis.unchecked);
    diagnosis.findings.into_iter().filter(|finding| finding.id == id).collect()
}
