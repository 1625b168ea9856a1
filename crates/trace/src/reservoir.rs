use fastrand::Rng;

/// As many as it has room for of all that come, each with the same chance.
#[derive(Debug)]
pub(crate) struct Reservoir<T> {
    kept: Vec<T>,
    room: usize,
    seen: u64,
    random: Rng,
}

impl<T> Reservoir<T> {
    pub(crate) fn new(room: usize, seed: u64) -> Reservoir<T> {
        Reservoir { kept: Vec::new(), room, seen: 0, random: Rng::with_seed(seed) }
    }

    pub(crate) fn offer(&mut self, item: T) {
        self.seen += 1;
        if self.kept.len() < self.room {
            self.kept.push(item);
            return;
        }
        let place = self.random.u64(..self.seen);
        if let Some(kept) = usize::try_from(place).ok().and_then(|place| self.kept.get_mut(place)) {
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
    fn few_are_kept_all() {
        let mut reservoir = Reservoir::new(3, 1);
        (0..2).for_each(|number| reservoir.offer(number));
        assert_eq!(reservoir.into_kept(), [0, 1]);
    }
}
