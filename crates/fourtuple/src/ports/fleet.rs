use std::num::NonZeroUsize;
use std::thread;

use fastrand::Rng;

use super::{Fill, PortRange, PortSet, Search, TupleTable};
use crate::dial::Strategy;

/// Many destinations, dialed alike: every connection is played, one by one.
///
/// Tuples of different (source, destination) pairs never meet, so each worker fills one table after the other and
/// needs no more memory than for one.
///
/// ```
/// use fourtuple::dial::Strategy;
/// use fourtuple::ports::{Fleet, PortRange, PortSet, Search};
///
/// let fleet = Fleet {
///     range: PortRange::KERNEL_DEFAULT,
///     reserved: &PortSet::new(),
///     search: Search::Linear,
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
pub struct Fleet<'a> {
    /// The range of the namespace.
    pub range: PortRange,
    /// Reserved ports.
    pub reserved: &'a PortSet,
    /// What the kernel does with a window.
    pub search: Search,
    /// How every dial is made.
    pub strategy: Strategy,
    /// (source, destination) pairs: sources x destinations.
    pub pairs: u64,
    /// Dials over all pairs, as evenly as whole numbers allow.
    pub connections: u64,
    /// Connections open at a time in one pair, as for [`Fill::dial`].
    pub open: Option<u32>,
    /// Parts of the fill to tell apart.
    pub parts: usize,
    /// Seed of all random choices. The outcome does not depend on the number of processors.
    pub seed: u64,
}

impl Fleet<'_> {
    /// Plays all dials on all processors.
    ///
    /// # Panics
    ///
    /// As [`Strategy::step`], for [`Strategy::Auto`].
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
                    scope.spawn(move || self.simulate_pairs(pairs))
                })
                .collect();
            for worker in workers {
                match worker.join() {
                    Ok(fill) => sum.merge(&fill),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
        });
        sum
    }

    fn simulate_pairs(&self, pairs: std::ops::Range<u64>) -> Fill {
        let mut fill = Fill::new(self.parts);
        let mut random = Rng::with_seed(self.seed);
        let mut table = TupleTable::new(self.range, self.search, self.reserved, &mut random);
        let (each, more) = (self.connections / self.pairs, self.connections % self.pairs);
        for pair in pairs {
            // Every pair has its own sequence, whichever worker plays it.
            random.seed(self.seed.wrapping_add(pair.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
            table.reset(&mut random);
            let dials = each + u64::from(pair < more);
            fill.dial(&mut table, self.strategy, dials, self.open, &mut random);
        }
        fill
    }
}
