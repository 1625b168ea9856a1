use std::num::NonZeroU16;

use crate::dial::strategy::step::Step;
use crate::ports::{PortRange, Random};

/// Searches `tries` windows of `width` ports at random positions and then, if `then_full_range` is set, the full range.
pub(super) fn step(
    width: NonZeroU16,
    tries: NonZeroU16,
    then_full_range: bool,
    tried: u32,
    range: PortRange,
    random: &mut Random,
) -> Option<Step> {
    let tries = u32::from(tries.get());
    if tried < tries {
        Some(Step::Window(window(u32::from(width.get()), range, random)))
    } else {
        (then_full_range && tried == tries).then_some(Step::Window(PortRange::ALL))
    }
}

fn window(width: u32, range: PortRange, random: &mut Random) -> PortRange {
    let Some(room) = range.len().checked_sub(width) else {
        return range;
    };
    // The casts fit, because offset and width are at most the length of the range.
    let low = range.low() + random.u32(..=room) as u16;
    PortRange::new(low, low + (width - 1) as u16).expect("a width of at least one never runs backwards")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dial::Strategy;

    #[test]
    fn windows_stay_within_the_range_and_reach_both_ends() {
        let range = PortRange::new(1000, 1009).unwrap();
        let mut random = Random::with_seed(1);
        let windows: Vec<PortRange> = (0..200).map(|_| window(4, range, &mut random)).collect();
        assert!(
            windows.iter().all(|window| window.len() == 4 && window.low() >= 1000 && window.high() <= 1009)
        );
        assert!(windows.iter().any(|window| window.low() == 1000));
        assert!(windows.iter().any(|window| window.high() == 1009));
    }

    #[test]
    fn a_window_wider_than_the_range_is_the_range() {
        let range = PortRange::new(1000, 1009).unwrap();
        assert_eq!(window(500, range, &mut Random::with_seed(1)), range);
    }

    #[test]
    fn the_full_range_is_searched_once() {
        let range = PortRange::KERNEL_DEFAULT;
        let mut random = Random::with_seed(1);
        let mut step = |tried| Strategy::RANDOM_WINDOW.step(tried, range, &mut random);
        assert!(matches!(step(1), Some(Step::Window(window)) if window.len() == 500));
        assert_eq!(step(2), Some(Step::Window(PortRange::ALL)));
        assert_eq!(step(3), None);
    }
}
