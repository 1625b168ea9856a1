use std::num::NonZeroU16;

use fastrand::Rng;

use super::Step;
use crate::ports::PortRange;

/// A port drawn at random, each time anew: trying the same one twice is rarer than the cost of remembering.
pub(super) fn step(tries: NonZeroU16, tried: u32, range: PortRange, random: &mut Rng) -> Option<Step> {
    (tried < u32::from(tries.get())).then(|| Step::Bind(random.u16(range.low()..=range.high())))
}
