use std::collections::HashMap;
use std::net::IpAddr;

use fastrand::Rng;

use super::rooms::Rooms;
use crate::ports::{PortRange, PortSet};

/// What a dialer knows of the ports towards its destination: which are taken, by source.
///
/// The book is a hint and never the truth. Other processes take ports without telling, and connections may be closed
/// without a word; so the kernel decides every dial, and a wrong entry costs one refused connect() at most. What it buys:
/// a free port is named to the kernel at once, at any fill, instead of being searched for.
#[derive(Debug)]
pub(super) struct Book {
    range: PortRange,
    reserved: PortSet,
    pages: Vec<Page>,
    /// Ports of the range that are not in `taken`, by page.
    rooms: Rooms,
    /// Ports that an empty page has.
    empty: u32,
    /// Where the page of a source is; empty when the kernel chooses the source.
    by_source: HashMap<IpAddr, usize>,
}

/// What is known of one source address.
#[derive(Debug)]
struct Page {
    source: Option<IpAddr>,
    /// Ports that are taken, as far as known, and the reserved ones, which an automatic choice never gets.
    taken: PortSet,
}

impl Book {
    /// An empty book; without sources there is one page, for whatever source the kernel takes.
    pub(super) fn new(range: PortRange, reserved: PortSet, sources: &[IpAddr]) -> Self {
        let empty = range.len() - reserved.count_in(range);
        let page = |source| Page { source, taken: reserved.clone() };
        let pages: Vec<Page> = if sources.is_empty() {
            vec![page(None)]
        } else {
            sources.iter().map(|source| page(Some(*source))).collect()
        };
        let rooms = Rooms::new(pages.len(), empty);
        let by_source = sources.iter().enumerate().map(|(page, source)| (*source, page)).collect();
        Book { range, reserved, pages, rooms, empty, by_source }
    }

    /// The page with the most room, of equals the first.
    pub(super) fn roomiest(&self) -> usize {
        self.rooms.roomiest()
    }

    /// The source of a page.
    pub(super) fn source(&self, page: usize) -> Option<IpAddr> {
        self.pages[page].source
    }

    /// Ports left on a page, as far as known.
    pub(super) fn room(&self, page: usize) -> u32 {
        self.rooms.get(page)
    }

    /// Whether half of a page's ports are taken, or more: where a search by parity falls off its cliff.
    pub(super) fn past_half(&self, page: usize) -> bool {
        self.rooms.get(page) * 2 <= self.empty
    }

    /// A free port of a page, taken from now on so that no other thread is given the same; drawn at random, for a port
    /// that can be guessed is half of an attack (RFC 6056).
    pub(super) fn take(&mut self, page: usize, random: &mut Rng) -> Option<u16> {
        let start = random.u16(self.range.low()..=self.range.high());
        let taken = &mut self.pages[page].taken;
        let port = taken.next_free(self.range, start)?;
        taken.insert(port);
        self.rooms.set(page, self.rooms.get(page).saturating_sub(1));
        Some(port)
    }

    /// Notes that a port is taken.
    pub(super) fn note(&mut self, page: usize, port: u16) {
        if self.range.contains(port) && self.pages[page].taken.insert(port) {
            self.rooms.set(page, self.rooms.get(page).saturating_sub(1));
        }
    }

    /// Notes that some port is taken, nobody knows which: the room is less all the same, so that the sources take turns.
    pub(super) fn note_unknown(&mut self, page: usize) {
        self.rooms.set(page, self.rooms.get(page).saturating_sub(1));
        if self.rooms.get(self.rooms.roomiest()) == 0 {
            self.forget_all();
        }
    }

    /// Notes that a port that nobody knows is free again.
    pub(super) fn free_unknown(&mut self, page: usize) {
        self.rooms.set(page, self.empty.min(self.rooms.get(page) + 1));
    }

    /// Notes that a port is free again.
    pub(super) fn free(&mut self, page: usize, port: u16) {
        if self.range.contains(port) && !self.reserved.contains(port) && self.pages[page].taken.remove(port) {
            self.rooms.set(page, self.empty.min(self.rooms.get(page) + 1));
        }
    }

    /// Forgets what is known of a page. A book that nobody tells of closed connections fills up with ports that are
    /// long free; once nothing is left in it, not knowing is the better guess.
    pub(super) fn forget(&mut self, page: usize) {
        self.pages[page].taken.copy_from(&self.reserved);
        self.rooms.set(page, self.empty);
    }

    /// The page of a source address.
    pub(super) fn page_of(&self, source: IpAddr) -> Option<usize> {
        if self.by_source.is_empty() { Some(0) } else { self.by_source.get(&source).copied() }
    }

    /// Forgets everything, on every page.
    pub(super) fn forget_all(&mut self) {
        for page in 0..self.pages.len() {
            self.forget(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn book(low: u16, high: u16, reserved: &str) -> Book {
        let sources = ["127.0.0.1", "127.0.0.2"].map(|text| text.parse().unwrap());
        Book::new(PortRange::new(low, high).unwrap(), PortSet::parse_list(reserved).unwrap(), &sources)
    }

    #[test]
    fn every_port_is_given_once_and_reserved_ones_never() {
        let mut book = book(100, 163, "110-119");
        let mut random = Rng::with_seed(5);
        let mut given: Vec<u16> = std::iter::from_fn(|| book.take(0, &mut random)).collect();
        given.sort_unstable();
        let expected: Vec<u16> = (100..110).chain(120..164).collect();
        assert_eq!(given, expected);
        assert_eq!((book.room(0), book.room(1)), (0, 54));
        book.free(0, 130);
        book.free(0, 115);
        book.free(0, 99);
        assert_eq!(book.take(0, &mut random), Some(130));
        assert_eq!(book.take(0, &mut random), None);
    }

    #[test]
    fn the_roomiest_source_comes_first() {
        let mut book = book(100, 107, "");
        let mut random = Rng::with_seed(5);
        let mut counts = [0; 2];
        for _ in 0..10 {
            let page = book.roomiest();
            book.take(page, &mut random).unwrap();
            counts[page] += 1;
        }
        assert_eq!(counts, [5, 5]);
        book.free(1, 100);
        book.free(1, 101);
        book.free(1, 102);
        assert_eq!(book.roomiest(), 1);
        assert!(book.past_half(0));
    }

    #[test]
    fn forgetting_brings_all_ports_back_but_the_reserved() {
        let mut book = book(100, 107, "100");
        let mut random = Rng::with_seed(5);
        while book.take(1, &mut random).is_some() {}
        book.forget(1);
        assert_eq!(book.room(1), 7);
        book.note(1, 100);
        book.note(1, 101);
        book.note(1, 9);
        assert_eq!(book.room(1), 6);
    }
}
