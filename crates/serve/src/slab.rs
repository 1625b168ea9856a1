//! Connections by number, in one piece of memory.

/// Slots that are used again.
pub(crate) struct Slab<T> {
    slots: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Slab<T> {
    pub(crate) fn new() -> Slab<T> {
        Slab { slots: Vec::new(), free: Vec::new() }
    }

    /// The number that the next one will have.
    pub(crate) fn next(&self) -> usize {
        self.free.last().copied().unwrap_or(self.slots.len())
    }

    pub(crate) fn insert(&mut self, thing: T) -> usize {
        match self.free.pop() {
            Some(number) => {
                self.slots[number] = Some(thing);
                number
            }
            None => {
                self.slots.push(Some(thing));
                self.slots.len() - 1
            }
        }
    }

    /// Takes out what has this number; the number stays reserved until it is given back or freed.
    pub(crate) fn lend(&mut self, number: usize) -> Option<T> {
        self.slots.get_mut(number)?.take()
    }

    /// Puts back what was lent.
    pub(crate) fn give_back(&mut self, number: usize, thing: T) {
        self.slots[number] = Some(thing);
    }

    /// The number of what was lent may be used again.
    pub(crate) fn free(&mut self, number: usize) {
        self.free.push(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_used_again_and_never_twice_at_once() {
        let mut slab = Slab::new();
        assert_eq!((slab.next(), slab.insert('a'), slab.next(), slab.insert('b')), (0, 0, 1, 1));
        assert_eq!((slab.lend(0), slab.lend(0), slab.lend(9)), (Some('a'), None, None));
        assert_eq!(slab.next(), 2, "a number that is lent is taken");
        slab.give_back(0, 'A');
        assert_eq!(slab.lend(0), Some('A'));
        slab.free(0);
        assert_eq!((slab.next(), slab.insert('c'), slab.insert('d')), (0, 0, 2));
        assert_eq!((slab.lend(0), slab.lend(1)), (Some('c'), Some('b')));
    }
}
