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

use crate::doctor::rule::Rule;

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
