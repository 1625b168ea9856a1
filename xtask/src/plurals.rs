//! `cargo xtask plurals`: sentences that break at 1, a number of its own before a noun in the plural, as in `"{} ports"`. `words::counted` of
//! `fourtuple-record` and `words::doing` of `fourtuple-observe` count nouns.
//!
//! A part of a whole reads well with every number (`1 of 1 ports`), and so do a number after `the`, where the sentence names a plural, a number
//! with decimals (`1.0 ports`) and a rate.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::Workspace;

/// The crates whose strings are sentences for users.
const CRATES: &[&str] = &["bench", "cli", "fix", "forward", "observe", "report"];

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

/// Prints each such sentence; returns true if there is none.
pub(crate) fn run() -> Result<bool> {
    let root = Workspace::read()?.root;
    let mut faults = 0;
    for name in CRATES {
        faults += below(&root, &root.join("crates").join(name).join("src"))?;
    }
    Ok(faults == 0)
}

fn below(root: &Path, directory: &Path) -> Result<usize> {
    let mut faults = 0;
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let path = entry?.path();
        // Messages of tests.
        if path.file_stem().is_some_and(|name| name == "tests") {
            continue;
        }
        if path.is_dir() {
            faults += below(root, &path)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            for (line, noun) in in_file(&text) {
                let path = path.strip_prefix(root).unwrap_or(&path).display();
                println!(
                    "{path}:{line}: a number before `{noun}` breaks at 1: words::counted or words::doing"
                );
                faults += 1;
            }
        }
    }
    Ok(faults)
}

/// Returns the line and the noun of each such sentence of a file, except in comments and in its tests.
fn in_file(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let (mut joined, mut first) = (String::new(), 0);
    // A single item of tests, such as `mod edges;`, may stand above code.
    let product = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or(text);
    for (at, line) in product.lines().enumerate() {
        let line = line.trim_start();
        if line.starts_with("//") {
            continue;
        }
        if joined.is_empty() {
            first = at + 1;
        }
        // A literal over several lines.
        match line.strip_suffix('\\') {
            Some(part) => joined.push_str(part),
            None => {
                joined.push_str(line);
                found.extend(plurals(&joined).into_iter().map(|noun| (first, noun)));
                joined.clear();
            }
        }
    }
    found
}

/// Returns the plural nouns of a line that follow a placeholder, with at most one adjective in between.
fn plurals(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in line.match_indices("} ") {
        let Some(open) = line[..at].rfind('{') else { continue };
        let (before, name, after) = (line[..open].trim_end(), &line[open + 1..at], &line[at + 2..]);
        // An escaped brace is text. A constant is greater than 1.
        let is_text = line[..at].ends_with('}') || before.ends_with('{');
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

    #[test]
    fn numbers_before_plurals_are_caught() {
        let text = "#[cfg(test)]\nmod b;\nfn a() {\nf(\"{} ports\");\nf(\"uses {used} \\\n   free ports, {} of {} searches\"); f(\"{} {}\") }\n\
                    // {} ports\n#[cfg(test)]\nmod tests { const A: &str = \"{} ports\"; }";
        assert_eq!(in_file(text), [(4, "ports".to_owned()), (5, "ports".to_owned())]);
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
