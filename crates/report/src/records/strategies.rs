use std::collections::BTreeMap;

use fourtuple_record::{Distribution, FillPoint, StrategyResult};

use crate::number::{median, total};
use crate::words::grouped;

/// All runs of one strategy: medians over its repeats.
pub(crate) struct StrategyRow<'a> {
    /// Name as given.
    pub(crate) strategy: &'a str,
    /// Strategy that `auto` chose.
    pub(crate) chosen: Option<&'a str>,
    /// Number of runs.
    pub(crate) runs: usize,
    /// Connections open at the end.
    pub(crate) connections: u64,
    /// Dials that failed.
    pub(crate) failed: u64,
    /// Failed dials by errno, over all runs.
    pub(crate) errors: BTreeMap<&'a str, u64>,
    /// Wall time of the dials.
    pub(crate) elapsed_ns: u64,
    /// Connections per second: median, minimum and maximum of the runs.
    pub(crate) rate: (f64, f64, f64),
    /// CPU time per dial.
    pub(crate) cpu_ns_per_dial: u64,
    pub(crate) all: Option<Distribution>,
    pub(crate) even: Option<Distribution>,
    pub(crate) odd: Option<Distribution>,
    /// Mean time of the same calls with an empty table.
    pub(crate) floor_ns: u64,
    /// Mean time in connect() over the floor of the same run.
    pub(crate) ratio: Option<f64>,
    /// Mean time by fill, over all runs.
    pub(crate) by_fill: Vec<FillPoint>,
}

impl StrategyRow<'_> {
    /// Returns the name with the choice of `auto`: `auto (full-range)`.
    pub(crate) fn label(&self) -> String {
        match self.chosen {
            Some(chosen) => format!("{} ({chosen})", self.strategy),
            None => self.strategy.to_owned(),
        }
    }

    /// Returns the width of a window strategy in ports: 500 for `random-window:500`.
    pub(crate) fn window(&self) -> Option<u64> {
        self.strategy.strip_prefix("random-window:")?.parse().ok()
    }
}

/// Returns one row per strategy, in the order of their first runs.
pub(crate) fn rows(results: &[StrategyResult]) -> Vec<StrategyRow<'_>> {
    let groups = grouped(results, |result| result.strategy.clone());
    groups.iter().map(|group| row(group)).collect()
}

fn row<'a>(runs: &[&'a StrategyResult]) -> StrategyRow<'a> {
    let mut errors = BTreeMap::new();
    for (errno, count) in runs.iter().flat_map(|run| &run.errors) {
        let sum = errors.entry(errno.as_str()).or_insert(0_u64);
        *sum = sum.saturating_add(*count);
    }
    let rates = || runs.iter().map(|run| run.rate_per_s);
    let ratio = |run: &&StrategyResult| {
        let floor = Some(run.floor_ns).filter(|&floor| floor > 0)?;
        Some(run.connect_ns.all?.mean as f64 / floor as f64)
    };
    StrategyRow {
        strategy: &runs[0].strategy,
        chosen: runs[0].chosen.as_deref(),
        runs: runs.len(),
        connections: median_of(runs.iter().map(|run| run.connections)),
        failed: median_of(runs.iter().map(|run| total(run.errors.values()))),
        errors,
        elapsed_ns: median_of(runs.iter().map(|run| run.elapsed_ns)),
        rate: (
            median(rates(), f64::total_cmp, f64::midpoint).unwrap_or(0.0),
            rates().fold(f64::INFINITY, f64::min),
            rates().fold(0.0, f64::max),
        ),
        cpu_ns_per_dial: median_of(runs.iter().map(|run| run.cpu_ns_per_dial)),
        all: spread(runs.iter().filter_map(|run| run.connect_ns.all)),
        even: spread(runs.iter().filter_map(|run| run.connect_ns.even)),
        odd: spread(runs.iter().filter_map(|run| run.connect_ns.odd)),
        floor_ns: median_of(runs.iter().map(|run| run.floor_ns)),
        ratio: median(runs.iter().filter_map(ratio), f64::total_cmp, f64::midpoint),
        by_fill: by_fill(runs),
    }
}

fn spread(spreads: impl Iterator<Item = Distribution> + Clone) -> Option<Distribution> {
    spreads.clone().next()?;
    let field = |field: fn(&Distribution) -> u64| median_of(spreads.clone().map(|spread| field(&spread)));
    Some(Distribution {
        count: field(|spread| spread.count),
        mean: field(|spread| spread.mean),
        p50: field(|spread| spread.p50),
        p99: field(|spread| spread.p99),
        p999: field(|spread| spread.p999),
        max: field(|spread| spread.max),
    })
}

/// Merges the fill curves by position: all runs of a strategy have the same settings.
fn by_fill(runs: &[&StrategyResult]) -> Vec<FillPoint> {
    let parts = runs.iter().map(|run| run.by_fill.len()).max().unwrap_or(0);
    (0..parts)
        .map(|part| {
            let points = || runs.iter().filter_map(|run| run.by_fill.get(part));
            let connections = points().fold(0_u64, |sum, point| sum.saturating_add(point.connections));
            let time = points()
                .map(|point| u128::from(point.connections) * u128::from(point.mean_ns))
                .fold(0, u128::saturating_add);
            FillPoint {
                fill: points().map(|point| point.fill).fold(0.0, f64::max),
                connections,
                mean_ns: time.checked_div(u128::from(connections)).unwrap_or(0) as u64,
                floor_ns: median_of(points().map(|point| point.floor_ns).filter(|&floor| floor > 0)),
            }
        })
        .collect()
}

fn median_of(values: impl Iterator<Item = u64>) -> u64 {
    median(values, u64::cmp, u64::midpoint).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(strategy: &str, repeat: u32, mean: u64) -> StrategyResult {
        let json = format!(
            r#"{{"strategy": "{strategy}", "repeat": {repeat}, "dials": 10, "connections": 8, "retries": 0,
            "errors": {{"EADDRNOTAVAIL": 2}}, "elapsed_ns": {mean}, "rate_per_s": {mean}.0, "cpu_ns_per_dial": 1,
            "connect_ns": {{"all": {{"count": 8, "mean": {mean}, "p50": 1, "p99": 2, "p999": 3, "max": 4}},
            "even": null, "odd": null}},
            "by_fill": [{{"fill": 1.0, "connections": 8, "mean_ns": {mean}, "floor_ns": 0}}], "floor_ns": 100}}"#
        );
        serde_json::from_str(&json).unwrap()
    }

    #[test]
    fn repeats_become_one_row_of_medians() {
        let runs = [run("b", 1, 100), run("a", 1, 5), run("a", 2, 7), run("b", 2, 400), run("b", 3, 200)];
        let rows = rows(&runs);
        assert_eq!(rows.iter().map(|row| (row.strategy, row.runs)).collect::<Vec<_>>(), [("b", 3), ("a", 2)]);
        assert_eq!(rows[0].rate, (200.0, 100.0, 400.0));
        assert_eq!(rows[0].ratio, Some(2.0));
        assert_eq!(rows[0].errors["EADDRNOTAVAIL"], 6);
        assert_eq!(rows[0].failed, 2);
        assert_eq!(rows[0].by_fill[0].mean_ns, 233);
        assert_eq!(rows[0].even, None);
        assert_eq!(rows[1].all.unwrap().mean, 6);
    }

    #[test]
    fn no_floor_no_ratio() {
        let mut run = run("a", 1, 5);
        run.floor_ns = 0;
        assert_eq!(rows(&[run])[0].ratio, None);
    }

    #[test]
    fn window_width_is_parsed_from_the_name() {
        let runs = [run("random-window:500", 1, 5), run("random-window:x", 1, 5), run("auto", 1, 5)];
        assert_eq!(rows(&runs).iter().map(StrategyRow::window).collect::<Vec<_>>(), [Some(500), None, None]);
    }
}
