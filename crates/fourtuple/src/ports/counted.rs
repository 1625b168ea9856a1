use crate::ports::free::Lane;
use crate::ports::{PortRange, PortSet};

/// Ports per block: long ranges are counted by block.
const BLOCK: u32 = 1024;

/// A set of ports that counts its members between two ports without reading each word. Each simulated dial needs such a count for
/// each kind of port that it probes.
#[derive(Clone, Default)]
pub(super) struct CountedSet {
    ports: PortSet,
    /// Number of ports per block, by lane (even, odd).
    blocks: [Blocks; 2],
    len: u32,
}

#[derive(Clone)]
struct Blocks([u16; 64]);

impl Default for Blocks {
    fn default() -> Self {
        Blocks([0; 64])
    }
}

impl CountedSet {
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn contains(&self, port: u16) -> bool {
        self.ports.contains(port)
    }

    pub(super) fn insert(&mut self, port: u16) {
        if self.ports.insert(port) {
            self.blocks[usize::from(port & 1)].0[usize::from(port >> 10)] += 1;
            self.len += 1;
        }
    }

    pub(super) fn remove(&mut self, port: u16) -> bool {
        let held = self.ports.remove(port);
        if held {
            self.blocks[usize::from(port & 1)].0[usize::from(port >> 10)] -= 1;
            self.len -= 1;
        }
        held
    }

    pub(super) fn clear(&mut self) {
        if self.len > 0 {
            *self = CountedSet::default();
        }
    }

    /// Counts the ports of `lane` in the set from `low` to `high`, both inclusive.
    pub(super) fn count(&self, low: u16, high: u16, lane: Lane) -> u64 {
        if self.len == 0 {
            return 0;
        }
        // Computed in u32, because 65,535 has no successor in u16. The values cast back are at most 65,535.
        let (first, end) = (u32::from(low).next_multiple_of(BLOCK), (u32::from(high) + 1) / BLOCK * BLOCK);
        let count = if first >= end {
            self.count_words(low, high, lane)
        } else {
            let edge = |from: u32, to: u32| {
                if from < to { self.count_words(from as u16, (to - 1) as u16, lane) } else { 0 }
            };
            edge(u32::from(low), first)
                + self.count_blocks((first / BLOCK) as usize..(end / BLOCK) as usize, lane)
                + edge(end, u32::from(high) + 1)
        };
        u64::from(count)
    }

    fn count_blocks(&self, blocks: std::ops::Range<usize>, lane: Lane) -> u32 {
        let sum =
            |index: usize| self.blocks[index].0[blocks.clone()].iter().map(|&count| u32::from(count)).sum();
        match lane {
            Lane::Even => sum(0),
            Lane::Odd => sum(1),
            Lane::Both => sum(0) + sum(1),
        }
    }

    fn count_words(&self, low: u16, high: u16, lane: Lane) -> u32 {
        let range = PortRange::new(low, high).expect("a walk never runs backwards");
        range.masks().map(|(index, mask)| (self.ports.word(index) & mask & lane.bits()).count_ones()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_block_equal_counts_by_port() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut set = CountedSet::default();
        for _ in 0..20_000 {
            set.insert(random.u16(..));
        }
        for _ in 0..5_000 {
            set.remove(random.u16(..));
        }
        for _ in 0..200 {
            let (a, b) = (random.u16(..), random.u16(..));
            let (low, high) =
                if random.bool() { (a.min(b), a.max(b)) } else { (a, a.saturating_add(b % 3000)) };
            for (lane, parities) in [(Lane::Even, 0..1), (Lane::Odd, 1..2), (Lane::Both, 0..2)] {
                let one_by_one =
                    (low..=high).filter(|port| parities.contains(&(port & 1)) && set.contains(*port)).count();
                assert_eq!(set.count(low, high, lane), one_by_one as u64, "{low}-{high} {lane:?}");
            }
        }
        assert_eq!(set.count(0, 65535, Lane::Both), u64::from(set.len()));
        set.clear();
        assert_eq!(set.count(0, 65535, Lane::Both), 0);
    }
}
