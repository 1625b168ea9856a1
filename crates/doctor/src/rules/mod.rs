//! The table of rules: a file and a line each.

mod p01_budget;
mod p02_parity;
mod p03_range;
mod p04_reserved;
mod p05_listeners;
mod p06_held;
mod p07_unavailable;
mod p08_bind_first;
mod p09_slow_search;
mod p10_forecast;
mod p11_source;
mod p12_shared;
mod t01_buckets;
mod t02_cut_short;
mod t03_reuse;
mod t04_timestamps;
mod t05_myths;
mod t06_first_close;
mod t07_close_wait;

use crate::rule::Rule;

/// All rules, by name.
pub const ALL: &[Rule] = &[
    p01_budget::RULE,
    p02_parity::RULE,
    p03_range::RULE,
    p04_reserved::RULE,
    p05_listeners::RULE,
    p06_held::RULE,
    p07_unavailable::RULE,
    p08_bind_first::RULE,
    p09_slow_search::RULE,
    p10_forecast::RULE,
    p11_source::RULE,
    p12_shared::RULE,
    t01_buckets::RULE,
    t02_cut_short::RULE,
    t03_reuse::RULE,
    t04_timestamps::RULE,
    t05_myths::RULE,
    t06_first_close::RULE,
    t07_close_wait::RULE,
];

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
