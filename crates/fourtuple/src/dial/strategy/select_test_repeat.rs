use std::num::NonZeroU16;

use crate::dial::strategy::step::Step;
use crate::ports::{PortRange, Random};

/// Draws a random port for each try. Drawing one port twice is rare and costs less than a list of the ports tried.
pub(super) fn step(tries: NonZeroU16, tried: u32, range: PortRange, random: &mut Random) -> Option<Step> {
    (tried < u32::from(tries.get())).then(|| Step::Bind(random.u16(range.low()..=range.high())))
}
