use std::ffi::c_int;
use std::num::NonZeroU16;

use fourtuple::capabilities::LocalPortRange;
use fourtuple::dial::{Step, Strategy};
use fourtuple::ports::{PortRange, Random};

use crate::{Failure, run};

/// `struct fourtuple_strategy`.
#[repr(C)]
pub(crate) struct PlainStrategy {
    kind: i32,
    width: u16,
    tries: u16,
    then_full_range: i32,
}

/// `struct fourtuple_step`.
#[repr(C)]
pub(crate) struct PlainStep {
    kind: i32,
    low: u16,
    high: u16,
}

const _: () = assert!(size_of::<PlainStrategy>() == 12 && size_of::<PlainStep>() == 8);

impl PlainStrategy {
    /// Returns the form of C. `Auto` has none: it becomes another strategy.
    fn new(strategy: Strategy) -> Option<PlainStrategy> {
        let of = |kind| PlainStrategy { kind, width: 0, tries: 0, then_full_range: 0 };
        Some(match strategy {
            Strategy::KernelDefault => of(1),
            Strategy::SelectTestRepeat { tries } => PlainStrategy { tries: tries.get(), ..of(2) },
            Strategy::RandomWindow { width, tries, then_full_range } => PlainStrategy {
                width: width.get(),
                tries: tries.get(),
                then_full_range: i32::from(then_full_range),
                ..of(3)
            },
            Strategy::FullRange => of(4),
            _ => return None,
        })
    }

    fn strategy(&self) -> Result<Strategy, Failure> {
        let positive = |name: &str, value| {
            NonZeroU16::new(value)
                .ok_or_else(|| Failure::invalid(format!("strategy.{name} must be at least 1")))
        };
        Ok(match self.kind {
            1 => Strategy::KernelDefault,
            2 => Strategy::SelectTestRepeat { tries: positive("tries", self.tries)? },
            3 => Strategy::RandomWindow {
                width: positive("width", self.width)?,
                tries: positive("tries", self.tries)?,
                then_full_range: self.then_full_range != 0,
            },
            4 => Strategy::FullRange,
            kind => return Err(Failure::invalid(format!("strategy.kind {kind} is not 1 to 4"))),
        })
    }
}

/// `fourtuple_step()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_step(
    strategy: *const PlainStrategy,
    tried: u32,
    low: u16,
    high: u16,
    random: *mut u64,
    step: *mut PlainStep,
) -> c_int {
    let body = || {
        // SAFETY: the caller passes null or valid pointers.
        let (Some(strategy), Some(state), Some(place)) =
            (unsafe { (strategy.as_ref(), random.as_mut(), step.as_mut()) })
        else {
            return Err(Failure::invalid("strategy, random or step is null"));
        };
        let range = PortRange::new(low, high).map_err(|error| Failure::invalid(error.to_string()))?;
        let mut random = Random::with_seed(*state);
        let next = strategy.strategy()?.step(tried, range, &mut random);
        *state = random.state();
        let Some(next) = next else { return Ok(0) };
        *place = match next {
            Step::Search => PlainStep { kind: 0, low: 0, high: 0 },
            Step::Window(window) => PlainStep { kind: 1, low: window.low(), high: window.high() },
            Step::Bind(port) => PlainStep { kind: 2, low: port, high: port },
        };
        Ok(1)
    };
    // SAFETY: null is permitted.
    unsafe { run(std::ptr::null_mut(), body) }
}

/// `fourtuple_strategy_for_kernel()` of `fourtuple.h`.
///
/// # Safety
///
/// The pointers must be null or as the header describes them.
#[unsafe(no_mangle)]
unsafe extern "C" fn fourtuple_strategy_for_kernel(
    found: i32,
    ports_known: i32,
    strategy: *mut PlainStrategy,
) -> c_int {
    let body = || {
        // SAFETY: the caller passes null or a place for the strategy.
        let place = unsafe { strategy.as_mut() }.ok_or_else(|| Failure::invalid("strategy is null"))?;
        let found = match found {
            0 => LocalPortRange::Absent,
            1 => LocalPortRange::Parity,
            2 => LocalPortRange::Linear,
            3 => LocalPortRange::Unproven,
            _ => return Err(Failure::invalid(format!("found is {found}, not 0 to 3"))),
        };
        *place = PlainStrategy::new(Strategy::for_kernel(found, ports_known != 0))
            .ok_or_else(|| Failure::invalid("no strategy for this kernel"))?;
        Ok(0)
    };
    // SAFETY: null is permitted.
    unsafe { run(std::ptr::null_mut(), body) }
}
