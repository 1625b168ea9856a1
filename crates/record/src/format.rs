//! Values as text, the same in every output of fourtuple: durations, numbers, text of others, command lines.

use std::fmt::{Display, Write};
use std::time::Duration;

const SECOND_NS: u64 = 1_000_000_000;
const YEAR_HOURS: u64 = 365 * 24;

/// Formats a duration in nanoseconds with three significant digits: `0`, `999ns`, `1.00us`, `49.3ms`, `59.4s`.
///
/// From two minutes on the text has two units instead: `2m14s`, `3h05m`, `2d07h`, and from two years on `3y120d`.
pub fn format_duration(ns: u64) -> String {
    if ns == 0 {
        return "0".to_owned();
    }
    let mut value = ns as f64;
    for unit in ["ns", "us", "ms"] {
        // 999.5 and more would round to 1000: the next unit prints such a value as 1.00.
        if value < 999.5 {
            return if unit == "ns" { format!("{ns}ns") } else { format!("{}{unit}", three_digits(value)) };
        }
        value /= 1000.0;
    }
    // Seconds up to two minutes: readers compare stalls with the 60 s of TIME_WAIT.
    if value < 119.5 {
        return format!("{}s", three_digits(value));
    }
    let seconds = ns.saturating_add(SECOND_NS / 2) / SECOND_NS;
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    if hours == 0 {
        format!("{minutes}m{:02}s", seconds % 60)
    } else if hours < 48 {
        format!("{hours}h{:02}m", minutes % 60)
    } else if hours < 2 * YEAR_HOURS {
        format!("{}d{:02}h", hours / 24, hours % 24)
    } else {
        format!("{}y{:03}d", hours / YEAR_HOURS, hours % YEAR_HOURS / 24)
    }
}

/// Formats a [`Duration`] like [`format_duration`]; durations above 584 years count as 584 years.
pub fn format_time(duration: Duration) -> String {
    format_duration(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

/// Formats a duration in nanoseconds exactly, as command lines parse it: `10s`, `1500ms`, `7us`, `7001ns`.
pub fn exact_duration(ns: u64) -> String {
    for (unit, size) in [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)] {
        if ns.is_multiple_of(size) {
            return format!("{}{unit}", ns / size);
        }
    }
    format!("{ns}ns")
}

/// Formats a number below 1,000 with three significant digits: `4.23`, `49.3`, `423`.
pub fn three_digits(value: f64) -> String {
    // Halves round up, as in JavaScript: the tables and the charts of a page both print 17.25 as 17.3.
    let value = value * (1.0 + 1e-12);
    if value < 9.995 {
        format!("{value:.2}")
    } else if value < 99.95 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

// Text of others, such as names of programs and replies of other hosts, made safe for a terminal and for a log.

/// Replaces control characters and invisible format characters (Unicode category Cf, such as bidirectional overrides) by
/// U+FFFD, and line ends and tabs by a space.
pub fn printable(text: &str) -> String {
    text.chars()
        .map(|character| if matches!(character, '\t' | '\n') { ' ' } else { shown(character) })
        .collect()
}

/// Like [`printable`], for text of several lines in colours: keeps line ends, tabs and colours (SGR sequences).
pub fn printable_lines(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(character) = rest.next() {
        match (character, colour(rest.as_str())) {
            ('\t' | '\n', _) => kept.push(character),
            ('\x1b', Some(colour)) => {
                kept.extend(["\x1b", colour]);
                rest = rest.as_str()[colour.len()..].chars();
            }
            _ => kept.push(shown(character)),
        }
    }
    kept
}

/// Returns the rest of an SGR sequence, at whose escape character the text before `rest` ends.
fn colour(rest: &str) -> Option<&str> {
    let numbers = rest.strip_prefix('[')?.find(|letter: char| !matches!(letter, '0'..='9' | ';'))?;
    rest.get(..numbers + 2).filter(|sequence| sequence.ends_with('m'))
}

fn shown(character: char) -> char {
    match character {
        '\u{ad}'
        | '\u{600}'..='\u{605}'
        | '\u{61c}'
        | '\u{6dd}'
        | '\u{70f}'
        | '\u{180e}'
        | '\u{200b}'..='\u{200f}'
        | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}'
        | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e007f}' => '\u{fffd}',
        character if character.is_control() => '\u{fffd}',
        character => character,
    }
}

/// A command line under construction.
#[derive(Clone, Debug)]
pub struct CommandLine(String);

impl CommandLine {
    /// Starts with `fourtuple` and the command.
    pub fn new(command: &str) -> CommandLine {
        CommandLine(format!("fourtuple {command}"))
    }

    /// Adds words unchanged.
    pub fn words(mut self, text: impl Display) -> CommandLine {
        let _ = write!(self.0, " {text}");
        self
    }

    /// Adds a flag with its value.
    pub fn set(self, flag: &str, value: impl Display) -> CommandLine {
        self.words(format_args!("{flag} {value}"))
    }

    /// Adds a flag with its value if there is a value.
    pub fn maybe(self, flag: &str, value: Option<impl Display>) -> CommandLine {
        match value {
            Some(value) => self.set(flag, value),
            None => self,
        }
    }

    /// Adds a flag without a value if `given` is true.
    pub fn flag(self, flag: &str, given: bool) -> CommandLine {
        if given { self.words(flag) } else { self }
    }

    /// Returns the text.
    pub fn finish(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_get_through() {
        assert_eq!(printable("a\x1b[2Jb\r\u{202e}c\nd"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}c d");
    }

    #[test]
    fn lines_keep_their_colours_only() {
        let text = "\x1b[31m! bad\x1b[0m\n\ta\x1b[1;32mb";
        assert_eq!(printable_lines(text), text);
        for (text, kept) in [
            ("\x1b[2J", "\u{fffd}[2J"),
            ("\x1b]0;title\x07", "\u{fffd}]0;title\u{fffd}"),
            ("\x1b[31", "\u{fffd}[31"),
            ("\x1b", "\u{fffd}"),
            ("\x1b[\u{e9}m\r", "\u{fffd}[\u{e9}m\u{fffd}"),
        ] {
            assert_eq!(printable_lines(text), kept);
        }
    }
}
