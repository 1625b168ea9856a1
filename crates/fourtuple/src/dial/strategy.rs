//! Strategies to choose a source port.
//!
//! A strategy is a pure function of the number of tries, the port range and a random number generator, and returns the next
//! [`Step`]. The [`Dialer`](super::Dialer) makes the system calls. The simulator in [`crate::ports`] applies the same steps to a
//! model of the kernel.
//!
//! Example: [`Strategy`].

use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use crate::capabilities::LocalPortRange;
use crate::ports::{PortRange, PortSet, Random};

/// The next attempt of a dial to get a source port.
///
/// Example: [`Strategy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums, reason = "the loop of a caller must handle each value")]
pub enum Step {
    /// connect() searches the range of the namespace, ports of one parity first, then ports of the other parity.
    Search,
    /// connect() searches this window (IP_LOCAL_PORT_RANGE); since Linux 6.8 port by port.
    Window(PortRange),
    /// bind() to this port with SO_REUSEADDR, then connect().
    Bind(u16),
}

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
    /// Every strategy once, with the widths and tries of the constants below.
    pub const ALL: [Strategy; 5] = [
        Strategy::KernelDefault,
        Strategy::SELECT_TEST_REPEAT,
        Strategy::RANDOM_WINDOW,
        Strategy::FullRange,
        Strategy::Auto,
    ];

    /// "Select, test, repeat" with 100 tries: with 1% of the ports free, two of three dials find one.
    pub const SELECT_TEST_REPEAT: Strategy =
        Strategy::SelectTestRepeat { tries: NonZeroU16::new(100).unwrap() };

    /// The best window width of the published measurements (500 ports), twice, and then the full range.
    pub const RANDOM_WINDOW: Strategy = Strategy::RandomWindow {
        width: NonZeroU16::new(500).unwrap(),
        tries: NonZeroU16::new(2).unwrap(),
        then_full_range: true,
    };

    /// Returns the name without the width of a window.
    ///
    /// ```
    /// assert_eq!(fourtuple::dial::Strategy::RANDOM_WINDOW.name(), "random-window");
    /// ```
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Strategy::KernelDefault => "kernel-default",
            Strategy::SelectTestRepeat { .. } => "select-test-repeat",
            Strategy::RandomWindow { .. } => "random-window",
            Strategy::FullRange => "full-range",
            Strategy::Auto => "auto",
        }
    }

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
            Strategy::KernelDefault => (tried == 0).then_some(Step::Search),
            // Drawing one port twice is rare and costs less than a list of the ports tried.
            Strategy::SelectTestRepeat { tries } => {
                (tried < u32::from(tries.get())).then(|| Step::Bind(random.u16(range.low()..=range.high())))
            }
            Strategy::RandomWindow { width, tries, then_full_range } => {
                let tries = u32::from(tries.get());
                if tried < tries {
                    Some(Step::Window(window(u32::from(width.get()), range, random)))
                } else {
                    (then_full_range && tried == tries).then_some(Step::Window(PortRange::ALL))
                }
            }
            // The kernel clamps the window to the range of the namespace, and searches any window port by port
            // (`inet_sk_get_local_port_range`, Linux 6.8).
            Strategy::FullRange => (tried == 0).then_some(Step::Window(PortRange::ALL)),
            Strategy::Auto => panic!("Strategy::Auto must be replaced by what it chooses before it steps"),
        }
    }

    /// Does the same as [`Strategy::step`], but draws no reserved port to bind: bind() by number accepts reserved ports. A draw of such
    /// a port does not count as a step.
    #[inline]
    pub fn unreserved_step(
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

/// Returns a window of `width` ports at a random position, or the whole range if it is shorter.
fn window(width: u32, range: PortRange, random: &mut Random) -> PortRange {
    let Some(free) = range.len().checked_sub(width) else {
        return range;
    };
    // The casts fit, because offset and width are at most the length of the range.
    let low = range.low() + random.u32(..=free) as u16;
    PortRange::new(low, low + (width - 1) as u16).expect("a width of at least one never runs backwards")
}

impl fmt::Display for Strategy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())?;
        match self {
            Strategy::RandomWindow { width, .. } => write!(formatter, ":{width}"),
            _ => Ok(()),
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
        if let Some(named) = Strategy::ALL.into_iter().find(|strategy| strategy.name() == text) {
            return Ok(named);
        }
        let width = text.strip_prefix("random-window:").ok_or_else(unknown)?;
        let width = width.parse().map_err(|_| unknown())?;
        let Strategy::RandomWindow { tries, then_full_range, .. } = Strategy::RANDOM_WINDOW else {
            unreachable!("RANDOM_WINDOW is a RandomWindow")
        };
        Ok(Strategy::RandomWindow { width, tries, then_full_range })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_as_displayed() {
        for strategy in Strategy::ALL {
            assert_eq!(strategy.name().parse(), Ok(strategy));
            assert_eq!(strategy.to_string().parse(), Ok(strategy));
        }
        for name in ["", "random-window:0", "random-window:65536", "Full-Range"] {
            assert!(name.parse::<Strategy>().is_err(), "{name:?}");
        }
    }

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
