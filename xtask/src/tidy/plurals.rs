//! Finds sentences that break at 1: a number of its own before a noun in the plural, as in `"{} ports"`. `words::counted` of
//! `fourtuple-measure` and `words::doing` of `fourtuple-doctor` count nouns.
//!
//! A part of a whole reads well with every number (`1 of 1 ports`), and so do a number after `the`, where the sentence names a plural, a number
//! with decimals (`1.0 ports`) and a rate.

use crate::tidy::lexer::Kind;
use crate::tidy::tree::{Fault, Tree};

/// The crates whose strings are sentences for users.
const CRATES: &[&str] = &["cli", "doctor", "fix", "forward", "lab", "load", "plan", "report", "trace"];

/// The nouns that sentences count.
const NOUNS: &[&str] = &[
    "addresses",
    "bytes",
    "collisions",
    "connections",
    "CPUs",
    "datagrams",
    "descriptors",
    "destinations",
    "dials",
    "drops",
    "entries",
    "errors",
    "events",
    "failures",
    "handshakes",
    "hosts",
    "listeners",
    "messages",
    "operations",
    "overflows",
    "packets",
    "pages",
    "planes",
    "ports",
    "processes",
    "processors",
    "queries",
    "requests",
    "resets",
    "retransmissions",
    "samples",
    "searches",
    "slots",
    "sockets",
    "sources",
    "SYNs",
    "symptoms",
    "threads",
    "transactions",
    "tuples",
    "wakeups",
    "waits",
    "workers",
];

/// Words before a number that is one of several.
const BEFORE: &[&str] = &["its", "of", "the", "two"];

/// Words after a number that has no noun.
const BETWEEN: &[&str] = &["B", "at", "for", "from", "in", "of", "on", "to", "when", "with"];

pub(super) fn check(tree: &Tree) -> Vec<Fault> {
    let mut faults = Vec::new();
    for source in &tree.sources {
        if !CRATES.iter().any(|name| source.path.starts_with(format!("crates/{name}/src"))) {
            continue;
        }
        for token in source.product_tokens().iter().filter(|token| token.kind == Kind::Literal) {
            let found = plurals(token.text).into_iter();
            faults.extend(found.map(|noun| {
                let message = format!("a number before `{noun}` breaks at 1: words::counted or words::doing");
                Fault::at(&source.path, token.line, message)
            }));
        }
    }
    faults
}

/// Returns the plural nouns of a format string that follow a placeholder, with at most one adjective in between.
fn plurals(literal: &str) -> Vec<String> {
    let joined: String = literal.lines().map(|line| line.trim_start().trim_end_matches('\\')).collect();
    let mut found = Vec::new();
    for (at, _) in joined.match_indices("} ") {
        let Some(open) = joined[..at].rfind('{') else { continue };
        let (before, name, after) = (joined[..open].trim_end(), &joined[open + 1..at], &joined[at + 2..]);
        // An escaped brace is text. A constant is greater than 1.
        let is_text = joined[..at].ends_with('}') || before.ends_with('{');
        let is_constant = !name.is_empty() && name.chars().all(|c| c.is_ascii_uppercase() || c == '_');
        let has_decimals = name.contains(":.") && !name.ends_with(":.0");
        let last = before.rsplit([' ', '"', '(']).next().unwrap_or_default().to_lowercase();
        // After another placeholder it is an adjective.
        let is_part = BEFORE.contains(&last.as_str()) || last.ends_with('}');
        if !(is_text || is_constant || has_decimals || is_part) {
            found.extend(first_noun(after));
        }
    }
    found
}

/// Returns the plural noun at the start, which may have one adjective.
fn first_noun(text: &str) -> Option<String> {
    for (at, word) in text.split(' ').take(2).enumerate() {
        let plain = word.split(|c: char| !c.is_alphanumeric() && c != '-' && c != '_').next()?;
        if NOUNS.contains(&plain) {
            let rest = text.split(' ').skip(at + 1).take(2).collect::<Vec<_>>().join(" ");
            let is_rate = word[plain.len()..].starts_with('/')
                || ["per ", "a second"].iter().any(|rate| rest.starts_with(rate));
            return (!is_rate).then(|| plain.to_owned());
        }
        // Punctuation and prepositions end the phrase.
        if plain.len() < word.len() || BETWEEN.contains(&plain) {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::fixture::{lines, tree};

    #[test]
    fn numbers_before_plurals_are_caught() {
        let text = "fn a() {\nf(\"{} ports\");\nf(\"uses {used} \\\n   free ports, {} of {} searches\"); f(\"{} {}\") }\n\
                    #[cfg(test)]\nmod tests { const A: &str = \"{} ports\"; }";
        let found = lines(check(&tree(Vec::new(), &[("crates/doctor/src/a.rs", text)])));
        let places: Vec<&str> = found.iter().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(places, ["crates/doctor/src/a.rs:2:", "crates/doctor/src/a.rs:3:"], "{found:?}");
    }

    #[test]
    fn counted_nouns_and_parts_pass() {
        for text in [
            "{} of {} ports",
            "the {} ports",
            "{name} has {} in use",
            "{{}} ports",
            "{connections} fit",
            "{:.0} ports/s",
            "{:.0} ports per second",
            "{:.1} ports",
        ] {
            assert_eq!(plurals(text), Vec::<String>::new(), "{text}");
        }
    }
}
