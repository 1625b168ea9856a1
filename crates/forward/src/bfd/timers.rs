//! The timers of a session: transmit interval, receive interval and detection multiplier.

use std::num::{NonZeroU8, NonZeroU32};
use std::time::Duration;

use thiserror::Error;

/// The timers that a session requests; it negotiates the effective intervals with the peer, for each direction (RFC 5880,
/// section 6.8.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timers {
    pub(super) desired_min_tx_us: NonZeroU32,
    pub(super) required_min_rx_us: u32,
    pub(super) detect_mult: NonZeroU8,
}

/// An error for timers that no session can have.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum TimersError {
    /// The transmit interval is 0, which RFC 5880, section 4.1 reserves, or below the wire's unit of 1 us, or does not fit into
    /// 32 bits.
    #[error("packets cannot be sent every {0:?}: an interval is a microsecond to 4294 s")]
    DesiredMinTx(Duration),
    /// The receive interval does not fit into 32 bits.
    #[error("packets cannot be received every {0:?}: an interval is at most 4294 s; 0 asks for none at all")]
    RequiredMinRx(Duration),
    /// The detection multiplier is 0 (RFC 5880, section 6.8.1).
    #[error("a detection multiplier of 0 would detect nothing and everything: it is 1 to 255")]
    DetectMult,
}

impl Timers {
    /// Creates timers with a minimum transmit interval of `desired_min_tx` (at least one second until the session is Up), a
    /// minimum receive interval of `required_min_rx` (0 asks for no periodic packets), and a detection multiplier: the peer
    /// declares the session down when `detect_mult` packets in a row are missing. Truncates intervals to microseconds.
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

    /// Returns the minimum transmit interval.
    pub fn desired_min_tx(&self) -> Duration {
        Duration::from_micros(self.desired_min_tx_us.get().into())
    }

    /// Returns the minimum receive interval.
    pub fn required_min_rx(&self) -> Duration {
        Duration::from_micros(self.required_min_rx_us.into())
    }

    /// Returns the detection multiplier.
    pub fn detect_mult(&self) -> u8 {
        self.detect_mult.get()
    }
}

impl Default for Timers {
    /// Returns 300 ms in both directions and a multiplier of 3, as other implementations do.
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
    fn intervals_beyond_the_wire_format_are_refused() {
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
