//! A slab: connections by number.

/// A vector of slots that are reused.
pub(crate) struct Slab<T> {
    slots: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Slab<T> {
    pub(crate) fn new() -> Slab<T> {
        Slab { slots: Vec::new(), free: Vec::new() }
    }

    /// Returns the number that the next insertion will use.
    pub(crate) fn next(&self) -> usize {
        self.free.last().copied().unwrap_or(self.slots.len())
    }

    pub(crate) fn insert(&mut self, item: T) -> usize {
        match self.free.pop() {
            Some(number) => {
                self.slots[number] = Some(item);
                number
            }
            None => {
                self.slots.push(Some(item));
                self.slots.len() - 1
            }
        }
    }

    /// Takes out the item with this number. The number stays reserved until `give_back` or `free`.
    pub(crate) fn lend(&mut self, number: usize) -> Option<T> {
        self.slots.get_mut(number)?.take()
    }

    /// Puts an item back that was taken out with `lend`.
    pub(crate) fn give_back(&mut self, number: usize, item: T) {
        self.slots[number] = Some(item);
    }

    /// Removes the items for which `is_over` holds, and returns their number.
    pub(crate) fn remove_if(&mut self, is_over: impl Fn(&T) -> bool) -> u64 {
        let before = self.free.len();
        for (number, slot) in self.slots.iter_mut().enumerate() {
            if slot.take_if(|item| is_over(item)).is_some() {
                self.free.push(number);
            }
        }
        (self.free.len() - before) as u64
    }

    /// Releases a number that was taken out with `lend`.
    pub(crate) fn free(&mut self, number: usize) {
        self.free.push(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_number_is_reused_only_after_it_is_free() {
        let mut slab = Slab::new();
        assert_eq!((slab.next(), slab.insert('a'), slab.next(), slab.insert('b')), (0, 0, 1, 1));
        assert_eq!((slab.lend(0), slab.lend(0), slab.lend(9)), (Some('a'), None, None));
        assert_eq!(slab.next(), 2, "a number that is lent is taken");
        slab.give_back(0, 'A');
        assert_eq!(slab.lend(0), Some('A'));
        slab.free(0);
        assert_eq!((slab.next(), slab.insert('c'), slab.insert('d')), (0, 0, 2));
        assert_eq!((slab.remove_if(|item| *item == 'c'), slab.next()), (1, 0));
        assert_eq!((slab.lend(0), slab.lend(1)), (None, Some('b')));
    }
}
