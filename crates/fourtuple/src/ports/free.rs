use crate::ports::{PortRange, PortSet};

/// The ports of a range that a scan reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Even,
    Odd,
    Both,
}

impl Lane {
    /// Returns the lane that contains `port` and every second port from there.
    pub(super) fn of(port: u16) -> Self {
        if port & 1 == 0 { Lane::Even } else { Lane::Odd }
    }

    /// Returns the bits of a word of 64 ports that belong to the lane.
    pub(super) fn bits(self) -> u64 {
        match self {
            Lane::Even => 0x5555_5555_5555_5555,
            Lane::Odd => 0xAAAA_AAAA_AAAA_AAAA,
            Lane::Both => u64::MAX,
        }
    }
}

/// The ports that an automatic choice may take, with an index that finds the next free port in a few steps, however many ports in use
/// lie in between. The simulation of a fleet dial by dial depends on this.
#[derive(Clone)]
pub(super) struct FreePorts {
    words: Box<[u64; 1024]>,
    /// An index by lane (even, odd): one bit per word, set while the word has a free port of that lane.
    open: [[u64; 16]; 2],
    /// First and last word of the range: no port outside of the range is free.
    first: u16,
    last: u16,
}

impl FreePorts {
    /// Creates the set of all ports of `range` that are not in `skipped`.
    pub(super) fn new(range: PortRange, skipped: &PortSet) -> Self {
        let mut ports = FreePorts {
            words: Box::new([0; 1024]),
            open: [[0; 16]; 2],
            first: range.low() >> 6,
            last: range.high() >> 6,
        };
        for port in range.iter().filter(|&port| !skipped.contains(port)) {
            ports.insert(port);
        }
        ports
    }

    /// Copies `pristine`, a set of the same range, and writes only the words of that range.
    pub(super) fn reset_to(&mut self, pristine: &FreePorts) {
        let words = usize::from(self.first)..=usize::from(self.last);
        self.words[words.clone()].copy_from_slice(&pristine.words[words]);
        self.open = pristine.open;
    }

    #[inline]
    pub(super) fn contains(&self, port: u16) -> bool {
        self.words[usize::from(port >> 6)] >> (port & 63) & 1 == 1
    }

    pub(super) fn insert(&mut self, port: u16) {
        let index = usize::from(port >> 6);
        self.words[index] |= 1 << (port & 63);
        self.open[usize::from(port & 1)][index >> 6] |= 1 << (index & 63);
    }

    #[inline]
    pub(super) fn remove(&mut self, port: u16) {
        let index = usize::from(port >> 6);
        self.words[index] &= !(1 << (port & 63));
        if self.words[index] & Lane::of(port).bits() == 0 {
            self.open[usize::from(port & 1)][index >> 6] &= !(1 << (index & 63));
        }
    }

    /// Returns the first free port of `lane` from `low` to `high`, both inclusive.
    #[inline]
    pub(super) fn first(&self, low: u16, high: u16, lane: Lane) -> Option<u16> {
        let index = low >> 6;
        let mut port = index << 6;
        let mut word = self.words[usize::from(index)] & lane.bits() & (u64::MAX << (low & 63));
        if word == 0 {
            let index = self.open_word(index + 1, lane)?;
            port = index << 6;
            word = self.words[usize::from(index)] & lane.bits();
        }
        port += word.trailing_zeros() as u16;
        (port <= high).then_some(port)
    }

    /// Returns the first word at or after `from` with a free port of `lane`.
    fn open_word(&self, from: u16, lane: Lane) -> Option<u16> {
        let mut index = usize::from(from >> 6);
        let mut ignore = (1_u64 << (from & 63)) - 1;
        while index < 16 {
            let open = match lane {
                Lane::Even => self.open[0][index],
                Lane::Odd => self.open[1][index],
                Lane::Both => self.open[0][index] | self.open[1][index],
            };
            let open = open & !ignore;
            if open != 0 {
                return Some((index as u16) << 6 | open.trailing_zeros() as u16);
            }
            ignore = 0;
            index += 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_free_port_is_found_across_many_words() {
        let range = PortRange::new(130, 65535).unwrap();
        let mut free = FreePorts::new(range, &PortSet::parse_list("130-60000").unwrap());
        assert_eq!(free.first(0, 65535, Lane::Even), Some(60002));
        assert_eq!(free.first(0, 65535, Lane::Odd), Some(60001));
        assert_eq!(free.first(0, 65535, Lane::Both), Some(60001));
        assert_eq!(free.first(130, 60000, Lane::Both), None);
        for port in (60001..65535).step_by(2) {
            free.remove(port);
        }
        assert_eq!(free.first(131, 65534, Lane::Odd), None);
        assert_eq!(free.first(131, 65535, Lane::Odd), Some(65535));
        free.remove(65535);
        assert_eq!(free.first(65535, 65535, Lane::Both), None);
        free.insert(141);
        assert_eq!(free.first(0, 65535, Lane::Odd), Some(141));
    }
}
