//! The table of rules: a file and a line each.

mod p01_budget;

use crate::rule::Rule;

/// All rules, by name.
pub const ALL: &[Rule] = &[p01_budget::RULE];

/// Returns the rule of this name, in upper or lower case.
pub fn named(id: &str) -> Option<&'static Rule> {
    ALL.iter().find(|rule| rule.id.eq_ignore_ascii_case(id))
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
