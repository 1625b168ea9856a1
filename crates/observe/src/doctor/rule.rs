//! A rule.

use fourtuple_record::snapshot::Snapshot;

use crate::doctor::draft::Draft;

/// A rule: what it looks for, and the function that looks.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Name of the rule: a letter for the area and two digits.
    pub id: &'static str,
    /// The fault in a few words.
    pub title: &'static str,
    /// Where the figures come from: files, system calls, and kernel functions.
    pub source: &'static str,
    /// The value from which on the rule has a finding; `None`: the rule needs no number.
    pub threshold: Option<Threshold>,
    /// Why the fault matters and what to do, in paragraphs of one line each.
    pub explanation: &'static [&'static str],
    /// Returns the findings; the number is the threshold, 0 if there is none.
    pub(crate) check: fn(&Snapshot, f64) -> Checked,
}

/// The value from which on a rule has a finding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Threshold {
    /// The value unless the user sets another.
    pub default: f64,
    /// The unit of the value: `% of the usable ports`.
    pub unit: &'static str,
}

/// The findings of a rule, or the reason why the rule could not be checked.
pub(crate) type Checked = Result<Vec<Draft>, String>;

/// Joins the findings of two sources of a rule, such as the readings and a trace, or TCP and unix sockets. A source adds findings and hides
/// none: the rule is unchecked only if nothing was found and a source is missing.
pub(crate) fn joined(readings: Checked, trace: Checked) -> Checked {
    match (readings, trace) {
        (Ok(mut readings), Ok(trace)) => {
            readings.extend(trace);
            Ok(readings)
        }
        (Ok(found), Err(_)) | (Err(_), Ok(found)) if !found.is_empty() => Ok(found),
        (Err(reason), _) | (_, Err(reason)) => Err(reason),
    }
}
