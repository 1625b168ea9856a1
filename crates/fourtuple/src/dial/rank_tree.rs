/// The rank of each page of the ledger, in a tree that finds the page with the highest rank.
///
/// Each node holds the larger value of its two children. With thousands of sources a linear search would cost a sixth of a dial.
#[derive(Debug)]
pub(super) struct RankTree {
    /// The root is at 1, the children of `n` at `2n` and `2n + 1`. The pages are the leaves, from `leaves` on.
    tree: Vec<u32>,
    leaves: usize,
}

impl RankTree {
    /// Creates a tree in which each of `pages` pages has the rank `room`.
    pub(super) fn new(pages: usize, room: u32) -> Self {
        let leaves = pages.next_power_of_two();
        let mut ranks = RankTree { tree: vec![0; 2 * leaves], leaves };
        for page in 0..pages {
            ranks.set(page, room);
        }
        ranks
    }

    pub(super) fn get(&self, page: usize) -> u32 {
        self.tree[self.leaves + page]
    }

    pub(super) fn set(&mut self, page: usize, room: u32) {
        let mut node = self.leaves + page;
        self.tree[node] = room;
        while node > 1 {
            let largest = self.tree[node].max(self.tree[node ^ 1]);
            node /= 2;
            if self.tree[node] == largest {
                return;
            }
            self.tree[node] = largest;
        }
    }

    /// Returns the first page with the highest rank.
    pub(super) fn highest(&self) -> usize {
        let mut node = 1;
        while node < self.leaves {
            // The left child comes first: unused leaves are on the right.
            node = 2 * node + usize::from(self.tree[2 * node] != self.tree[node]);
        }
        node - self.leaves
    }
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;

    use super::*;

    #[test]
    fn the_tree_agrees_with_a_linear_search() {
        let mut random = Rng::with_seed(3);
        for pages in [1, 2, 3, 14, 16, 33] {
            let mut ranks = RankTree::new(pages, 5);
            let mut expected = vec![5; pages];
            for _ in 0..2000 {
                let (page, room) = (random.usize(..pages), random.u32(..9));
                ranks.set(page, room);
                expected[page] = room;
                let most = *expected.iter().max().unwrap();
                let first = expected.iter().position(|room| *room == most).unwrap();
                assert_eq!((ranks.highest(), ranks.get(first)), (first, most));
            }
            expected.iter().enumerate().for_each(|(page, _)| ranks.set(page, 0));
            assert_eq!(ranks.highest(), 0, "an unused leaf is never chosen");
        }
    }
}
