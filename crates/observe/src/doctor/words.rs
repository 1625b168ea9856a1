//! Phrases that several rules share.

use std::cmp::Reverse;
use std::collections::BTreeMap;

pub(crate) use fourtuple_record::measure::words::{counted, grouped as count};
use fourtuple_record::snapshot::Owner;

/// Returns a share in percent without decimals, but never 100 for less than all: `98%`.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    format!("{}%", (u128::from(part) * 100).checked_div(whole.into()).unwrap_or(0))
}

/// Returns a counted subject with its verb in the plural: `1 connection waits`, `3 connections wait`, `1 socket is`.
pub(crate) fn doing(number: u64, noun: &str, verb: &str) -> String {
    let verb = match (number, verb) {
        (1, "are") => "is".to_owned(),
        (1, "were") => "was".to_owned(),
        (1, "have") => "has".to_owned(),
        (1, _) => format!("{verb}s"),
        _ => verb.to_owned(),
    };
    format!("{} {verb}", counted(number, noun))
}

/// Returns dropped segments of handshakes: `1 SYN or ACK`, `371 SYNs and ACKs`.
pub(crate) fn segments(number: u64) -> String {
    if number == 1 { "1 SYN or ACK".to_owned() } else { count(number) + " SYNs and ACKs" }
}

/// Returns a text with a value in place of a word, which is not a part of another one: `PORT` of `port PORT`, not of `SO_REUSEPORT`.
pub(crate) fn filled(text: &str, word: &str, value: &str) -> String {
    let is_part =
        |letter: Option<char>| letter.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
    let (mut filled, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(word) {
        let (before, after) = (&rest[..at], &rest[at + word.len()..]);
        let is_word =
            !is_part(filled.chars().chain(before.chars()).next_back()) && !is_part(after.chars().next());
        filled.push_str(before);
        filled.push_str(if is_word { value } else { word });
        rest = after;
    }
    filled + rest
}

/// Returns `nginx[812]`.
pub(crate) fn process(owner: &Owner) -> String {
    owner.to_string()
}

/// Returns `curl[812]`, or `curl (7 processes)`.
pub(crate) fn callers(owner: &Owner, processes: u32) -> String {
    match processes {
        0 | 1 => owner.to_string(),
        several => format!("{} ({})", owner.name, counted(several.into(), "process")),
    }
}

/// Returns the process that made calls; many short processes with one name have the number 0, and no command may name one of them.
pub(crate) fn caller(owner: &Owner, processes: u32) -> Owner {
    Owner { pid: if processes > 1 { 0 } else { owner.pid }, ..owner.clone() }
}

/// Returns sockets by state, the largest number first: `28,000 time-wait, 231 established`.
pub(crate) fn states(states: &BTreeMap<String, u64>) -> String {
    let mut states: Vec<(&String, &u64)> = states.iter().collect();
    states.sort_by_key(|(_, sockets)| Reverse(*sockets));
    states.iter().map(|(name, sockets)| format!("{} {name}", count(**sockets))).collect::<Vec<_>>().join(", ")
}

/// Returns a time: `42 s`, `7 min`, `3 h`.
pub(crate) fn time(seconds: f64) -> String {
    match seconds {
        ..120.0 => format!("{seconds:.0} s"),
        ..7200.0 => format!("{:.0} min", seconds / 60.0),
        _ => format!("{:.0} h", seconds / 3600.0),
    }
}

/// Returns a rate: `465/s`, `1.5/s`, `28,232/s`.
pub(crate) fn rate(per_s: f64) -> String {
    if per_s < 10.0 { format!("{per_s:.1}/s") } else { format!("{}/s", count(per_s.round() as u64)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_words_are_filled() {
        let text = "PORT of SO_REUSEPORT and NO_PORT, PORTS, :PORT";
        assert_eq!(filled(text, "PORT", "80"), "80 of SO_REUSEPORT and NO_PORT, PORTS, :80");
    }

    #[test]
    fn figures_are_short() {
        for (found, expected) in [
            (count(28_231), "28,231"),
            (count(1_000_000), "1,000,000"),
            (count(999), "999"),
            (percent(28_231, 28_232), "99%"),
            (percent(1, 0), "0%"),
            (rate(0.33), "0.3/s"),
            (rate(465.4), "465/s"),
            (rate(28_232.0), "28,232/s"),
            (time(42.0), "42 s"),
            (time(400.0), "7 min"),
            (time(10_800.0), "3 h"),
            (doing(0, "connection", "wait"), "0 connections wait"),
            (doing(1, "connection", "wait"), "1 connection waits"),
            (doing(2, "connection", "wait"), "2 connections wait"),
            (doing(1, "entry", "are"), "1 entry is"),
            (doing(1, "entry", "were"), "1 entry was"),
            (doing(1, "entry", "have"), "1 entry has"),
            (counted(1, "call"), "1 call"),
            (counted(1_200, "call"), "1,200 calls"),
        ] {
            assert_eq!(found, expected);
        }
    }
}
