//! The explanation of a rule as text.

use crate::doctor::command::Place;
use crate::doctor::rule::Rule;

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
