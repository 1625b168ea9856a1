use std::num::NonZeroUsize;
use std::thread;

use crate::dial::Strategy;
use crate::ports::{Fill, PortRange, PortSet, Random, TupleTable, WindowSearch};

/// A simulation of the dials to many destinations, connection by connection.
///
/// Tuples of different (source, destination) pairs do not conflict. So each worker thread fills one table after another, and needs
/// memory for one table only.
///
/// ```
/// use fourtuple::dial::Strategy;
/// use fourtuple::ports::{Fleet, PortRange, PortSet, WindowSearch};
///
/// let fleet = Fleet {
///     range: PortRange::KERNEL_DEFAULT,
///     reserved: &PortSet::new(),
///     search: WindowSearch::Linear,
///     strategy: Strategy::FullRange,
///     pairs: 100,
///     connections: 100_000,
///     open: None,
///     parts: 16,
///     seed: 1,
/// };
/// let fill = fleet.simulate();
/// assert_eq!((fill.connected(), fill.failed()), (100_000, 0));
/// ```
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs, reason = "of the feature `plan`, without a promise of stability")]
pub struct Fleet<'a> {
    /// The range of the namespace.
    pub range: PortRange,
    /// Reserved ports.
    pub reserved: &'a PortSet,
    /// The kernel's search of a window.
    pub search: WindowSearch,
    /// Strategy of all dials.
    pub strategy: Strategy,
    /// Number of (source, destination) pairs: sources x destinations.
    pub pairs: u64,
    /// Dials over all pairs, distributed evenly.
    pub connections: u64,
    /// Simultaneous connections of one pair, as for [`Fill::dial`].
    pub open: Option<u32>,
    /// Number of parts of the fill to report.
    pub parts: usize,
    /// Seed of all random choices. The result does not depend on the number of processors.
    pub seed: u64,
}

impl Fleet<'_> {
    /// Simulates all dials, with one worker thread per processor.
    ///
    /// # Panics
    ///
    /// Panics for [`Strategy::Auto`], as [`Strategy::step`] does.
    pub fn simulate(&self) -> Fill {
        let workers = thread::available_parallelism().map_or(1, NonZeroUsize::get) as u64;
        let share = self.pairs.div_ceil(workers).max(1);
        let mut sum = Fill::new(self.parts);
        thread::scope(|scope| {
            let workers: Vec<_> = (0..workers)
                .map(|worker| worker.saturating_mul(share))
                .take_while(|&first| first < self.pairs)
                .map(|first| {
                    let pairs = first..first.saturating_add(share).min(self.pairs);
                    let share = pairs.clone();
                    let started =
                        thread::Builder::new().spawn_scoped(scope, move || self.simulate_pairs(share));
                    (started, pairs)
                })
                .collect();
            for (worker, pairs) in workers {
                match worker.map(thread::ScopedJoinHandle::join) {
                    Ok(Ok(fill)) => sum.merge(&fill),
                    Ok(Err(panic)) => std::panic::resume_unwind(panic),
                    // The thread could not be created: this thread simulates its share, with the same result.
                    Err(_) => sum.merge(&self.simulate_pairs(pairs)),
                }
            }
        });
        sum
    }

    fn simulate_pairs(&self, pairs: std::ops::Range<u64>) -> Fill {
        let mut fill = Fill::new(self.parts);
        let mut random = Random::with_seed(self.seed);
        let mut table = TupleTable::new(self.range, self.search, self.reserved, &mut random);
        let (each, more) = (self.connections / self.pairs, self.connections % self.pairs);
        for pair in pairs {
            // Each pair has its own random sequence, independent of the worker thread.
            random.seed(self.seed.wrapping_add(pair.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
            table.reset(&mut random);
            let dials = each + u64::from(pair < more);
            fill.dial(&mut table, self.strategy, dials, self.open, &mut random);
        }
        fill
    }
}
