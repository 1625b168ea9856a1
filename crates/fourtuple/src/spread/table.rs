//! The division of slots among members, independent of the kernel.

/// The step between visited slots. It is odd, so that steps modulo a power of two visit every slot, and large, so that consecutive
/// visits are far apart.
const STRIDE: usize = 2531;

/// The member of each slot.
#[derive(Debug)]
pub(super) struct Table {
    owner: Vec<usize>,
}

impl Table {
    /// Returns a table in which slots go to members in turn. The distribution is even for flows with small numbers too.
    pub(super) fn even(slots: usize, seats: usize) -> Table {
        Table { owner: (0..slots).map(|slot| slot % seats).collect() }
    }

    /// Returns all pairs of slot and member.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.owner.iter().copied().enumerate()
    }

    /// Divides the slots by weight with the fewest moves, and returns each moved slot with its new member. The sum of the weights must not
    /// be 0.
    pub(super) fn steer(&mut self, weights: &[u32]) -> Vec<(usize, usize)> {
        let quotas = quotas(self.owner.len(), weights);
        let mut has = vec![0_usize; weights.len()];
        for owner in &self.owner {
            if let Some(has) = has.get_mut(*owner) {
                *has += 1;
            }
        }
        let mut moved = Vec::new();
        let mut slot = 0;
        for _ in 0..self.owner.len() {
            slot = (slot + STRIDE) % self.owner.len();
            let from = self.owner[slot];
            if has.get(from).is_some_and(|has| *has <= quotas[from]) {
                continue;
            }
            // Picks the member with the fewest slots relative to its share. There is one while another member has too many.
            let lacks = |seat: &usize| quotas[*seat].saturating_sub(has[*seat]);
            let Some(to) = (0..weights.len()).rev().max_by_key(lacks).filter(|seat| lacks(seat) > 0) else {
                break;
            };
            if let Some(has) = has.get_mut(from) {
                *has -= 1;
            }
            has[to] += 1;
            self.owner[slot] = to;
            moved.push((slot, to));
        }
        moved
    }
}

/// Returns the number of slots of each member by weight. Slots left by rounding go to the largest remainders.
fn quotas(slots: usize, weights: &[u32]) -> Vec<usize> {
    let sum: u128 = weights.iter().map(|weight| u128::from(*weight)).sum::<u128>().max(1);
    let exact = |weight: u32| slots as u128 * u128::from(weight);
    let mut quotas: Vec<usize> = weights.iter().map(|weight| (exact(*weight) / sum) as usize).collect();
    let mut by_rest: Vec<usize> = (0..weights.len()).collect();
    by_rest.sort_by_key(|seat| std::cmp::Reverse(exact(weights[*seat]) % sum));
    let left = slots - quotas.iter().sum::<usize>().min(slots);
    for seat in by_rest.into_iter().take(left) {
        quotas[seat] += 1;
    }
    quotas
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn held(table: &Table, seats: usize) -> Vec<usize> {
        (0..seats).map(|seat| table.iter().filter(|(_, owner)| *owner == seat).count()).collect()
    }

    #[test]
    fn a_joining_member_gets_slots_of_each_member() {
        let mut table = Table::even(4096, 3);
        let moved = table.steer(&[1, 1, 1, 1]);
        assert_eq!(moved.len(), 1024);
        assert!(moved.iter().all(|(_, to)| *to == 3));
        assert_eq!(held(&table, 4), [1024; 4]);
        // Checks the first slots too, which are the only used slots when flows are few.
        let low = table.iter().take(64).filter(|(_, owner)| *owner == 3).count();
        assert!((8..=24).contains(&low), "{low}");
    }

    #[test]
    fn the_slots_of_a_leaving_member_go_to_all_members() {
        let mut table = Table::even(4096, 4);
        let moved = table.steer(&[1, 0, 1, 1]);
        assert_eq!(moved.len(), 1024);
        assert_eq!(held(&table, 4), [1366, 0, 1365, 1365]);
    }

    #[test]
    fn weights_are_slots() {
        let mut table = Table::even(4096, 3);
        table.steer(&[1, 2, 5]);
        assert_eq!(held(&table, 3), [512, 1024, 2560]);
        table.steer(&[0, 0, 7]);
        assert_eq!(held(&table, 3), [0, 0, 4096]);
    }

    proptest! {
        #[test]
        fn slots_are_divided_by_weight(
            before in prop::collection::vec(0..=u32::MAX, 1..40),
            after in prop::collection::vec(0..=u32::MAX, 1..40),
        ) {
            prop_assume!(before.iter().any(|weight| *weight > 0) && after.iter().any(|weight| *weight > 0));
            let mut table = Table::even(4096, before.len());
            table.steer(&before);
            // The number of members only grows.
            let mut after = after;
            after.resize(after.len().max(before.len()), 0);
            let old = held(&table, after.len());
            let moved = table.steer(&after);
            let new = held(&table, after.len());
            prop_assert_eq!(new.iter().sum::<usize>(), 4096);
            let sum: f64 = after.iter().map(|weight| f64::from(*weight)).sum();
            for (weight, slots) in after.iter().zip(&new) {
                prop_assert!((f64::from(*weight) / sum * 4096.0 - *slots as f64).abs() <= 1.0);
            }
            let least: usize = new.iter().zip(&old).map(|(new, old)| new.saturating_sub(*old)).sum();
            prop_assert_eq!(moved.len(), least);
        }
    }
}
