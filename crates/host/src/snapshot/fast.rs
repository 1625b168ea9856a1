//! A hash function for keys of a few integers, several times faster than the hash function of the standard library.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Builds hashers with a random seed, as peers choose addresses and ports.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fast(u64);

impl Default for Fast {
    fn default() -> Fast {
        Fast(RandomState::new().hash_one(0))
    }
}

impl BuildHasher for Fast {
    type Hasher = Folded;

    fn build_hasher(&self) -> Folded {
        Folded(self.0)
    }
}

/// A multiplication to 128 bits whose halves are combined, for each integer.
pub(super) struct Folded(u64);

/// The fraction of the golden ratio, which is odd.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for Folded {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u16(&mut self, value: u16) {
        self.write_u64(value.into());
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(value.into());
    }

    fn write_u64(&mut self, value: u64) {
        let product = u128::from(self.0 ^ value) * u128::from(FACTOR);
        self.0 = (product as u64) ^ (product >> 64) as u64;
    }

    fn finish(&self) -> u64 {
        self.0.wrapping_mul(FACTOR)
    }
}
