//! Parsers for values of flags with units.

use std::net::SocketAddr;
use std::time::Duration;

/// Parses a duration: `10s`, `50us`, `1.5ms`, `2m`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let refuse =
        || format!("{text:?} is not a duration: expected a number and ns, us, ms, s, m or h, such as 10s");
    let split = text.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(refuse)?;
    let (number, unit) = text.split_at(split);
    let scale = match unit {
        "ns" => 1e-9,
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(refuse()),
    };
    let number: f64 = number.trim().parse().map_err(|_| refuse())?;
    Duration::try_from_secs_f64(number * scale).map_err(|_| refuse())
}

/// Parses a time limit, which must be greater than 0.
pub fn limit(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err(format!("{text:?} is not accepted: expected a time above 0, such as 10s")),
        time => Ok(time),
    }
}

/// Parses the time between two readings of the sockets of a host, at least 100 ms: a reading takes milliseconds.
pub fn interval(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        time if time < Duration::from_millis(100) => {
            Err(format!("{text:?} is not accepted: expected at least 100ms, such as 5s"))
        }
        time => Ok(time),
    }
}

/// Parses an address and a port.
pub fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        format!("{text:?} is not an address: expected ADDRESS:PORT or [ADDRESS]:PORT, such as 127.0.0.1:8080")
    })
}

/// Converts the value of `--for` for the record; saturates after 584 years.
pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Highest rate that is accepted, per second.
const MAX_PER_S: f64 = 1e12;

/// Parses a rate: `2000/s`, `20k/s`, `1.5M/s`; the `/s` may be left out.
pub fn rate(text: &str) -> Result<f64, String> {
    let rate = number(text.strip_suffix("/s").unwrap_or(text)).filter(|rate| *rate <= MAX_PER_S);
    rate.ok_or_else(|| {
        format!("{text:?} is not a rate: expected a number per second, at most 1e12, such as 2000/s or 20k/s")
    })
}

/// Parses a count: `1000000`, `1M`, `1e6`.
pub fn count(text: &str) -> Result<u64, String> {
    let refuse =
        || format!("{text:?} is not a count: expected a whole number from 1 to 1e12, such as 50000 or 1M");
    match text.parse::<u64>() {
        Ok(count) if (1..=1_000_000_000_000).contains(&count) => Ok(count),
        Ok(_) => Err(refuse()),
        Err(_) => {
            let count = number(text).ok_or_else(refuse)?;
            if count.fract() == 0.0 && (1.0..=1e12).contains(&count) {
                Ok(count as u64)
            } else {
                Err(refuse())
            }
        }
    }
}

/// Parses a share: above 0, up to 1.
pub fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err(format!("{text:?} is not a share: expected a number above 0 and up to 1, such as 0.9")),
    }
}

/// Parses a percentage: `2%`, `0.5%`; above 0 and up to 100, as a share.
pub fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').and_then(|number| number.parse::<f64>().ok());
    match number {
        Some(number) if number > 0.0 && number <= 100.0 => Ok(number / 100.0),
        _ => Err(format!(
            "{text:?} is not accepted: expected a percentage above 0% and up to 100%, such as 2%"
        )),
    }
}

/// Parses a whole number from 0 to `MAX`.
pub fn from_0_to<const MAX: u32>(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(number) if number <= MAX => Ok(number),
        _ => Err(format!("{text:?} is not accepted: expected a whole number from 0 to {MAX}")),
    }
}

/// Parses a whole number from 1 to `MAX`.
pub fn up_to<const MAX: u32>(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(number) if (1..=MAX).contains(&number) => Ok(number),
        _ => Err(format!("{text:?} is not accepted: expected a whole number from 1 to {MAX}")),
    }
}

pub fn seed(text: &str) -> Result<u64, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not a seed: expected a whole number from 0 to {}", u64::MAX))
}

/// Returns a finite number of at least zero, with k, M or G behind it.
fn number(text: &str) -> Option<f64> {
    let (digits, scale) = match text.as_bytes().last()? {
        b'k' => (&text[..text.len() - 1], 1e3),
        b'M' => (&text[..text.len() - 1], 1e6),
        b'G' => (&text[..text.len() - 1], 1e9),
        _ => (text, 1.0),
    };
    let number = digits.parse::<f64>().ok()? * scale;
    (number.is_finite() && number >= 0.0).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        assert_eq!(duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("50us"), Ok(Duration::from_micros(50)));
        assert_eq!(duration("1.5ms"), Ok(Duration::from_micros(1500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        for text in ["", "10", "s", "-1s", "10 parsecs", "1e400s", "nans"] {
            assert!(duration(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn shares_and_numbers_are_bounded() {
        assert_eq!(share("0.5"), Ok(0.5));
        assert_eq!(share("1"), Ok(1.0));
        for text in ["", "0", "-0.5", "1.5", "nan", "inf", "half"] {
            assert!(share(text).is_err(), "{text:?}");
        }
        assert_eq!(percent("2%"), Ok(0.02));
        for text in ["", "2", "0%", "-1%", "101%", "nan%", "%"] {
            assert!(percent(text).is_err(), "{text:?}");
        }
        assert_eq!((from_0_to::<9>("0"), from_0_to::<9>("10").is_err()), (Ok(0), true));
        assert_eq!(up_to::<100>("100"), Ok(100));
        for text in ["", "0", "101", "-1", "1.5", "5000000000"] {
            assert!(up_to::<100>(text).is_err(), "{text:?}");
        }
        assert_eq!(seed("18446744073709551615"), Ok(u64::MAX));
        assert!(seed("-1").is_err());
    }

    #[test]
    fn rates_and_counts_have_multiples() {
        assert_eq!(rate("20k/s"), Ok(20_000.0));
        assert_eq!(rate("1.5M"), Ok(1_500_000.0));
        assert_eq!(rate("0"), Ok(0.0));
        assert_eq!(count("1M"), Ok(1_000_000));
        assert_eq!(count("1e9"), Ok(1_000_000_000));
        for text in ["", "k", "-1", "inf/s", "NaN", "1e30", "1001G/s"] {
            assert!(rate(text).is_err(), "{text:?}");
        }
        for text in ["0", "1.5", "2e12", "99999999999999", "many"] {
            assert!(count(text).is_err(), "{text:?}");
        }
    }
}
