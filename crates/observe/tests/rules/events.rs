//! Readings with an event in between.

use std::path::Path;

use fourtuple_observe::host::snapshot::Reader;
use fourtuple_record::snapshot::Snapshot;
use fourtuple_record::{Finding, Proof, Severity};

use crate::namespace::advice;
use crate::scene::{apply, findings, findings_in, read};

/// Returns the findings of a rule after two readings of the namespace with an event between them.
pub(crate) fn between(id: &str, event: impl FnOnce()) -> Vec<Finding> {
    findings_in(&snapshot(event), id)
}

/// Returns the snapshot of two readings of the namespace with an event between them.
pub(crate) fn snapshot(event: impl FnOnce()) -> Snapshot {
    let mut reader = Reader::new(Path::new("/"));
    read(&mut reader);
    event();
    read(&mut reader)
}

/// Returns the only finding, and checks its severity and a part of its verdict.
#[track_caller]
pub(crate) fn only(found: &[Finding], severity: Severity, verdict: &str) -> Finding {
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].severity, severity, "{}", found[0].verdict);
    assert!(found[0].verdict.contains(verdict), "{} does not contain {verdict}", found[0].verdict);
    found[0].clone()
}

/// Applies the advice whose action contains a text; the rule has no finding after it.
#[track_caller]
pub(crate) fn cured(finding: &Finding, text: &str) {
    apply(advice(finding, text));
    let left = findings(&finding.id);
    assert!(left.is_empty(), "{left:#?}");
}

/// Sets the sysctl of the first sysctl whose effect was computed.
#[track_caller]
pub(crate) fn apply_first(finding: &Finding) {
    let advice = finding
        .now
        .iter()
        .find(|advice| advice.proof == Proof::Calculation && advice.action.starts_with("sysctl -w "));
    apply(advice.unwrap_or_else(|| panic!("no sysctl in {finding:?}")));
}
