use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::dial::rank_tree::RankTree;
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
    /// Pages whose source is backed off, in the order of their last failure.
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
    source: Option<IpAddr>,
    /// Ports known to be in use, and reserved ports, which an automatic choice never takes.
    taken: PortSet,
    /// Ports of the range that are not in `taken`.
    room: u32,
    back_off: Option<BackOff>,
    /// The length of the last back-off, if no dial has succeeded since.
    last_wait: Duration,
}

/// An interval in which a failed source is not used while another source works.
#[derive(Clone, Copy, Debug)]
struct BackOff {
    since: Instant,
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

/// The first back-off of a source. It doubles with each consecutive failure.
const FIRST_WAIT: Duration = Duration::from_millis(100);

/// The longest back-off of a source.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(10);

impl PortLedger {
    /// Creates a ledger without ports in use. Without sources it has one page, for the source that the kernel chooses.
    pub(super) fn new(range: PortRange, reserved: PortSet, sources: &[IpAddr]) -> Self {
        let empty = range.len() - reserved.count_in(range);
        let page = |source| Page {
            source,
            taken: reserved.clone(),
            room: empty,
            back_off: None,
            last_wait: Duration::ZERO,
        };
        let pages: Vec<Page> = if sources.is_empty() {
            vec![page(None)]
        } else {
            sources.iter().map(|source| page(Some(*source))).collect()
        };
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

    /// Returns the page to dial from: the first page with the most free ports or, while all pages are backed off, the page whose
    /// last failure is the oldest. `now` is called only while a source is backed off.
    pub(super) fn highest(&mut self, now: impl FnOnce() -> Instant) -> usize {
        if let Some(end) = self.next_end {
            let now = now();
            if now >= end {
                self.end_back_offs(now);
            }
        }
        let page = self.ranks.highest();
        if self.ranks.get(page) == 0 { self.failing.front().copied().unwrap_or(page) } else { page }
    }

    /// Returns another page for a dial that began at `begun` and whose source has failed: a page that is not backed off, or whose
    /// last failure was before the dial.
    pub(super) fn another(&mut self, begun: Instant, now: Instant) -> Option<usize> {
        let page = self.highest(|| now);
        match self.pages[page].back_off {
            Some(back_off) if back_off.since >= begun => None,
            _ => Some(page),
        }
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
            Failure::Unusable => (entry.last_wait * 2).clamp(FIRST_WAIT, LONGEST_WAIT),
        };
        entry.last_wait = wait;
        let until = now + wait;
        if entry.back_off.replace(BackOff { since: now, until, why }).is_some() {
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

    fn end_back_offs(&mut self, now: Instant) {
        let pages = &mut self.pages;
        let (ranks, mut next_end) = (&mut self.ranks, None::<Instant>);
        self.failing.retain(|&page| {
            let Some(back_off) = pages[page].back_off.filter(|back_off| back_off.until > now) else {
                pages[page].back_off = None;
                ranks.set(page, pages[page].room + 1);
                return false;
            };
            next_end = Some(next_end.map_or(back_off.until, |end| end.min(back_off.until)));
            true
        });
        self.next_end = next_end;
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

    fn set_room(&mut self, page: usize, room: u32) {
        self.pages[page].room = room;
        self.rank(page);
    }

    fn rank(&mut self, page: usize) {
        let entry = &self.pages[page];
        self.ranks.set(page, if entry.back_off.is_some() { 0 } else { entry.room + 1 });
    }

    /// Returns whether the source of `page` is backed off.
    pub(super) fn is_backed_off(&self, page: usize) -> bool {
        self.pages[page].back_off.is_some()
    }

    /// Returns the source of `page`; `None`: the kernel chooses.
    pub(super) fn source(&self, page: usize) -> Option<IpAddr> {
        self.pages[page].source
    }

    /// Returns the number of free ports of `page`, as far as the ledger knows.
    pub(super) fn room(&self, page: usize) -> u32 {
        self.pages[page].room
    }

    /// Returns whether half of the ports of `page` or more are in use. From there on a search by parity looks through one half of
    /// the ports in vain.
    pub(super) fn past_half(&self, page: usize) -> bool {
        self.pages[page].room * 2 <= self.empty
    }

    /// Draws a free port of `page` at random, because a port that can be guessed makes blind attacks easier (RFC 6056), and marks it
    /// as in use.
    pub(super) fn take(&mut self, page: usize, random: &mut Random) -> Option<u16> {
        let start = random.u16(self.range.low()..=self.range.high());
        let taken = &mut self.pages[page].taken;
        let port = taken.next_free(self.range, start)?;
        taken.insert(port);
        self.set_room(page, self.room(page).saturating_sub(1));
        Some(port)
    }

    /// Marks `port` as in use.
    pub(super) fn note(&mut self, page: usize, port: u16) {
        if self.range.contains(port) && self.pages[page].taken.insert(port) {
            self.set_room(page, self.room(page).saturating_sub(1));
        }
    }

    /// Counts a port in use whose number is unknown, so that dials still alternate between the sources.
    pub(super) fn note_unknown(&mut self, page: usize) {
        self.set_room(page, self.room(page).saturating_sub(1));
        // Rank 1: no free port on any page. Rank 0: all sources are backed off.
        if self.ranks.get(self.ranks.highest()) == 1 {
            (0..self.pages.len()).for_each(|page| self.forget(page));
        }
    }

    /// Counts a port as free that was counted by [`PortLedger::note_unknown`].
    pub(super) fn free_unknown(&mut self, page: usize) {
        self.set_room(page, self.empty.min(self.room(page) + 1));
        self.has_port(page);
    }

    /// Ends the back-off of an exhausted source that has a free port again.
    fn has_port(&mut self, page: usize) {
        if self.pages[page].back_off.is_some_and(|back_off| back_off.why == Failure::Exhausted) {
            self.end_back_off(page);
        }
    }

    /// Marks `port` as free.
    pub(super) fn free(&mut self, page: usize, port: u16) {
        if self.range.contains(port) && !self.reserved.contains(port) && self.pages[page].taken.remove(port) {
            self.set_room(page, self.empty.min(self.room(page) + 1));
            self.has_port(page);
        }
    }

    /// Marks all ports of `page` as free. Without calls of [`Dialer::release`](super::Dialer::release) a page fills up with ports
    /// of connections that were closed long ago, so a full page says nothing about the kernel's sockets.
    pub(super) fn forget(&mut self, page: usize) {
        self.pages[page].taken.copy_from(&self.reserved);
        self.set_room(page, self.empty);
    }

    /// Returns the page of a source address.
    pub(super) fn page_of(&self, source: IpAddr) -> Option<usize> {
        if self.by_source.is_empty() { Some(0) } else { self.by_source.get(&source).copied() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger(low: u16, high: u16, reserved: &str) -> PortLedger {
        let sources = ["127.0.0.1", "127.0.0.2"].map(|text| text.parse().unwrap());
        PortLedger::new(PortRange::new(low, high).unwrap(), PortSet::parse_list(reserved).unwrap(), &sources)
    }

    #[test]
    fn each_port_is_given_once_and_no_reserved_port() {
        let mut ledger = ledger(100, 163, "110-119");
        let mut random = Random::with_seed(5);
        let mut given: Vec<u16> = std::iter::from_fn(|| ledger.take(0, &mut random)).collect();
        given.sort_unstable();
        let expected: Vec<u16> = (100..110).chain(120..164).collect();
        assert_eq!(given, expected);
        assert_eq!((ledger.room(0), ledger.room(1)), (0, 54));
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
            let page = ledger.highest(Instant::now);
            ledger.take(page, &mut random).unwrap();
            counts[page] += 1;
        }
        assert_eq!(counts, [5, 5]);
        ledger.free(1, 100);
        ledger.free(1, 101);
        ledger.free(1, 102);
        assert_eq!(ledger.highest(Instant::now), 1);
        assert!(ledger.past_half(0));
    }

    #[test]
    fn forget_frees_all_ports_but_reserved_ports() {
        let mut ledger = ledger(100, 107, "100");
        let mut random = Random::with_seed(5);
        while ledger.take(1, &mut random).is_some() {}
        ledger.forget(1);
        assert_eq!(ledger.room(1), 7);
        ledger.note(1, 100);
        ledger.note(1, 101);
        ledger.note(1, 9);
        assert_eq!(ledger.room(1), 6);
    }

    #[test]
    fn a_failed_source_is_backed_off_and_tried_again() {
        let mut ledger = ledger(100, 107, "");
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        ledger.take(1, &mut Random::with_seed(5)).unwrap();
        assert_eq!(ledger.highest(|| at(0)), 0);
        ledger.fail(0, Failure::Unusable, at(0));
        assert_eq!((ledger.highest(|| at(99)), ledger.is_backed_off(0)), (1, true));
        assert_eq!(ledger.another(at(0), at(99)), Some(1));
        assert_eq!((ledger.highest(|| at(100)), ledger.is_backed_off(0)), (0, false), "tried again");
        // The back-off doubles with each failure, up to LONGEST_WAIT.
        ledger.fail(0, Failure::Unusable, at(100));
        assert_eq!((ledger.highest(|| at(299)), ledger.highest(|| at(300))), (1, 0));
        (0..20).for_each(|_| ledger.fail(0, Failure::Unusable, at(300)));
        assert_eq!((ledger.highest(|| at(10_299)), ledger.highest(|| at(10_300))), (1, 0));
        // A success ends the back-off, and the next one is short again.
        ledger.succeed(0);
        ledger.fail(0, Failure::Unusable, at(11_000));
        assert_eq!((ledger.highest(|| at(11_099)), ledger.highest(|| at(11_100))), (1, 0));
    }

    #[test]
    fn failing_sources_take_turns() {
        let mut ledger = ledger(100, 107, "");
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        ledger.fail(1, Failure::Unusable, at(0));
        ledger.fail(0, Failure::Unusable, at(1));
        assert_eq!(ledger.highest(|| at(2)), 1, "failed longest ago");
        assert_eq!(ledger.another(at(2), at(2)), Some(1));
        ledger.fail(1, Failure::Unusable, at(3));
        assert_eq!(ledger.another(at(2), at(3)), Some(0));
        ledger.fail(0, Failure::Unusable, at(4));
        assert_eq!(ledger.another(at(2), at(4)), None, "each has failed in this dial");
    }

    #[test]
    fn a_free_port_ends_the_back_off_of_its_source() {
        let mut ledger = ledger(100, 107, "");
        let now = Instant::now();
        let port = ledger.take(0, &mut Random::with_seed(5)).unwrap();
        ledger.fail(0, Failure::Exhausted, now);
        ledger.fail(1, Failure::Unusable, now);
        ledger.free(0, port);
        assert!(!ledger.is_backed_off(0) && ledger.is_backed_off(1));
        assert_eq!(ledger.highest(|| now), 0);
    }

    #[test]
    fn a_single_source_is_never_backed_off() {
        let mut ledger = PortLedger::new(PortRange::new(100, 107).unwrap(), PortSet::new(), &[]);
        ledger.fail(0, Failure::Unusable, Instant::now());
        assert!(!ledger.is_backed_off(0));
    }
}
