//! Distributions of times that several records show.

use std::collections::BTreeMap;

use fourtuple_record::Distribution;

use crate::document::Document;
use crate::number::{count, duration};
use crate::table::Table;

/// Adds a row for each distribution that exists, and on the page an explanation of the names.
pub(super) fn show(
    document: &mut Document,
    title: &'static str,
    rows: &[(&'static str, Option<Distribution>)],
    explanation: impl Into<String>,
) {
    let rows: Vec<(&str, Distribution)> =
        rows.iter().filter_map(|(name, times)| Some((*name, (*times)?))).collect();
    if rows.is_empty() {
        return;
    }
    document.table(
        Table::of(&rows)
            .name(title, |(name, _)| *name)
            .number("samples", 4, |(_, times)| count(times.count))
            .number("mean", 3, |(_, times)| duration(times.mean))
            .number("p50", 0, |(_, times)| duration(times.p50))
            .number("p99", 0, |(_, times)| duration(times.p99))
            .number("p99.9", 1, |(_, times)| duration(times.p999))
            .number("max", 2, |(_, times)| duration(times.max)),
    );
    document.explain(explanation);
}

/// Merges histogram buckets to four per factor of ten, without gaps.
pub(super) fn steps<const N: usize>(
    histogram: impl IntoIterator<Item = (u64, [u64; N])>,
) -> Vec<(String, [u64; N])> {
    let mut steps: BTreeMap<i32, [u64; N]> = BTreeMap::new();
    for (from_ns, counts) in histogram {
        let step = ((from_ns.max(1) as f64).log10() * 4.0 + 1e-9).floor() as i32;
        let sums = steps.entry(step).or_insert([0; N]);
        for (sum, count) in sums.iter_mut().zip(counts) {
            *sum = sum.saturating_add(count);
        }
    }
    let ends = steps.keys().next().copied().zip(steps.keys().next_back().copied());
    let begin = |step: i32| duration(10_f64.powf(f64::from(step) / 4.0).round() as u64);
    let of = |step: i32| (begin(step), steps.get(&step).copied().unwrap_or([0; N]));
    ends.map_or_else(Vec::new, |(first, last)| (first..=last).map(of).collect())
}
