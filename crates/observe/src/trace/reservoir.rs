use fastrand::Rng;

/// A random sample of bounded size from a stream of items; each item has the same chance (reservoir sampling).
#[derive(Debug)]
pub(crate) struct Reservoir<T> {
    kept: Vec<T>,
    capacity: usize,
    seen: u64,
    random: Rng,
}

impl<T> Reservoir<T> {
    pub(crate) fn new(capacity: usize, seed: u64) -> Reservoir<T> {
        Reservoir { kept: Vec::new(), capacity, seen: 0, random: Rng::with_seed(seed) }
    }

    /// Adds an item; a random earlier item may be dropped for it.
    pub(crate) fn offer(&mut self, item: T) {
        self.seen += 1;
        if self.kept.len() < self.capacity {
            self.kept.push(item);
            return;
        }
        let index = self.random.u64(..self.seen);
        if let Some(kept) = usize::try_from(index).ok().and_then(|index| self.kept.get_mut(index)) {
            *kept = item;
        }
    }

    pub(crate) fn into_kept(self) -> Vec<T> {
        self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn early_and_late_have_the_same_chance() {
        let mut reservoir = Reservoir::new(1_000, 7);
        (0..10_000).for_each(|number| reservoir.offer(number));
        let kept = reservoir.into_kept();
        assert_eq!(kept.len(), 1_000);
        let early = kept.iter().filter(|number| **number < 5_000).count();
        assert!((420..=580).contains(&early), "{early}");
    }

    #[test]
    fn a_short_stream_is_kept_whole() {
        let mut reservoir = Reservoir::new(3, 1);
        (0..2).for_each(|number| reservoir.offer(number));
        assert_eq!(reservoir.into_kept(), [0, 1]);
    }
}
