//! Thresholds of `--expect`: `p99<20ms`.

use fourtuple_record::{LoadExpectation, LoadResults, Quantiles, errno, format_duration};

use crate::units;

/// A threshold: a metric, a comparison and a limit.
#[derive(Clone, Debug)]
pub(crate) struct Expectation {
    text: String,
    metric: Metric,
    is_upper: bool,
    /// Whether the limit itself is accepted.
    is_inclusive: bool,
    unit: Unit,
    limit: f64,
}

#[derive(Clone, Copy, Debug)]
enum Metric {
    Time(fn(&Quantiles) -> Option<u64>),
    Rate,
    Errors,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Nanoseconds,
    PerSecond,
    Share,
    Count,
}

impl Unit {
    /// Returns the name in the record.
    fn name(self) -> &'static str {
        match self {
            Unit::Nanoseconds => "ns",
            Unit::PerSecond => "per_s",
            Unit::Share => "share",
            Unit::Count => "count",
        }
    }
}

/// The metrics by name. The times are those of `total`.
const METRICS: [(&str, Metric); 10] = [
    ("mean", Metric::Time(|times| Some(times.mean))),
    ("p50", Metric::Time(|times| Some(times.p50))),
    ("p75", Metric::Time(|times| times.p75)),
    ("p90", Metric::Time(|times| times.p90)),
    ("p95", Metric::Time(|times| times.p95)),
    ("p99", Metric::Time(|times| Some(times.p99))),
    ("p99.9", Metric::Time(|times| Some(times.p999))),
    ("max", Metric::Time(|times| Some(times.max))),
    ("rate", Metric::Rate),
    ("errors", Metric::Errors),
];

/// Errors that are counted beside an operation that is done.
fn is_of_done(name: &str) -> bool {
    name.starts_with("status-") || name == "not-closed"
}

impl Expectation {
    /// Parses a threshold, for clap.
    pub(crate) fn parse(text: &str) -> Result<Expectation, String> {
        let refuse = || {
            let names: Vec<&str> = METRICS.iter().map(|(name, _)| *name).collect();
            format!(
                "{text:?} is not accepted: expected NAME<LIMIT, such as p99<20ms, rate>1k/s or errors<0.1%, with one of {} and \
                 <, <=, > or >=",
                names.join(", ")
            )
        };
        let at = text.find(['<', '>']).ok_or_else(refuse)?;
        let (name, rest) = text.split_at(at);
        let (name, is_upper) = (name.trim(), rest.starts_with('<'));
        let limit = rest[1..].strip_prefix('=');
        let is_inclusive = limit.is_some();
        let limit = limit.unwrap_or(&rest[1..]).trim();
        let (_, metric) = *METRICS.iter().find(|(known, _)| *known == name).ok_or_else(refuse)?;
        let (unit, limit) = match metric {
            Metric::Time(_) => {
                let time = units::duration(limit).map_err(|_| refuse())?;
                (Unit::Nanoseconds, units::nanoseconds(time) as f64)
            }
            Metric::Rate => (Unit::PerSecond, units::rate(limit).map_err(|_| refuse())?),
            Metric::Errors => match limit.strip_suffix('%') {
                Some(number) => {
                    let share = number.parse::<f64>().ok().filter(|share| (0.0..=100.0).contains(share));
                    (Unit::Share, share.ok_or_else(refuse)? / 100.0)
                }
                None => (Unit::Count, limit.parse::<u32>().map_err(|_| refuse())?.into()),
            },
        };
        Ok(Expectation { text: text.to_owned(), metric, is_upper, is_inclusive, unit, limit })
    }

    /// Returns whether the threshold says how many errors are accepted.
    pub(crate) fn is_of_errors(&self) -> bool {
        matches!(self.metric, Metric::Errors)
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn judge(&self, results: &LoadResults) -> LoadExpectation {
        // An operation that waited for a port continues.
        let failures = || results.errors.iter().filter(|(name, _)| *name != errno::EADDRNOTAVAIL);
        // A sum of no floats is -0.
        let errors = || failures().fold(0.0, |sum, (_, count)| sum + *count as f64);
        let measured = match (self.metric, self.unit) {
            (Metric::Time(of), _) => {
                let total = &results.latency_ns.total;
                of(total).filter(|_| total.samples > 0).map(|time| time as f64)
            }
            (Metric::Rate, _) => Some(results.rate_per_s),
            (Metric::Errors, Unit::Count) => Some(errors()),
            (Metric::Errors, _) => {
                let done = failures().filter(|(name, _)| is_of_done(name));
                let done = done.fold(0.0, |sum, (_, count)| sum + *count as f64);
                let all = results.operations as f64 + errors() - done;
                (all > 0.0).then(|| (errors() / all).min(1.0))
            }
        };
        let is_within = |measured: f64| match (self.is_upper, self.is_inclusive) {
            (true, true) => measured <= self.limit,
            (true, false) => measured < self.limit,
            (false, true) => measured >= self.limit,
            (false, false) => measured > self.limit,
        };
        LoadExpectation {
            expect: self.text.clone(),
            unit: self.unit.name().to_owned(),
            limit: self.limit,
            measured,
            met: measured.is_some_and(is_within),
        }
    }
}

/// Returns a line for stderr about a threshold that was not met.
pub(crate) fn line(judged: &LoadExpectation) -> String {
    let value = |value: f64| match judged.unit.as_str() {
        "ns" => format_duration(value as u64),
        "per_s" => format!("{value:.1}/s"),
        "share" => format!("{}%", (value * 1e5).round() / 1e3),
        _ => format!("{value}"),
    };
    match judged.measured {
        None => format!("expected {}: no operation has a value", judged.expect),
        Some(measured) => format!(
            "expected {}: {}, off by {}",
            judged.expect,
            value(measured),
            value((measured - judged.limit).abs())
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results() -> LoadResults {
        let mut results = LoadResults { operations: 998, rate_per_s: 99.8, ..LoadResults::default() };
        let errors = [("timeout", 2), ("status-503", 8), (errno::EADDRNOTAVAIL, 50)];
        results.errors = errors.map(|(name, count)| (name.to_owned(), count)).into();
        let total = &mut results.latency_ns.total;
        (total.samples, total.p95, total.p99) = (998, Some(1_000_000), 2_000_000);
        results
    }

    #[test]
    fn thresholds_are_judged() {
        for (text, met, measured) in [
            ("p99<2ms", false, 2e6),
            ("p99 <= 2ms", true, 2e6),
            ("p95>1ms", false, 1e6),
            ("p95>=1ms", true, 1e6),
            ("rate>99/s", true, 99.8),
            ("rate>0.1k", false, 99.8),
            // 10 errors of 1,000 operations; the responses with 503 are operations too.
            ("errors<1%", false, 0.01),
            ("errors<=1%", true, 0.01),
            ("errors<11", true, 10.0),
            ("errors<=0", false, 10.0),
        ] {
            let judged = Expectation::parse(text).unwrap().judge(&results());
            assert_eq!((judged.met, judged.measured), (met, Some(measured)), "{text}");
        }
        assert!(!Expectation::parse("p50<1h").unwrap().judge(&LoadResults::default()).met, "no operation");
    }

    #[test]
    fn a_miss_says_by_how_much() {
        let line = |text| line(&Expectation::parse(text).unwrap().judge(&results()));
        assert_eq!(line("p99<1.5ms"), "expected p99<1.5ms: 2.00ms, off by 500us");
        assert_eq!(line("errors<0.1%"), "expected errors<0.1%: 1%, off by 0.9%");
        assert_eq!(line("rate>200/s"), "expected rate>200/s: 99.8/s, off by 100.2/s");
        assert_eq!(line("errors<3"), "expected errors<3: 10, off by 7");
    }

    #[test]
    fn other_thresholds_are_refused() {
        for text in [
            "",
            "p99",
            "p98<1ms",
            "p99<1",
            "p99=1ms",
            "<1ms",
            "errors<0.1",
            "errors<-1%",
            "errors<101%",
            "rate>fast",
            "p99<-1ms",
        ] {
            assert!(Expectation::parse(text).is_err(), "{text:?}");
        }
    }
}
