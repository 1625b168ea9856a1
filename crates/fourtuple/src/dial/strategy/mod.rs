//! Strategies to choose a source port, one per file.
//!
//! A strategy is a pure function of the number of tries, the port range and a random number generator, and returns the next
//! [`Step`]. The [`Dialer`](super::Dialer) makes the system calls. The simulator in [`crate::ports`] applies the same steps to a
//! model of the kernel.
//!
//! Example: [`Strategy`].

mod full_range;
mod kernel_default;
mod random_window;
mod select_test_repeat;
mod step;

use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use crate::capabilities::LocalPortRange;
pub use crate::dial::strategy::step::Step;
use crate::ports::{PortRange, PortSet, Random};

/// The way to choose a source port.
///
/// ```
/// use fourtuple::capabilities::LocalPortRange;
/// use fourtuple::dial::{Step, Strategy};
/// use fourtuple::ports::{PortRange, Random};
///
/// assert_eq!("random-window:500".parse(), Ok(Strategy::RANDOM_WINDOW));
/// assert_eq!(Strategy::for_kernel(LocalPortRange::Linear, true), Strategy::FullRange);
///
/// // The steps of one dial: a window with all ports of the range, or up to 100 random ports.
/// let (range, mut random) = (PortRange::KERNEL_DEFAULT, Random::with_seed(1));
/// assert_eq!(Strategy::FullRange.step(0, range, &mut random), Some(Step::Window(PortRange::ALL)));
/// let first = Strategy::SELECT_TEST_REPEAT.step(0, range, &mut random);
/// assert!(matches!(first, Some(Step::Bind(port)) if range.contains(port)));
/// assert_eq!(Strategy::SELECT_TEST_REPEAT.step(100, range, &mut random), None);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Strategy {
    /// connect() without a socket option: the kernel's own search.
    KernelDefault,
    /// Binds a random port, connects, and repeats this with another port on a conflict: "select, test, repeat" of Cloudflare,
    /// "connect() - why are you so slow?".
    ///
    /// The strategy needs no socket option and works on every kernel. But until a socket that was bound by number is closed, no
    /// automatic choice of any program in the namespace takes its port.
    SelectTestRepeat {
        /// Ports to try before the dial fails.
        tries: NonZeroU16,
    },
    /// Searches a window of `width` ports at a random position, up to `tries` times, and then the full range.
    RandomWindow {
        /// Ports per window.
        width: NonZeroU16,
        /// Windows to search.
        tries: NonZeroU16,
        /// Whether the dial searches the full range on the same descriptor after all windows were full. The published version
        /// fails instead.
        then_full_range: bool,
    },
    /// Searches the full range once. Since Linux 6.8 the search goes port by port from a start of either parity.
    FullRange,
    /// Probes the kernel and takes the best strategy for it.
    Auto,
}

impl Strategy {
    /// "Select, test, repeat" with 100 tries: with 1% of the ports free, two of three dials find one.
    pub const SELECT_TEST_REPEAT: Strategy =
        Strategy::SelectTestRepeat { tries: NonZeroU16::new(100).unwrap() };

    /// The best window width of the published measurements (500 ports), twice, and then the full range.
    pub const RANDOM_WINDOW: Strategy = Strategy::RandomWindow {
        width: NonZeroU16::new(500).unwrap(),
        tries: NonZeroU16::new(2).unwrap(),
        then_full_range: true,
    };

    /// Returns the strategy that [`Strategy::Auto`] becomes on a kernel with this support for IP_LOCAL_PORT_RANGE. `ports_known` says
    /// whether the port range of the namespace could be read; without it no strategy can draw ports.
    pub fn for_kernel(found: LocalPortRange, ports_known: bool) -> Strategy {
        match found {
            LocalPortRange::Linear => Strategy::FullRange,
            // The last step searches the full range, so the strategy works with either kind of search.
            LocalPortRange::Parity | LocalPortRange::Unproven if ports_known => Strategy::RANDOM_WINDOW,
            LocalPortRange::Parity | LocalPortRange::Unproven => Strategy::FullRange,
            // While fewer than half of the ports are in use, `Attempt` uses the kernel's own search instead.
            LocalPortRange::Absent if ports_known => Strategy::SELECT_TEST_REPEAT,
            LocalPortRange::Absent => Strategy::KernelDefault,
        }
    }

    /// Returns the next step after `tried` steps found their ports in use; `None`: the dial fails.
    ///
    /// # Panics
    ///
    /// Panics for [`Strategy::Auto`]: a dialer replaces it by another strategy when it is built.
    pub fn step(self, tried: u32, range: PortRange, random: &mut Random) -> Option<Step> {
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

    /// Does the same as [`Strategy::step`], but draws no reserved port to bind: bind() by number accepts reserved ports. A draw of such
    /// a port does not count as a step.
    #[inline]
    pub(crate) fn unreserved_step(
        self,
        tried: u32,
        range: PortRange,
        reserved: &PortSet,
        random: &mut Random,
    ) -> Option<Step> {
        loop {
            match self.step(tried, range, random)? {
                // `None`: all ports are reserved.
                Step::Bind(port) if reserved.contains(port) => _ = reserved.next_free(range, port)?,
                step => return Some(step),
            }
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

/// A text that is not the name of a strategy.
///
/// ```
/// let error = "fastest".parse::<fourtuple::dial::Strategy>().unwrap_err();
/// assert!(error.to_string().starts_with("\"fastest\" is not a port strategy: expected kernel-default"));
/// ```
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
    fn names_are_parsed_as_displayed() {
        for name in ["kernel-default", "select-test-repeat", "random-window:500", "full-range", "auto"] {
            assert_eq!(name.parse::<Strategy>().unwrap().to_string(), name);
        }
        for name in ["", "random-window:0", "random-window:65536", "Full-Range"] {
            assert!(name.parse::<Strategy>().is_err(), "{name:?}");
        }
    }
}
