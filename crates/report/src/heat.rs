//! Heat maps as drawn: with fewer columns and rows than the record has, and an intensity per cell.

use fourtuple_record::TraceHeat;

/// The rows of a record per factor of ten.
const ROWS_TO_TEN: usize = 4;
/// The highest intensity of a cell; 0 is empty.
pub(crate) const HOTTEST: u8 = 4;

/// Merges columns and rows to at most `columns` columns and `rows` rows per factor of ten; `rows` divides four. Rows
/// start at powers of ten.
pub(crate) fn fold(heat: &TraceHeat, columns: usize, rows: usize) -> TraceHeat {
    let together = heat.columns.len().div_ceil(columns.max(1)).max(1);
    let steps = ROWS_TO_TEN / rows.clamp(1, ROWS_TO_TEN);
    // The merged row that contains a row of the record.
    let merged_row =
        |from_ns: u64| ((from_ns.max(1) as f64).log10() * ROWS_TO_TEN as f64).round() as usize / steps;
    let merged_rows: Vec<usize> = heat.from_ns.iter().map(|&from_ns| merged_row(from_ns)).collect();
    let (Some(&first), Some(&last)) = (merged_rows.iter().min(), merged_rows.iter().max()) else {
        return TraceHeat::default();
    };
    let begin =
        |merged_row: usize| 10_f64.powf((merged_row * steps) as f64 / ROWS_TO_TEN as f64).round() as u64;
    let folded = heat.columns.chunks(together).map(|columns| {
        let mut sum = vec![0_u64; last - first + 1];
        for column in columns {
            for (merged_row, number) in merged_rows.iter().zip(column) {
                sum[merged_row - first] = sum[merged_row - first].saturating_add(*number);
            }
        }
        sum
    });
    TraceHeat {
        column_ns: heat.column_ns.saturating_mul(together as u64),
        from_ns: (first..=last).map(begin).collect(),
        columns: folded.collect(),
    }
}

/// Returns the largest count of a cell.
pub(crate) fn most(heat: &TraceHeat) -> u64 {
    heat.columns.iter().flatten().copied().max().unwrap_or(0)
}

/// Returns the intensity of a cell relative to the largest count, on a log scale; a count above 0 is at least 1.
pub(crate) fn level(number: u64, most: u64) -> u8 {
    if number == 0 {
        return 0;
    }
    (1..=HOTTEST).rev().find(|&level| number >= least(level, most)).unwrap_or(1)
}

/// Returns the smallest count of an intensity.
pub(crate) fn least(level: u8, most: u64) -> u64 {
    let share = f64::from(level.saturating_sub(1)) / f64::from(HOTTEST);
    (most.max(1) as f64).powf(share).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folding_keeps_the_sum_and_rows_begin_at_decades() {
        let heat = TraceHeat {
            column_ns: 10,
            from_ns: vec![562, 1_000, 1_778, 3_162, 5_623, 10_000],
            columns: (0..7).map(|column| vec![1, column, 0, 2, 0, 3]).collect(),
        };
        let narrow = fold(&heat, 3, 2);
        assert_eq!((narrow.column_ns, narrow.columns.len()), (30, 3));
        assert_eq!(narrow.from_ns, [316, 1_000, 3_162, 10_000]);
        assert_eq!(narrow.columns[1], [3, 3 + 4 + 5, 6, 9]);
        assert_eq!(fold(&heat, 100, 4), heat);
        assert_eq!(fold(&TraceHeat::default(), 10, 2), TraceHeat::default());
    }

    #[test]
    fn levels_are_logarithmic() {
        assert_eq!(
            [0, 1, 9, 10, 99, 100, 999, 1_000, 10_000].map(|number| level(number, 10_000)),
            [0, 1, 1, 2, 2, 3, 3, 4, 4]
        );
        assert_eq!((level(1, 1), level(0, 0), level(2, 2)), (4, 0, 4));
    }
}
