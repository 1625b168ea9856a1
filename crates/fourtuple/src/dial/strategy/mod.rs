//! How a dial comes by its source port: one strategy per file.
//!
//! A strategy is pure. It sees how many tries there were, the range, and a source of randomness, and answers with the
//! next [`Step`]; the [`Dialer`](super::Dialer) makes the system calls, and the simulator in [`crate::ports`] plays the
//! same steps against a kernel in memory.

mod full_range;
mod kernel_default;
mod random_window;
mod select_test_repeat;

use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use fastrand::Rng;

use crate::ports::PortRange;

/// What to try next for a source port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Let connect() search the namespace's range its own way: half of the ports first, then the other half.
    Search,
    /// Let connect() search this window (option IP_LOCAL_PORT_RANGE); since Linux 6.8 one port after the other.
    Window(PortRange),
    /// Bind this very port first (with SO_REUSEADDR), then connect().
    Bind(u16),
}

/// Which source port a dial takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// What an unchanged program does.
    KernelDefault,
    /// Bind a random port, connect, and on a conflict start again: "select, test, repeat" of seed 000.
    ///
    /// Needs no option, so it works on every kernel; but a port bound by number is one that no autobind of any program
    /// in the namespace will use until it is closed.
    SelectTestRepeat {
        /// Ports to try before giving up.
        tries: NonZeroU16,
    },
    /// Search a window of `width` ports at a random place, up to `tries` times, and then the full range.
    RandomWindow {
        /// Ports per window.
        width: NonZeroU16,
        /// Windows to try.
        tries: NonZeroU16,
        /// What follows when every window was full: the full range on the same descriptor, or an error, as seed 000
        /// published it.
        then_full_range: bool,
    },
    /// One search over the full range; linear, with a start of either parity, since Linux 6.8.
    FullRange,
    /// Find out what the kernel can do and take what serves best.
    Auto,
}

impl Strategy {
    /// "Select, test, repeat" with 100 tries: enough to find one of 1% free ports two times in three.
    pub const SELECT_TEST_REPEAT: Strategy =
        Strategy::SelectTestRepeat { tries: NonZeroU16::new(100).unwrap() };

    /// The window of seed 000 that served best, twice, and then the full range.
    pub const RANDOM_WINDOW: Strategy = Strategy::RandomWindow {
        width: NonZeroU16::new(500).unwrap(),
        tries: NonZeroU16::new(2).unwrap(),
        then_full_range: true,
    };

    /// The step after `tried` steps have found their ports taken; `None`: give up.
    ///
    /// # Panics
    ///
    /// Panics for [`Strategy::Auto`], which is no strategy of its own: a dialer replaces it when it is built.
    pub fn step(self, tried: u32, range: PortRange, random: &mut Rng) -> Option<Step> {
        match self {
            Strategy::KernelDefault => kernel_default::step(tried),
            Strategy::SelectTestRepeat { tries } => select_test_repeat::step(tries, tried, range, random),
            Strategy::RandomWindow { width, tries, then_full_range } => {
                random_window::step(width, tries, then_full_range, tried, range, random)
            }
            Strategy::FullRange => full_range::step(tried),
            Strategy::Auto => panic!("Strategy::Auto must be replaced by what it chooses before it steps"),
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Strategy::KernelDefault => write!(formatter, "kernel-default"),
            Strategy::SelectTestRepeat { .. } => write!(formatter, "select-test-repeat"),
            Strategy::RandomWindow { width, .. } => write!(formatter, "random-window:{width}"),
            Strategy::FullRange => write!(formatter, "full-range"),
            Strategy::Auto => write!(formatter, "auto"),
        }
    }
}

/// A name that no strategy has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a port strategy: expected kernel-default, select-test-repeat, random-window:WIDTH (1 to 65535), \
     full-range or auto"
)]
pub struct UnknownStrategy(String);

impl FromStr for Strategy {
    type Err = UnknownStrategy;

    fn from_str(text: &str) -> Result<Self, UnknownStrategy> {
        let unknown = || UnknownStrategy(text.to_owned());
        Ok(match text {
            "kernel-default" => Strategy::KernelDefault,
            "select-test-repeat" => Strategy::SELECT_TEST_REPEAT,
            "random-window" => Strategy::RANDOM_WINDOW,
            "full-range" => Strategy::FullRange,
            "auto" => Strategy::Auto,
            _ => {
                let width = text.strip_prefix("random-window:").ok_or_else(unknown)?;
                let width = width.parse().map_err(|_| unknown())?;
                let Strategy::RandomWindow { tries, then_full_range, .. } = Strategy::RANDOM_WINDOW else {
                    unreachable!("RANDOM_WINDOW is a RandomWindow")
                };
                Strategy::RandomWindow { width, tries, then_full_range }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for name in ["kernel-default", "select-test-repeat", "random-window:500", "full-range", "auto"] {
            assert_eq!(name.parse::<Strategy>().unwrap().to_string(), name);
        }
        for name in ["", "random-window:0", "random-window:65536", "Full-Range"] {
            assert!(name.parse::<Strategy>().is_err(), "{name:?}");
        }
    }
}
