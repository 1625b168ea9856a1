//! Phrases and command lines that several records use.

use std::collections::BTreeMap;
use std::fmt::Display;

pub(crate) use fourtuple_record::measure::words::counted as plural;
pub(crate) use fourtuple_record::{CommandLine, exact_duration as typed};

use crate::number::{NOTHING, count};

/// Formats `9024-65535 (56,512 ports)`.
pub(crate) fn range(low: u16, high: u16) -> String {
    let ports = (u64::from(high) + 1).saturating_sub(low.into());
    format!("{low}-{high} ({})", plural(ports, "port"))
}

/// Formats `one run each`, `medians of 3 runs each`.
pub(crate) fn repeats(repeats: u32) -> String {
    if repeats == 1 { "one run each".to_owned() } else { format!("medians of {repeats} runs each") }
}

/// `12 ECONNRESET, 3 timeout`; empty without any.
pub(crate) fn errors<'a, N: Display + 'a>(errors: impl IntoIterator<Item = (&'a N, &'a u64)>) -> String {
    let words = |(name, number): (&N, &u64)| format!("{} {name}", count(*number));
    errors.into_iter().map(words).collect::<Vec<_>>().join(", ")
}

/// Formats `ECONNRESET 3, request-cut 1`; empty without any.
pub(crate) fn reasons(reasons: &BTreeMap<String, u64>) -> String {
    reasons.iter().map(|(name, number)| format!("{name} {}", count(*number))).collect::<Vec<_>>().join(", ")
}

/// Returns list items without names.
pub(crate) fn unnamed<'a>(
    lines: impl IntoIterator<Item = &'a String>,
) -> impl Iterator<Item = (String, String)> {
    lines.into_iter().map(|line| (String::new(), line.clone()))
}

/// Returns the items that exist: facts and figures of which some depend on the record.
pub(crate) fn present<T, const N: usize>(items: [Option<T>; N]) -> Vec<T> {
    items.into_iter().flatten().collect()
}

/// Groups items with equal keys; keeps the order of first occurrence.
pub(crate) fn grouped<T, K: PartialEq>(items: &[T], key: impl Fn(&T) -> K) -> Vec<Vec<&T>> {
    let mut groups: Vec<Vec<&T>> = Vec::new();
    for item in items {
        match groups.iter_mut().find(|group| key(group[0]) == key(item)) {
            Some(group) => group.push(item),
            None => groups.push(vec![item]),
        }
    }
    groups
}

/// Formats a ratio with three decimals; values from 10,000 in scientific notation.
pub(crate) fn ratio(ratio: f64) -> String {
    if ratio < 1e4 { format!("{ratio:.3}") } else { format!("{ratio:.3e}") }
}

/// Formats Jain's index with three decimals: ladders differ in the first, good hashes in the third.
pub(crate) fn index(jain: Option<f64>) -> String {
    jain.filter(|jain| jain.is_finite()).map_or_else(|| NOTHING.to_owned(), |jain| format!("{jain:.3}"))
}

/// Quotes a text as one word for a shell.
pub(crate) fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Quotes a text if a shell would split it.
pub(crate) fn word(text: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "/:.-_@%+,=".contains(letter);
    if text.chars().all(plain) { text.to_owned() } else { quoted(text) }
}

/// Joins the values of a list flag: `1,4,2`.
pub(crate) fn list<T: ToString>(values: &[T]) -> String {
    values.iter().map(T::to_string).collect::<Vec<_>>().join(",")
}

/// Formats the value of `--close-every`.
pub(crate) fn every(requests: u64) -> String {
    if requests == 0 { "never".to_owned() } else { requests.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_for_the_command_line_are_exact() {
        assert_eq!(
            [60_000_000_000, 1_500_000_000, 7_000, 7_001, 0].map(typed).join(" "),
            "60s 1500ms 7us 7001ns 0s"
        );
    }

    #[test]
    fn a_command_without_spaces_is_one_word() {
        assert_eq!(quoted("lab 'ports'"), r"'lab '\''ports'\'''");
    }

    #[test]
    fn a_word_is_quoted_where_a_shell_would_split_it() {
        assert_eq!(word("http://127.0.0.1:8080/a_b-c.html"), "http://127.0.0.1:8080/a_b-c.html");
        for target in ["http://[::1]/?a=1", "unix:/run/my app", "http://h/$x", "http://h/a&b"] {
            assert_eq!(word(target), format!("'{target}'"));
        }
    }

    #[test]
    fn nouns_agree_with_their_numbers() {
        assert_eq!(
            [0, 1, 56_512].map(|number| plural(number, "port")).join(", "),
            "0 ports, 1 port, 56,512 ports"
        );
        assert_eq!(range(9, 8), "9-8 (0 ports)");
    }
}
