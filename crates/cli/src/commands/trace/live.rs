use std::collections::{BTreeMap, VecDeque};

use fourtuple_record::TraceHeat;
use fourtuple_report::terminal;

use crate::output;

/// Number of columns of 200 ms each.
const COLUMNS: usize = 120;
const COLUMN_NS: u64 = 200_000_000;

/// A heat map of the last 24 seconds, for the live display.
#[derive(Default)]
pub(super) struct LiveHeat {
    seen: BTreeMap<u64, u64>,
    columns: VecDeque<BTreeMap<u64, u64>>,
}

impl LiveHeat {
    /// Appends a column with the searches since the previous call, and renders the map. `steps` is the histogram since the
    /// start.
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

    /// Builds a map with a row for each step that ever had a search, so that rows stay in place.
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
    fn a_column_has_new_searches_and_rows_stay() {
        let mut live = LiveHeat::default();
        live.next(&[(1_000, 5)]);
        live.next(&[(1_000, 7), (100_000, 1)]);
        live.next(&[(1_000, 7), (100_000, 4)]);
        let heat = live.heat();
        assert_eq!(heat.from_ns, [1_000, 100_000]);
        assert_eq!(heat.columns, [[5, 0], [2, 1], [0, 3]]);
        (0..COLUMNS).for_each(|_| drop(live.next(&[(1_000, 7), (100_000, 4)])));
        let heat = live.heat();
        assert_eq!((heat.columns.len(), heat.columns.iter().flatten().sum::<u64>()), (COLUMNS, 0));
        assert_eq!(heat.from_ns.len(), 2, "a step keeps its row");
    }
}
