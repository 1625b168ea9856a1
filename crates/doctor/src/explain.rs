//! The explanation of a rule as text.

use crate::rule::Rule;

/// Returns the explanation of a rule in lines that are not wrapped: a paragraph is one line.
pub fn explain(rule: &Rule) -> Vec<String> {
    let mut lines = vec![format!("{}  {}", rule.id, rule.title), String::new()];
    for paragraph in rule.explanation {
        lines.extend([(*paragraph).to_owned(), String::new()]);
    }
    lines.push(format!("Source of the figures: {}", rule.source));
    if let Some(threshold) = rule.threshold {
        lines.push(format!(
            "Threshold: {} {} (in the file of --thresholds: {} = {})",
            threshold.default, threshold.unit, rule.id, threshold.default
        ));
    }
    lines
}
