//! The table of rules: a line each. Rules of one family share a file.

mod accept;
pub(crate) mod balance;
mod connect;
mod descriptors;
#[cfg(test)]
mod edges;
mod locks;
mod network;
mod ports;
mod time_wait;
pub(crate) mod x01_unexplained;

use std::collections::BTreeMap;

use fourtuple_record::snapshot::Snapshot;

use crate::doctor::command::Place;
use crate::doctor::draft::Draft;

pub const ALL: &[Rule] = &[
    accept::A01,
    accept::A02,
    accept::A03,
    accept::A04,
    accept::A05,
    accept::A06,
    accept::A07,
    balance::B01,
    balance::B02,
    balance::B03,
    balance::B04,
    descriptors::F01,
    descriptors::F02,
    locks::L01,
    locks::L02,
    locks::L03,
    network::N01,
    network::N02,
    ports::P01,
    ports::P02,
    ports::P03,
    ports::P04,
    ports::P05,
    ports::P06,
    connect::P07,
    connect::P08,
    connect::P09,
    connect::P10,
    connect::P11,
    connect::P12,
    time_wait::T01,
    time_wait::T02,
    time_wait::T03,
    time_wait::T04,
    time_wait::T05,
    time_wait::T06,
    time_wait::T07,
    network::U01,
    network::U02,
    network::U03,
    x01_unexplained::RULE,
];

/// Returns the rule of this name, in upper or lower case: `P02`, `p2`.
pub fn named(id: &str) -> Option<&'static Rule> {
    ALL.iter().find(|rule| {
        let short = rule.id.replacen('0', "", 1);
        rule.id.eq_ignore_ascii_case(id) || short.len() < rule.id.len() && short.eq_ignore_ascii_case(id)
    })
}

/// Returns the rules about a word: those whose title has it, else those whose explanation has it.
pub fn about(word: &str) -> Vec<&'static Rule> {
    let word = word.to_lowercase();
    let has = |text: &str| text.to_lowercase().contains(&word);
    let titled: Vec<&Rule> = ALL.iter().filter(|rule| has(rule.title)).collect();
    match titled.is_empty() {
        false => titled,
        true => ALL.iter().filter(|rule| rule.explanation.iter().any(|line| has(line))).collect(),
    }
}

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
pub(crate) fn joined<T>(
    readings: Result<Vec<T>, String>,
    trace: Result<Vec<T>, String>,
) -> Result<Vec<T>, String> {
    match (readings, trace) {
        (Ok(mut readings), Ok(trace)) => {
            readings.extend(trace);
            Ok(readings)
        }
        (Ok(found), Err(_)) | (Err(_), Ok(found)) if !found.is_empty() => Ok(found),
        (Err(reason), _) | (_, Err(reason)) => Err(reason),
    }
}

/// Returns the findings of a rule that names processes; without any, the rule is unchecked if `is_hidden` says that some which it would have
/// to look at are not visible.
pub(crate) fn of_visible<T>(found: Vec<T>, is_hidden: bool) -> Result<Vec<T>, String> {
    const REASON: &str = "some processes are not visible; run as root in the PID namespace of the host";
    if found.is_empty() && is_hidden { Err(REASON.to_owned()) } else { Ok(found) }
}

// The explanation of a rule as text.

/// Returns the explanation of a rule in lines that are not wrapped: a paragraph is one line. Commands can be pasted at the
/// place.
pub fn explain(rule: &Rule, place: &Place<'_>) -> Vec<String> {
    let mut lines = vec![format!("{}  {}", rule.id, rule.title), String::new()];
    for paragraph in rule.explanation {
        lines.extend([place.sentence(paragraph), String::new()]);
    }
    lines.push(format!("Source of the figures: {}", place.sentence(rule.source)));
    if let Some(threshold) = rule.threshold {
        lines.push(format!(
            "Threshold: {} {} (in the file of --thresholds: {} = {})",
            threshold.default, threshold.unit, rule.id, threshold.default
        ));
    }
    lines
}

// The thresholds of rules.

/// Thresholds that differ from the default of their rule.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    set: BTreeMap<&'static str, f64>,
}

/// The reason why a threshold was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LimitError {
    /// No rule has this name.
    #[error("{0}: there is no such rule; `fourtuple explain` lists the rules")]
    Unknown(String),
    /// The rule has no threshold.
    #[error("{0} has no threshold")]
    Without(&'static str),
    /// The value is negative or not finite.
    #[error("{id} = {value}: expected a positive number of {unit}")]
    Value {
        /// Name of the rule.
        id: &'static str,
        /// The refused value.
        value: f64,
        unit: &'static str,
    },
}

impl Limits {
    /// Sets the threshold of a rule.
    ///
    /// # Errors
    ///
    /// [`LimitError`]
    pub fn set(&mut self, id: &str, value: f64) -> Result<(), LimitError> {
        let rule = named(id).ok_or_else(|| LimitError::Unknown(id.to_owned()))?;
        let threshold = rule.threshold.ok_or(LimitError::Without(rule.id))?;
        if !(value.is_finite() && value > 0.0) {
            return Err(LimitError::Value { id: rule.id, value, unit: threshold.unit });
        }
        self.set.insert(rule.id, value);
        Ok(())
    }

    /// Returns the threshold of a rule, 0 for a rule without one.
    pub fn of(&self, rule: &Rule) -> f64 {
        let default = rule.threshold.map_or(0.0, |threshold| threshold.default);
        self.set.get(rule.id).copied().unwrap_or(default)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_in_order_and_complete() {
        for rule in ALL {
            assert!(!rule.title.is_empty() && !rule.source.is_empty(), "{}", rule.id);
            assert!(rule.explanation.len() >= 2, "{} explains the fault and the remedy", rule.id);
        }
        assert!(ALL.is_sorted_by(|a, b| a.id < b.id), "in the order of their names, each once");
    }
}
