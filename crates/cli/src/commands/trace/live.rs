use std::collections::{BTreeMap, VecDeque};

use fourtuple_record::TraceHeat;
use fourtuple_report::terminal;

use crate::output;

/// Columns that are kept: 200 ms each.
const COLUMNS: usize = 120;
const COLUMN_NS: u64 = 200_000_000;

/// The heat map of the last seconds, below the line that moves.
#[derive(Default)]
pub(super) struct Live {
    seen: BTreeMap<u64, u64>,
    columns: VecDeque<BTreeMap<u64, u64>>,
}

impl Live {
    /// Takes the searches so far by length, and gives the map with what has come since the last time as its last column.
    pub(super) fn next(&mut self, steps: &[(u64, u64)]) -> String {
        let column = steps.iter().map(|&(from_ns, number)| {
            let seen = self.seen.insert(from_ns, number).unwrap_or(0);
            (from_ns, number.saturating_sub(seen))
        });
        let column = column.collect();
        self.columns.push_back(column);
        if self.columns.len() > COLUMNS {
            self.columns.pop_front();
        }
        terminal::moving_heat(&self.heat(), output::terminal_width(), output::has_colour(&std::io::stderr()))
    }

    /// With every length that ever was: rows stay where they are.
    fn heat(&self) -> TraceHeat {
        let from_ns: Vec<u64> = self.seen.keys().copied().collect();
        let column = |column: &BTreeMap<u64, u64>| {
            from_ns.iter().map(|from_ns| column.get(from_ns).copied().unwrap_or(0)).collect()
        };
        TraceHeat { column_ns: COLUMN_NS, columns: self.columns.iter().map(column).collect(), from_ns }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_what_has_come_since_the_last_and_rows_stay() {
        let mut live = Live::default();
        live.next(&[(1_000, 5)]);
        live.next(&[(1_000, 7), (100_000, 1)]);
        live.next(&[(1_000, 7), (100_000, 4)]);
        let heat = live.heat();
        assert_eq!(heat.from_ns, [1_000, 100_000]);
        assert_eq!(heat.columns, [[5, 0], [2, 1], [0, 3]]);
        (0..COLUMNS).for_each(|_| drop(live.next(&[(1_000, 7), (100_000, 4)])));
        let heat = live.heat();
        assert_eq!((heat.columns.len(), heat.columns.iter().flatten().sum::<u64>()), (COLUMNS, 0));
        assert_eq!(heat.from_ns.len(), 2, "what ever was keeps its row");
    }
}
