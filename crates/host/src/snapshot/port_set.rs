//! A set of ports.

/// A bit for each port.
#[derive(Debug)]
pub(super) struct Ports(Box<[u64; 1024]>);

impl Default for Ports {
    fn default() -> Ports {
        Ports(Box::new([0; 1024]))
    }
}

impl Ports {
    pub(super) fn insert(&mut self, port: u16) {
        self.0[usize::from(port >> 6)] |= 1 << (port & 63);
    }

    pub(super) fn contains(&self, port: u16) -> bool {
        self.0[usize::from(port >> 6)] >> (port & 63) & 1 == 1
    }

    /// Returns the number of ports, and the number with this parity.
    pub(super) fn count(&self, parity: u16) -> (u32, u32) {
        let mask = if parity & 1 == 0 { 0x5555_5555_5555_5555 } else { 0xaaaa_aaaa_aaaa_aaaa };
        let sum = |mask: u64| self.0.iter().map(|word| (word & mask).count_ones()).sum();
        (sum(u64::MAX), sum(mask))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_counted_by_parity() {
        let mut ports = Ports::default();
        [0, 1, 63, 64, 65, 65_535, 65_535].into_iter().for_each(|port| ports.insert(port));
        assert_eq!((ports.count(0), ports.count(20_001)), ((6, 2), (6, 4)));
        assert!(ports.contains(63) && !ports.contains(62));
    }
}
