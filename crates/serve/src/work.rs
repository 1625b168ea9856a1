//! The service time of a worker between a request and its response.

use std::hint;
use std::thread;
use std::time::{Duration, Instant};

use crate::service::Service;
use crate::stop::Stop;

/// Maximum length of one sleep. Between two sleeps the worker checks the stop flag.
const NAP: Duration = Duration::from_millis(20);

/// Start and end of the stall, if there is one.
pub(crate) type StallTimes = Option<(Instant, Instant)>;

/// Service times and the stall. A worker serves no other connection meanwhile, like a synchronous handler.
pub(crate) struct Work {
    service: Service,
    spin: bool,
    random: fastrand::Rng,
    /// Start and end of the stall.
    stall: StallTimes,
    stop: Stop,
}

impl Work {
    pub(crate) fn new(service: Service, spin: bool, seed: u64, stop: Stop) -> Work {
        Work { service, spin, random: fastrand::Rng::with_seed(seed), stall: None, stop }
    }

    /// Sets start and end of the stall.
    pub(crate) fn set_stall(&mut self, stall: StallTimes) {
        self.stall = stall;
    }

    /// Returns whether the worker sleeps for service times, which then need a precise timer.
    pub(crate) fn sleeps(&self) -> bool {
        !self.service.is_none() && !self.spin
    }

    /// Sleeps until the end of the stall, if the stall has begun.
    pub(crate) fn stall(&mut self) {
        let Some((from, until)) = self.stall else { return };
        let now = Instant::now();
        if now >= from {
            self.stall = None;
            // All workers continue at the same moment, even if they noticed the stall at different times.
            self.sleep(until);
        }
    }

    /// Spends the service time of one request.
    pub(crate) fn serve(&mut self) {
        if self.service.is_none() {
            return;
        }
        let time = self.service.draw(&mut self.random);
        if time.is_zero() {
            return;
        }
        let until = Instant::now().checked_add(time);
        match until {
            Some(until) if self.spin => {
                while Instant::now() < until && !self.stop.is_set() {
                    hint::spin_loop();
                }
            }
            Some(until) => self.sleep(until),
            // The end is beyond the range of the clock.
            None => {
                while !self.stop.is_set() {
                    thread::sleep(NAP);
                }
            }
        }
    }

    fn sleep(&self, until: Instant) {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.stop.is_set() {
                return;
            }
            thread::sleep(left.min(NAP));
        }
    }
}
