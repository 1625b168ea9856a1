use std::time::Duration;

use fourtuple_record::TraceHeat;
use fourtuple_record::measure::LogLinear;

/// Maximum number of columns in a record. When a trace needs more, each two columns are merged.
const COLUMNS: usize = 120;
/// Initial duration of a column.
pub(crate) const COLUMN: Duration = Duration::from_millis(50);
/// Number of rows: four to a factor of ten, up to the end of the kernel's histograms (2^36 ns).
const ROWS: usize = 44;

/// A heat map of searches by time of their end and by duration, from the differences of a histogram read repeatedly.
#[derive(Debug)]
pub(crate) struct Heat {
    column: Duration,
    columns: Vec<[u64; ROWS]>,
    /// The histogram at the previous update.
    seen: [u64; ROWS],
    /// Time of the previous update.
    updated: Duration,
}

impl Heat {
    pub(crate) fn new() -> Heat {
        Heat { column: COLUMN, columns: Vec::new(), seen: [0; ROWS], updated: Duration::ZERO }
    }

    /// Returns whether a column has ended since the previous update.
    pub(crate) fn is_due(&self, elapsed: Duration) -> bool {
        self.column_at(elapsed) > self.column_at(self.updated)
    }

    /// Adds the searches since the previous update to the column in the middle of that time: the update itself runs a little
    /// after the end of the column.
    pub(crate) fn update(&mut self, elapsed: Duration, all: &LogLinear) {
        let now = rows(all);
        let middle = (self.updated + elapsed) / 2;
        while self.column_at(middle) >= COLUMNS {
            self.fold();
        }
        let column = self.column_at(middle);
        if self.columns.len() <= column {
            self.columns.resize(column + 1, [0; ROWS]);
        }
        for ((cell, now), seen) in self.columns[column].iter_mut().zip(now).zip(self.seen) {
            *cell += now.saturating_sub(seen);
        }
        (self.seen, self.updated) = (now, elapsed);
    }

    /// Returns the searches of the whole trace by duration: lower bound of a row in nanoseconds, and number. Empty rows are
    /// left out.
    pub(crate) fn steps(&self) -> Vec<(u64, u64)> {
        let steps = self.seen.iter().enumerate().map(|(row, &number)| (from_ns(row), number));
        steps.filter(|(_, number)| *number > 0).collect()
    }

    pub(crate) fn into_record(mut self) -> TraceHeat {
        let used = |row: &usize| self.seen[*row] > 0;
        let (first, last) = ((0..ROWS).find(used), (0..ROWS).rev().find(used));
        let column_ns = self.column.as_nanos() as u64;
        let (Some(first), Some(last)) = (first, last) else {
            return TraceHeat { column_ns, from_ns: Vec::new(), columns: Vec::new() };
        };
        // Empty columns at the end show that no program connected then.
        let last_column = self.column_at(self.updated.saturating_sub(Duration::from_nanos(1)));
        self.columns.resize((last_column + 1).clamp(self.columns.len(), COLUMNS), [0; ROWS]);
        TraceHeat {
            column_ns,
            from_ns: (first..=last).map(from_ns).collect(),
            columns: self.columns.iter().map(|column| column[first..=last].to_vec()).collect(),
        }
    }

    fn column_at(&self, elapsed: Duration) -> usize {
        (elapsed.as_nanos() / self.column.as_nanos()) as usize
    }

    /// Merges each two columns.
    fn fold(&mut self) {
        self.column *= 2;
        let pairs = self.columns.chunks(2).map(|pair| {
            let mut sum = pair[0];
            for (cell, more) in sum.iter_mut().zip(pair.get(1).into_iter().flatten()) {
                *cell += more;
            }
            sum
        });
        self.columns = pairs.collect();
    }
}

fn rows(all: &LogLinear) -> [u64; ROWS] {
    let mut rows = [0; ROWS];
    for (from_ns, number) in all.steps() {
        rows[row(from_ns)] += number;
    }
    rows
}

fn row(ns: u64) -> usize {
    // The addition keeps 1000 at the start of its row despite rounding of the logarithm.
    (((ns.max(1) as f64).log10() * 4.0 + 1e-9) as usize).min(ROWS - 1)
}

fn from_ns(row: usize) -> u64 {
    10_f64.powf(row as f64 / 4.0).round() as u64
}

#[cfg(test)]
mod tests {
    use fourtuple_bpf::tracing::FINE_BITS;

    use super::*;

    /// Builds a histogram from pairs of duration and number of searches.
    fn histogram(searches: &[(u64, u64)]) -> LogLinear {
        let mut all = LogLinear::new(FINE_BITS, vec![0; 1024], 0, 0);
        let mut buckets = vec![0; 1024];
        for &(ns, number) in searches {
            let octave = (63 - ns.leading_zeros()) - FINE_BITS;
            let bucket = ((octave + 1) << FINE_BITS) + ((ns >> octave) as u32 & ((1 << FINE_BITS) - 1));
            buckets[bucket as usize] += number;
        }
        all.merge(&LogLinear::new(FINE_BITS, buckets, 0, u64::MAX));
        all
    }

    fn sum(heat: &TraceHeat) -> u64 {
        heat.columns.iter().flatten().sum()
    }

    #[test]
    fn new_searches_go_into_the_column_between_updates() {
        let mut heat = Heat::new();
        heat.update(Duration::from_millis(51), &histogram(&[(1_300, 10)]));
        assert!(!heat.is_due(Duration::from_millis(99)) && heat.is_due(Duration::from_millis(100)));
        heat.update(Duration::from_millis(102), &histogram(&[(1_300, 12), (290_000, 5)]));
        assert_eq!(heat.steps(), [(1_000, 12), (177_828, 5)]);
        let heat = heat.into_record();
        assert_eq!(heat.column_ns, 50_000_000);
        assert_eq!((heat.from_ns.first(), heat.from_ns.last()), (Some(&1_000), Some(&177_828)));
        assert_eq!(heat.columns.len(), 3);
        let ends: Vec<_> = heat.columns.iter().map(|column| (column[0], column[9])).collect();
        assert_eq!(ends, [(10, 0), (2, 5), (0, 0)]);
    }

    #[test]
    fn a_long_trace_has_wider_columns_and_all_searches() {
        let mut heat = Heat::new();
        for update in 1..=1_000 {
            heat.update(
                COLUMN * update,
                &histogram(&[(1_300, u64::from(update)), (1_000_000, u64::from(update / 10))]),
            );
        }
        let heat = heat.into_record();
        // 50 s in columns of 0.8 s.
        assert_eq!((heat.column_ns, heat.columns.len()), (800_000_000, 63));
        assert_eq!(sum(&heat), 1_100);
    }

    #[test]
    fn without_searches_the_map_is_empty() {
        let mut heat = Heat::new();
        heat.update(COLUMN, &histogram(&[]));
        let heat = heat.into_record();
        assert!(heat.from_ns.is_empty() && heat.columns.is_empty());
    }
}
