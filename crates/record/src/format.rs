//! Durations as text. Every output of fourtuple uses this format: tables, pages, advice and progress lines.

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
