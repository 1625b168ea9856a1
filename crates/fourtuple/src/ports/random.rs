use std::ops::RangeBounds;

use fastrand::Rng;

/// A generator of pseudo-random numbers, for pure functions that draw ports. Equal seeds give equal sequences in one version of this
/// crate. The generator is fast and not cryptographic.
///
/// ```
/// use fourtuple::ports::Random;
///
/// let mut random = Random::with_seed(1);
/// let port = random.u16(32768..=60999);
/// assert!((32768..=60999).contains(&port) && random.u32(..10) < 10);
///
/// let mut continued = Random::with_seed(random.state());
/// assert_eq!(continued.u64(), random.u64());
/// random.seed(1);
/// assert_eq!(random.u16(32768..=60999), port);
/// ```
#[derive(Clone, Debug)]
pub struct Random(Rng);

impl Random {
    /// Returns a generator with a seed.
    pub const fn with_seed(seed: u64) -> Random {
        Random(Rng::with_seed(seed))
    }

    /// Starts the sequence of another seed.
    pub fn seed(&mut self, seed: u64) {
        self.0.seed(seed);
    }

    /// Returns the seed with which another generator continues this sequence.
    pub fn state(&self) -> u64 {
        self.0.get_seed()
    }

    /// Draws a number of the range.
    ///
    /// # Panics
    ///
    /// If the range is empty.
    pub fn u16(&mut self, range: impl RangeBounds<u16>) -> u16 {
        self.0.u16(range)
    }

    /// Draws a number of the range.
    ///
    /// # Panics
    ///
    /// If the range is empty.
    pub fn u32(&mut self, range: impl RangeBounds<u32>) -> u32 {
        self.0.u32(range)
    }

    /// Draws a number.
    pub fn u64(&mut self) -> u64 {
        self.0.u64(..)
    }
}
