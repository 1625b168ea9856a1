//! What a worker does between a request and its response.

use std::hint;
use std::thread;
use std::time::{Duration, Instant};

use crate::seat::StallTimes;
use crate::service::Service;
use crate::stop::Stop;

/// Longer sleeps are cut into pieces of this length, between which the worker looks whether it is to stop.
const NAP: Duration = Duration::from_millis(20);

/// Service times and the stall. The worker that is in it serves nobody else meanwhile: so do synchronous handlers.
pub(crate) struct Work {
    service: Service,
    spin: bool,
    random: fastrand::Rng,
    /// When serving stops, and when it goes on.
    stall: StallTimes,
    stop: Stop,
}

impl Work {
    pub(crate) fn new(service: Service, spin: bool, seed: u64, stop: Stop) -> Work {
        Work { service, spin, random: fastrand::Rng::with_seed(seed), stall: None, stop }
    }

    /// When serving stops and goes on.
    pub(crate) fn set_stall(&mut self, stall: StallTimes) {
        self.stall = stall;
    }

    /// Whether sleeps must be as long as they are to be.
    pub(crate) fn sleeps(&self) -> bool {
        !self.service.is_none() && !self.spin
    }

    /// Sits out the stall, if it is time.
    pub(crate) fn stall(&mut self) {
        let Some((from, until)) = self.stall else { return };
        let now = Instant::now();
        if now >= from {
            self.stall = None;
            // All workers go on at the same moment, whenever each of them noticed.
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
            // Past the end of the clock.
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
