//! How often a session sends, wants to receive, and what it takes for lost.

use std::num::{NonZeroU8, NonZeroU32};
use std::time::Duration;

use thiserror::Error;

/// What a session asks for; what it gets, it negotiates with the peer in each direction (RFC 5880, section 6.8.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timers {
    pub(super) desired_min_tx_us: NonZeroU32,
    pub(super) required_min_rx_us: u32,
    pub(super) detect_mult: NonZeroU8,
}

/// Timers that no session can have.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum TimersError {
    /// 0 is reserved (RFC 5880, section 4.1), and the unit on the wire is a microsecond.
    #[error("packets cannot be sent every {0:?}: an interval is a microsecond to 4294 s")]
    DesiredMinTx(Duration),
    /// It does not fit into 32 bits.
    #[error("packets cannot be received every {0:?}: an interval is at most 4294 s; 0 asks for none at all")]
    RequiredMinRx(Duration),
    /// RFC 5880, section 6.8.1.
    #[error("a detection multiplier of 0 would detect nothing and everything: it is 1 to 255")]
    DetectMult,
}

impl Timers {
    /// Sends every `desired_min_tx` at most (but only once a second, or less often, until the session is up), can receive
    /// every `required_min_rx` (0: wants no periodic packets at all), and is down for the peer when `detect_mult` of its
    /// packets are missing. Parts of a microsecond are cut off.
    pub fn new(
        desired_min_tx: Duration,
        required_min_rx: Duration,
        detect_mult: u8,
    ) -> Result<Timers, TimersError> {
        let us = |interval: Duration| u32::try_from(interval.as_micros()).ok();
        Ok(Timers {
            desired_min_tx_us: us(desired_min_tx)
                .and_then(NonZeroU32::new)
                .ok_or(TimersError::DesiredMinTx(desired_min_tx))?,
            required_min_rx_us: us(required_min_rx).ok_or(TimersError::RequiredMinRx(required_min_rx))?,
            detect_mult: NonZeroU8::new(detect_mult).ok_or(TimersError::DetectMult)?,
        })
    }

    /// At most how often packets are to be sent.
    pub fn desired_min_tx(&self) -> Duration {
        Duration::from_micros(self.desired_min_tx_us.get().into())
    }

    /// At most how often they are to come.
    pub fn required_min_rx(&self) -> Duration {
        Duration::from_micros(self.required_min_rx_us.into())
    }

    /// How many may be missing.
    pub fn detect_mult(&self) -> u8 {
        self.detect_mult.get()
    }
}

impl Default for Timers {
    /// 300 ms in both directions, three times: what other implementations begin with too.
    fn default() -> Timers {
        Timers {
            desired_min_tx_us: NonZeroU32::new(300_000).expect("not 0"),
            required_min_rx_us: 300_000,
            detect_mult: NonZeroU8::new(3).expect("not 0"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_go_onto_the_wire_is_refused() {
        let ms = Duration::from_millis;
        assert_eq!(Timers::new(ms(300), ms(300), 3), Ok(Timers::default()));
        assert_eq!(Timers::new(Duration::ZERO, ms(1), 3), Err(TimersError::DesiredMinTx(Duration::ZERO)));
        let nanos = Duration::from_nanos(999);
        assert_eq!(Timers::new(nanos, ms(1), 3), Err(TimersError::DesiredMinTx(nanos)));
        let long = Duration::from_micros(1 << 32);
        assert_eq!(Timers::new(long, ms(1), 3), Err(TimersError::DesiredMinTx(long)));
        assert_eq!(Timers::new(ms(1), long, 3), Err(TimersError::RequiredMinRx(long)));
        assert_eq!(Timers::new(ms(1), ms(1), 0), Err(TimersError::DetectMult));
        assert_eq!(Timers::new(ms(1), Duration::ZERO, 1).unwrap().required_min_rx(), Duration::ZERO);
    }
}
