//! Numbers as people read them: the unit is chosen so that three significant digits are enough.
//!
//! `assets/charts.js` writes durations by the same rules, so that the axes and the tables of a page agree.

/// What stands where nothing was measured.
pub(crate) const NOTHING: &str = "–";

const SECOND_NS: u64 = 1_000_000_000;

/// A duration in nanoseconds: `0`, `999ns`, `1.00us`, `49.3ms`, `59.4s`, `2m14s`, `3h05m`, `2d07h`.
pub(crate) fn duration(ns: u64) -> String {
    if ns == 0 {
        return "0".to_owned();
    }
    let mut value = ns as f64;
    for unit in ["ns", "us", "ms"] {
        // 999.5 and up would print as 1000: that is 1.00 of the next unit.
        if value < 999.5 {
            return if unit == "ns" { format!("{ns}ns") } else { format!("{}{unit}", three_digits(value)) };
        }
        value /= 1000.0;
    }
    // Two minutes of seconds, so that stalls around the 60 s of TIME_WAIT compare at a glance.
    if value < 119.5 {
        return format!("{}s", three_digits(value));
    }
    let seconds = ns.saturating_add(SECOND_NS / 2) / SECOND_NS;
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    if hours == 0 {
        format!("{minutes}m{:02}s", seconds % 60)
    } else if hours < 48 {
        format!("{hours}h{:02}m", minutes % 60)
    } else {
        format!("{}d{:02}h", hours / 24, hours % 24)
    }
}

/// A duration that may not have been measured.
pub(crate) fn maybe_duration(ns: Option<u64>) -> String {
    ns.map_or_else(|| NOTHING.to_owned(), duration)
}

/// A rate per second: `0/s`, `4.23/s`, `423/s`, `49.3k/s`, `1.20M/s`.
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

/// A count with separators: `56,512`.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A count that may be absent.
pub(crate) fn maybe_count(value: Option<u64>) -> String {
    value.map_or_else(|| NOTHING.to_owned(), count)
}

/// A factor: `1.04x`, `12.3x`, `310x`.
pub(crate) fn factor(value: Option<f64>) -> String {
    match value {
        Some(value) if value.is_finite() => format!("{}x", three_digits(value)),
        _ => NOTHING.to_owned(),
    }
}

/// A share from 0 to 1 in percent: `6.25%`, `50%`, `100%`.
pub(crate) fn share(value: f64) -> String {
    if !value.is_finite() {
        return NOTHING.to_owned();
    }
    let text = format!("{:.2}", value * 100.0);
    format!("{}%", text.trim_end_matches('0').trim_end_matches('.'))
}

/// A sum that a made-up record cannot overflow.
pub(crate) fn total<'a>(counts: impl IntoIterator<Item = &'a u64>) -> u64 {
    counts.into_iter().fold(0, |sum, count| sum.saturating_add(*count))
}

/// A plain quantity that need not be whole: `1.00`, `28,256`.
pub(crate) fn quantity(value: f64) -> String {
    if !value.is_finite() || value < 0.0 {
        return NOTHING.to_owned();
    }
    if value < 999.5 { three_digits(value) } else { count(value.round() as u64) }
}

fn three_digits(value: f64) -> String {
    // Halves go up, as JavaScript has them, not to the even digit: 17.25 is 17.3 on both sides of a page.
    let value = value * (1.0 + 1e-12);
    if value < 9.995 {
        format!("{value:.2}")
    } else if value < 99.95 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            (u64::MAX, "213503d23h"),
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
