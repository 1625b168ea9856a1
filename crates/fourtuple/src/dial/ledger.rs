use std::collections::{HashMap, VecDeque};
use std::mem;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::ports::{PortRange, PortSet, Random};

/// A dialer's record of the ports in use towards its destination, with one page for each source address.
///
/// The ledger is a hint: other processes take ports, and callers may close connections, without an update of the ledger. The
/// kernel decides each dial, and a wrong entry costs one refused connect(). In return a dial names a free port to the kernel,
/// however many ports are in use, and the kernel does not search.
#[derive(Debug)]
pub(super) struct PortLedger {
    range: PortRange,
    reserved: PortSet,
    pages: Vec<Page>,
    /// The rank of each page: its free ports plus 1, or 0 while its source is backed off.
    ranks: RankTree,
    /// Pages whose source is backed off, in the order of their last failure, the oldest first.
    failing: VecDeque<usize>,
    /// End of the back-off that ends first.
    next_end: Option<Instant>,
    /// Free ports of an empty page.
    empty: u32,
    /// The page of each source address; empty when the kernel chooses the source.
    by_source: HashMap<IpAddr, usize>,
}

/// The ports of one source address.
#[derive(Debug)]
struct Page {
    /// Ports known to be in use, and reserved ports, which an automatic choice never takes.
    taken: PortSet,
    /// Ports of the range that are not in `taken`.
    free: u32,
    back_off: Option<BackOff>,
    /// The length of the last back-off, if no dial has succeeded since.
    last_wait: Duration,
    /// The time of the last failure.
    failed: Option<Instant>,
    /// Whether the last search of the kernel was slow.
    was_slow: bool,
    /// Whether `taken` began with the ports in use that the kernel listed, and no search has shown that there are many more.
    is_read: bool,
}

/// An interval in which a failed source is not used while another source works.
#[derive(Clone, Copy, Debug)]
struct BackOff {
    until: Instant,
    why: Failure,
}

/// How a source of a pool failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The kernel found no free port, although the ledger may list some.
    Exhausted,
    /// The address cannot be bound, or has no route to the destination.
    Unusable,
}

/// The first back-off of a source. It doubles with each dial that tries the source again.
const FIRST_WAIT: Duration = Duration::from_millis(100);

/// Maximum back-off of a source.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(10);

impl PortLedger {
    /// Creates a ledger without ports in use. Without sources it has one page, for the source that the kernel chooses.
    pub(super) fn new(range: PortRange, reserved: PortSet, sources: &[IpAddr]) -> Self {
        let empty = range.len() - reserved.count_in(range);
        let page = |_| Page {
            taken: reserved.clone(),
            free: empty,
            back_off: None,
            last_wait: Duration::ZERO,
            failed: None,
            was_slow: false,
            is_read: false,
        };
        let pages: Vec<Page> = (0..sources.len().max(1)).map(page).collect();
        let ranks = RankTree::new(pages.len(), empty + 1);
        let by_source = sources.iter().enumerate().map(|(page, source)| (*source, page)).collect();
        PortLedger {
            range,
            reserved,
            pages,
            ranks,
            failing: VecDeque::new(),
            next_end: None,
            empty,
            by_source,
        }
    }

    /// Returns the page to dial from: a page whose back-off has ended, else the first page with the most free ports or, while all
    /// pages are backed off, the page whose last failure is the oldest. `now` is called only while a source is backed off.
    pub(super) fn choose(&mut self, now: impl FnOnce() -> Instant) -> usize {
        if let Some(end) = self.next_end {
            let now = now();
            if now >= end
                && let Some(page) = self.end_back_offs(now)
            {
                return page;
            }
        }
        self.highest()
    }

    fn highest(&self) -> usize {
        let page = self.ranks.highest();
        if self.ranks.get(page) == 0 { self.failing.front().copied().unwrap_or(page) } else { page }
    }

    /// Returns another page for a dial whose source has failed, unless that page has failed since `begun`, the begin of the dial.
    pub(super) fn another(&self, begun: Instant) -> Option<usize> {
        let page = self.highest();
        (self.pages[page].failed < Some(begun)).then_some(page)
    }

    /// Returns whether there is more than one source.
    pub(super) fn is_pool(&self) -> bool {
        self.pages.len() > 1
    }

    /// Backs off the source of `page`. Does nothing if there is no other source.
    pub(super) fn fail(&mut self, page: usize, why: Failure, now: Instant) {
        if !self.is_pool() {
            return;
        }
        let entry = &mut self.pages[page];
        let wait = match why {
            // A port may become free at any time.
            Failure::Exhausted => FIRST_WAIT,
            // Not doubled: all dials that are in progress from a source may fail together.
            Failure::Unusable => entry.last_wait.max(FIRST_WAIT),
        };
        entry.last_wait = wait;
        entry.failed = Some(now);
        let until = now + wait;
        if entry.back_off.replace(BackOff { until, why }).is_some() {
            self.failing.retain(|other| *other != page);
        }
        self.failing.push_back(page);
        self.next_end = Some(self.next_end.map_or(until, |end| end.min(until)));
        self.rank(page);
    }

    /// Ends the back-off of `page` after a successful dial from its source.
    pub(super) fn succeed(&mut self, page: usize) {
        self.pages[page].last_wait = Duration::ZERO;
        self.end_back_off(page);
    }

    /// Ends the back-offs of exhausted sources at their time. A source that was unusable stays backed off, for twice the time, until a
    /// dial from it succeeds: only the dial that gets the returned page tries it. Otherwise all dials would try a source at once that
    /// gives no answer, because it has the most free ports.
    fn end_back_offs(&mut self, now: Instant) -> Option<usize> {
        let pages = &mut self.pages;
        let (ranks, mut next_end, mut tried) = (&mut self.ranks, None::<Instant>, None);
        self.failing.retain(|&page| {
            let entry = &mut pages[page];
            let Some(back_off) = &mut entry.back_off else { return false };
            if back_off.until <= now && back_off.why == Failure::Exhausted {
                entry.back_off = None;
                ranks.set(page, entry.free + 1);
                return false;
            }
            if back_off.until <= now && tried.is_none() {
                entry.last_wait = (entry.last_wait * 2).min(MAX_WAIT);
                back_off.until = now + entry.last_wait;
                tried = Some(page);
            }
            next_end = Some(next_end.map_or(back_off.until, |end| end.min(back_off.until)));
            true
        });
        self.next_end = next_end;
        tried
    }

    fn end_back_off(&mut self, page: usize) {
        if self.pages[page].back_off.take().is_some() {
            self.failing.retain(|other| *other != page);
            if self.failing.is_empty() {
                self.next_end = None;
            }
            self.rank(page);
        }
    }

    fn set_free(&mut self, page: usize, free: u32) {
        self.pages[page].free = free;
        self.rank(page);
    }

    fn rank(&mut self, page: usize) {
        let entry = &self.pages[page];
        self.ranks.set(page, if entry.back_off.is_some() { 0 } else { entry.free + 1 });
    }

    /// Returns whether the source of `page` is backed off because it had no free port.
    pub(super) fn was_exhausted(&self, page: usize) -> bool {
        self.pages[page].back_off.is_some_and(|back_off| back_off.why == Failure::Exhausted)
    }

    /// Returns the number of free ports of `page`, as far as the ledger knows.
    pub(super) fn free_ports(&self, page: usize) -> u32 {
        self.pages[page].free
    }

    /// Returns whether half of the ports of `page` or more are in use. From there on a search by parity looks through one half of
    /// the ports in vain.
    pub(super) fn past_half(&self, page: usize) -> bool {
        self.pages[page].free * 2 <= self.empty
    }

    /// Records that the ledger has all ports in use, as the kernel listed them.
    pub(super) fn set_read(&mut self) {
        self.pages.iter_mut().for_each(|page| page.is_read = true);
    }

    /// Returns whether less than a quarter of the ports of `page` are in use, so that the kernel's own search is short: a search passes
    /// at most the ports in use.
    pub(super) fn is_sparse(&self, page: usize) -> bool {
        let page = &self.pages[page];
        page.is_read && page.free * 4 > self.empty * 3
    }

    /// Records whether a search of the kernel took long, while [`PortLedger::is_sparse`]. After two such searches in sequence other
    /// programs must hold more ports than the ledger knows.
    pub(super) fn note_search(&mut self, page: usize, was_slow: bool) {
        if mem::replace(&mut self.pages[page].was_slow, was_slow) && was_slow {
            self.note_crowd(page);
        }
    }

    /// Returns whether the last search of the kernel took long.
    pub(super) fn was_slow(&self, page: usize) -> bool {
        self.pages[page].was_slow
    }

    /// Records that other programs hold ports of `page` that the ledger does not know.
    pub(super) fn note_crowd(&mut self, page: usize) {
        self.pages[page].is_read = false;
    }

    /// Draws a free port of `page` at random, because a port that can be guessed makes blind attacks easier (RFC 6056), and marks it
    /// as in use.
    pub(super) fn take(&mut self, page: usize, random: &mut Random) -> Option<u16> {
        let start = random.u16(self.range.low()..=self.range.high());
        let taken = &mut self.pages[page].taken;
        let port = taken.next_free(self.range, start)?;
        taken.insert(port);
        self.set_free(page, self.free_ports(page).saturating_sub(1));
        Some(port)
    }

    /// Marks `port` as in use.
    pub(super) fn note(&mut self, page: usize, port: u16) {
        if self.range.contains(port) && self.pages[page].taken.insert(port) {
            self.set_free(page, self.free_ports(page).saturating_sub(1));
        }
    }

    /// Counts a port in use whose number is unknown, so that dials still alternate between the sources.
    pub(super) fn note_unknown(&mut self, page: usize) {
        self.set_free(page, self.free_ports(page).saturating_sub(1));
        // Rank 1: no free port on any page. Rank 0: all sources are backed off.
        if self.ranks.get(self.ranks.highest()) == 1 {
            (0..self.pages.len()).for_each(|page| self.forget(page));
        }
    }

    /// Counts a port as free that was counted by [`PortLedger::note_unknown`].
    pub(super) fn free_unknown(&mut self, page: usize) {
        self.set_free(page, self.empty.min(self.free_ports(page) + 1));
        self.has_port(page);
    }

    /// Ends the back-off of an exhausted source that has a free port again.
    fn has_port(&mut self, page: usize) {
        if self.was_exhausted(page) {
            self.end_back_off(page);
        }
    }

    /// Marks `port` as free.
    pub(super) fn free(&mut self, page: usize, port: u16) {
        if self.range.contains(port) && !self.reserved.contains(port) && self.pages[page].taken.remove(port) {
            self.set_free(page, self.empty.min(self.free_ports(page) + 1));
            self.has_port(page);
        }
    }

    /// Marks all ports of `page` as free. Without calls of [`Dialer::release`](super::Dialer::release) a page fills up with ports
    /// of connections that were closed long ago, so a full page says nothing about the kernel's sockets.
    pub(super) fn forget(&mut self, page: usize) {
        self.pages[page].taken.copy_from(&self.reserved);
        self.pages[page].is_read = false;
        self.set_free(page, self.empty);
    }

    /// Returns the page of a source address.
    pub(super) fn page_of(&self, source: IpAddr) -> Option<usize> {
        if self.by_source.is_empty() { Some(0) } else { self.by_source.get(&source).copied() }
    }
}

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
    /// Creates a tree in which each of `pages` pages has the rank `rank`.
    pub(super) fn new(pages: usize, rank: u32) -> Self {
        let leaves = pages.next_power_of_two();
        let mut ranks = RankTree { tree: vec![0; 2 * leaves], leaves };
        for page in 0..pages {
            ranks.set(page, rank);
        }
        ranks
    }

    pub(super) fn get(&self, page: usize) -> u32 {
        self.tree[self.leaves + page]
    }

    pub(super) fn set(&mut self, page: usize, rank: u32) {
        let mut node = self.leaves + page;
        self.tree[node] = rank;
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

    fn ledger(low: u16, high: u16, reserved: &str) -> PortLedger {
        let sources = ["127.0.0.1", "127.0.0.2"].map(|text| text.parse().unwrap());
        let range = PortRange::new(low, high).unwrap();
        let mut ledger = PortLedger::new(range, PortSet::parse_list(reserved).unwrap(), &sources);
        ledger.set_read();
        ledger
    }

    #[test]
    fn each_port_is_given_once_and_no_reserved_port() {
        let mut ledger = ledger(100, 163, "110-119");
        let mut random = Random::with_seed(5);
        let mut given: Vec<u16> = std::iter::from_fn(|| ledger.take(0, &mut random)).collect();
        given.sort_unstable();
        let expected: Vec<u16> = (100..110).chain(120..164).collect();
        assert_eq!(given, expected);
        assert_eq!((ledger.free_ports(0), ledger.free_ports(1)), (0, 54));
        ledger.free(0, 130);
        ledger.free(0, 115);
        ledger.free(0, 99);
        assert_eq!(ledger.take(0, &mut random), Some(130));
        assert_eq!(ledger.take(0, &mut random), None);
    }

    #[test]
    fn the_source_with_the_most_free_ports_comes_first() {
        let mut ledger = ledger(100, 107, "");
        let mut random = Random::with_seed(5);
        let mut counts = [0; 2];
        for _ in 0..10 {
            let page = ledger.choose(Instant::now);
            ledger.take(page, &mut random).unwrap();
            counts[page] += 1;
        }
        assert_eq!(counts, [5, 5]);
        ledger.free(1, 100);
        ledger.free(1, 101);
        ledger.free(1, 102);
        assert_eq!(ledger.choose(Instant::now), 1);
        assert!(ledger.past_half(0));
    }

    #[test]
    fn forget_frees_all_ports_but_reserved_ports() {
        let mut ledger = ledger(100, 107, "100");
        let mut random = Random::with_seed(5);
        while ledger.take(1, &mut random).is_some() {}
        ledger.forget(1);
        assert_eq!(ledger.free_ports(1), 7);
        ledger.note(1, 100);
        ledger.note(1, 101);
        ledger.note(1, 9);
        assert_eq!(ledger.free_ports(1), 6);
    }

    #[test]
    fn two_slow_searches_in_sequence_end_the_choice_of_the_kernel() {
        let mut ledger = ledger(100, 199, "");
        for was_slow in [true, false, true, false] {
            ledger.note_search(0, was_slow);
            assert_eq!((ledger.was_slow(0), ledger.is_sparse(0)), (was_slow, true));
        }
        ledger.note_search(0, true);
        ledger.note_search(0, true);
        assert_eq!([0, 1].map(|page| ledger.is_sparse(page)), [false, true]);
    }

    #[test]
    fn a_page_that_was_not_read_is_not_sparse() {
        let mut ledger = ledger(100, 199, "");
        ledger.forget(0);
        assert_eq!(
            [0, 1].map(|page| (ledger.free_ports(page), ledger.is_sparse(page))),
            [(100, false), (100, true)]
        );
    }

    #[test]
    fn a_page_with_a_quarter_of_its_ports_in_use_is_not_sparse() {
        let mut ledger = ledger(100, 107, "");
        for (port, is_sparse) in [(100, true), (101, false), (102, false)] {
            ledger.note(0, port);
            assert_eq!(ledger.is_sparse(0), is_sparse, "{port}");
        }
    }

    #[test]
    fn one_dial_tries_a_failed_source_again() {
        let mut ledger = ledger(100, 107, "");
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let chosen = |ledger: &mut PortLedger, when| ledger.choose(|| at(when));
        ledger.take(1, &mut Random::with_seed(5)).unwrap();
        assert_eq!(chosen(&mut ledger, 0), 0);
        // All dials in progress from the source fail, and count as one failure.
        (0..20).for_each(|_| ledger.fail(0, Failure::Unusable, at(0)));
        assert_eq!((chosen(&mut ledger, 99), ledger.another(at(0))), (1, Some(1)));
        // The source still has the most free ports, but one dial at a time tries it, each after twice the time.
        for (when, page) in [(100, 0), (101, 1), (299, 1), (300, 0), (300, 1), (699, 1), (700, 0), (701, 1)] {
            assert_eq!(chosen(&mut ledger, when), page, "{when} ms");
        }
        // A failure of such a dial starts the same back-off again; the longest is MAX_WAIT.
        ledger.fail(0, Failure::Unusable, at(1000));
        assert_eq!((chosen(&mut ledger, 1799), chosen(&mut ledger, 1800)), (1, 0));
        for when in [10_000, 20_000, 30_000, 39_999, 40_000] {
            assert_eq!(chosen(&mut ledger, when), usize::from(when == 39_999), "{when} ms");
        }
        // A success ends the back-off, and the next one is short again.
        ledger.succeed(0);
        assert_eq!((chosen(&mut ledger, 40_001), chosen(&mut ledger, 40_001)), (0, 0));
        ledger.fail(0, Failure::Unusable, at(41_000));
        assert_eq!((chosen(&mut ledger, 41_099), chosen(&mut ledger, 41_100)), (1, 0));
    }

    #[test]
    fn all_dials_use_an_exhausted_source_after_its_back_off() {
        let mut ledger = ledger(100, 107, "");
        let start = Instant::now();
        ledger.take(1, &mut Random::with_seed(5)).unwrap();
        ledger.fail(0, Failure::Exhausted, start);
        let ended = || start + FIRST_WAIT;
        assert_eq!((ledger.choose(|| start), ledger.choose(ended), ledger.choose(ended)), (1, 0, 0));
    }

    #[test]
    fn failing_sources_take_turns() {
        let mut ledger = ledger(100, 107, "");
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        ledger.fail(1, Failure::Unusable, at(0));
        ledger.fail(0, Failure::Unusable, at(1));
        assert_eq!(ledger.choose(|| at(2)), 1, "failed longest ago");
        assert_eq!(ledger.another(at(2)), Some(1));
        ledger.fail(1, Failure::Unusable, at(3));
        assert_eq!(ledger.another(at(2)), Some(0));
        ledger.fail(0, Failure::Unusable, at(4));
        assert_eq!(ledger.another(at(2)), None, "each has failed in this dial");
    }

    #[test]
    fn a_free_port_ends_the_back_off_of_its_source() {
        let mut ledger = ledger(100, 107, "");
        let now = Instant::now();
        let port = ledger.take(0, &mut Random::with_seed(5)).unwrap();
        ledger.fail(0, Failure::Exhausted, now);
        ledger.fail(1, Failure::Unusable, now);
        ledger.free(0, port);
        assert_eq!(ledger.choose(|| now), 0);
    }

    #[test]
    fn a_single_source_is_never_backed_off() {
        let mut ledger = PortLedger::new(PortRange::new(100, 107).unwrap(), PortSet::new(), &[]);
        ledger.fail(0, Failure::Unusable, Instant::now());
        assert!(ledger.pages[0].back_off.is_none());
    }

    #[test]
    fn the_tree_agrees_with_a_linear_search() {
        let mut random = Rng::with_seed(3);
        for pages in [1, 2, 3, 14, 16, 33] {
            let mut ranks = RankTree::new(pages, 5);
            let mut expected = vec![5; pages];
            for _ in 0..2000 {
                let (page, rank) = (random.usize(..pages), random.u32(..9));
                ranks.set(page, rank);
                expected[page] = rank;
                let most = *expected.iter().max().unwrap();
                let first = expected.iter().position(|rank| *rank == most).unwrap();
                assert_eq!((ranks.highest(), ranks.get(first)), (first, most));
            }
            expected.iter().enumerate().for_each(|(page, _)| ranks.set(page, 0));
            assert_eq!(ranks.highest(), 0, "an unused leaf is never chosen");
        }
    }
}
