//! Numbers, phrases and command lines as text. A number has a unit in which it needs no more than three significant digits.
//!
//! `assets/charts.js` formats durations by the same rules, so that the axes and the tables of a page agree.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt::Display;

use fourtuple_record::three_digits;

pub use fourtuple_record::format_duration as duration;
pub(crate) use fourtuple_record::measure::words::counted as plural;
pub(crate) use fourtuple_record::measure::words::grouped as count;
pub(crate) use fourtuple_record::{CommandLine, exact_duration as typed};

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

/// The text of a value that was not measured.
pub(crate) const NOTHING: &str = "–";

/// Formats an optional value with `words`.
pub(crate) fn maybe<T>(value: Option<T>, words: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| NOTHING.to_owned(), words)
}

/// Formats an interval of durations: `17.0ms to 20.0ms`; empty without an interval.
pub(crate) fn interval(low: Option<u64>, high: Option<u64>, to: &str) -> String {
    low.zip(high).map_or(String::new(), |(low, high)| format!("{}{to}{}", duration(low), duration(high)))
}

pub(crate) fn maybe_duration(ns: Option<u64>) -> String {
    maybe(ns, duration)
}

/// Formats a rate per second: `0/s`, `4.23/s`, `423/s`, `49.3k/s`, `1.20M/s`.
pub(crate) fn rate(per_s: f64) -> String {
    if !per_s.is_finite() || per_s < 0.0 {
        return NOTHING.to_owned();
    }
    if per_s == 0.0 {
        return "0/s".to_owned();
    }
    let mut value = per_s;
    for unit in ["", "k", "M"] {
        if value < 999.5 {
            return format!("{}{unit}/s", three_digits(value));
        }
        value /= 1000.0;
    }
    format!("{}G/s", three_digits(value))
}

pub(crate) fn maybe_count(value: Option<u64>) -> String {
    maybe(value, count)
}

/// Formats a factor: `1.04x`, `12.3x`, `310x`.
pub(crate) fn factor(value: Option<f64>) -> String {
    maybe(value.filter(|value| value.is_finite()), |value| format!("{}x", three_digits(value)))
}

/// Formats a share from 0 to 1 in percent: `6.25%`, `50%`, `100%`.
pub(crate) fn share(value: f64) -> String {
    if !value.is_finite() {
        return NOTHING.to_owned();
    }
    let text = format!("{:.2}", value * 100.0);
    format!("{}%", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Returns the saturating sum: a hostile record cannot overflow it.
pub(crate) fn total<'a>(counts: impl IntoIterator<Item = &'a u64>) -> u64 {
    counts.into_iter().fold(0, |sum, count| sum.saturating_add(*count))
}

/// Returns the middle value; `between` combines the two middle ones.
pub(crate) fn median<T: Copy>(
    values: impl Iterator<Item = T>,
    order: fn(&T, &T) -> Ordering,
    between: fn(T, T) -> T,
) -> Option<T> {
    let mut values: Vec<T> = values.collect();
    values.sort_unstable_by(order);
    let middle = values.get(values.len() / 2)?;
    let odd = values.len() % 2 == 1;
    Some(if odd { *middle } else { between(values[values.len() / 2 - 1], *middle) })
}

/// Formats a number that need not be an integer: `1.00`, `28,256`.
pub(crate) fn quantity(value: f64) -> String {
    if !value.is_finite() || value < 0.0 {
        return NOTHING.to_owned();
    }
    if value < 999.5 { three_digits(value) } else { count(value.round() as u64) }
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

    #[test]
    fn durations_keep_three_digits_and_round_into_the_next_unit() {
        for (ns, text) in [
            (0, "0"),
            (1, "1ns"),
            (999, "999ns"),
            (1_000, "1.00us"),
            (9_994, "9.99us"),
            (9_996, "10.0us"),
            (17_250, "17.3us"),
            (99_960, "100us"),
            (999_499, "999us"),
            (999_950, "1.00ms"),
            (4_682_000, "4.68ms"),
            (999_500_000, "1.00s"),
            (59_940_000_000, "59.9s"),
            (59_960_000_000, "60.0s"),
            (119_400_000_000, "119s"),
            (119_600_000_000, "2m00s"),
            (133_700_000_000, "2m14s"),
            (3_599_600_000_000, "1h00m"),
            (11_100_000_000_000, "3h05m"),
            (172_800_000_000_000, "2d00h"),
            (63_071_999_499_999_999, "729d23h"),
            (63_072_000_000_000_000, "2y000d"),
            (u64::MAX, "584y343d"),
        ] {
            assert_eq!(duration(ns), text, "{ns} ns");
        }
        assert_eq!(maybe_duration(None), NOTHING);
    }

    #[test]
    fn rates() {
        for (per_s, text) in [
            (0.0, "0/s"),
            (4.234, "4.23/s"),
            (423.0, "423/s"),
            (999.6, "1.00k/s"),
            (49_310.0, "49.3k/s"),
            (1_200_000.0, "1.20M/s"),
            (5e12, "5000G/s"),
            (f64::NAN, NOTHING),
            (f64::INFINITY, NOTHING),
            (-1.0, NOTHING),
        ] {
            assert_eq!(rate(per_s), text, "{per_s}");
        }
    }

    #[test]
    fn counts_factors_shares_and_quantities() {
        assert_eq!(
            [0, 999, 1000, 56_512, 1_000_000_000].map(count).join(" "),
            "0 999 1,000 56,512 1,000,000,000"
        );
        assert_eq!(factor(Some(1.044)), "1.04x");
        assert_eq!(factor(Some(310.2)), "310x");
        assert_eq!(factor(Some(f64::INFINITY)), NOTHING);
        assert_eq!(factor(None), NOTHING);
        assert_eq!([0.0625, 0.5, 1.0, 0.0].map(share).join(" "), "6.25% 50% 100% 0%");
        assert_eq!(quantity(1.0), "1.00");
        assert_eq!(quantity(28_256.2), "28,256");
    }
}
