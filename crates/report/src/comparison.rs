//! The two sides of a comparison, as the terminal and the page show them.

use fourtuple_record::{CompareResults, CompareSettings};

use crate::number::{NOTHING, count, duration, rate};

/// One side: its command and what its trials gave.
pub(crate) struct Side<'a> {
    pub(crate) name: &'static str,
    pub(crate) command: &'a str,
    /// The server that was started for each of its trials.
    pub(crate) server: Option<&'a str>,
    pub(crate) samples: Vec<f64>,
    /// Smallest, median, largest; `None` without a sample.
    pub(crate) figures: Option<(f64, f64, f64)>,
}

/// A and B; samples that are no numbers are left out.
pub(crate) fn sides<'a>(settings: &'a CompareSettings, results: &CompareResults) -> [Side<'a>; 2] {
    let side = |name, command, server: &'a Option<String>, samples: &[f64]| {
        let server = server.as_deref();
        let samples: Vec<f64> = samples.iter().copied().filter(|sample| sample.is_finite()).collect();
        let mut sorted = samples.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let figures = (!sorted.is_empty()).then(|| {
            let odd = sorted.len() % 2 == 1;
            let median = if odd { sorted[middle] } else { sorted[middle - 1] / 2.0 + sorted[middle] / 2.0 };
            (sorted[0], median, sorted[sorted.len() - 1])
        });
        Side { name, command, server, samples, figures }
    };
    [
        side("A", settings.a.as_str(), &settings.server_a, &results.samples_a),
        side("B", settings.b.as_str(), &settings.server_b, &results.samples_b),
    ]
}

/// The smallest and the largest sample of both sides.
pub(crate) fn extent(sides: &[Side<'_>; 2]) -> Option<(f64, f64)> {
    let figures = || sides.iter().filter_map(|side| side.figures);
    let low = figures().map(|(low, ..)| low).reduce(f64::min)?;
    let high = figures().map(|(.., high)| high).reduce(f64::max)?;
    Some((low, high))
}

/// Where `sample` stands between the ends of `extent`, 0 to 1; in the middle where they are one.
pub(crate) fn place(sample: f64, (low, high): (f64, f64)) -> f64 {
    if high > low { (sample / 2.0 - low / 2.0) / (high / 2.0 - low / 2.0) } else { 0.5 }
}

/// A sample with the unit of its metric.
pub(crate) fn sample(metric: &str, value: f64) -> String {
    match metric {
        "rate" => rate(value),
        _ if value >= 0.0 => duration(value.round() as u64),
        _ => NOTHING.to_owned(),
    }
}

/// What the numbers of a busy client are worth; nothing where none was.
pub(crate) fn saturation(results: &CompareResults) -> Option<String> {
    let of = match results.client_saturated {
        0 => return None,
        some if some == results.trials => "all trials".to_owned(),
        some => format!("{} of {} trials", count(some), count(results.trials)),
    };
    Some(format!(
        "the client was busy all the time in {of}: that is how fast the client is, with this server"
    ))
}

/// `1.058`, `1.041 to 1.074`, or that there is none.
pub(crate) fn interval(results: &CompareResults) -> (String, String) {
    let number = |ratio: f64| if ratio < 1e4 { format!("{ratio:.3}") } else { format!("{ratio:.3e}") };
    let interval = match (results.low, results.high) {
        (Some(low), Some(high)) => format!("{} to {}", number(low), number(high)),
        _ => "none: too few trials".to_owned(),
    };
    (number(results.ratio), interval)
}
