//! The saved state with which another process continues a session so that the peer notices no change. A session without this
//! state would restart in Down, the only initial state of RFC 5880.

use std::num::NonZeroU32;
use std::time::Duration;

use fastrand::Rng;

use crate::bfd::discard::Discards;
use crate::bfd::packet::{Diagnostic, State};
use crate::bfd::session::{PollSequence, Remote, Session};
use crate::bfd::timers::Timers;

/// Saved values by name: intervals in microseconds, ages in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SavedState(Vec<(String, u64)>);

impl SavedState {
    pub(crate) fn set(&mut self, name: &str, number: u64) {
        self.0.push((name.to_owned(), number));
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(name, number)| (name.as_str(), *number))
    }

    fn get(&self, name: &str) -> Option<u64> {
        self.iter().find_map(|(its, number)| (its == name).then_some(number))
    }

    fn age(&self, name: &str) -> Option<Duration> {
        self.get(name).map(Duration::from_nanos)
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.get("failed") == Some(1)
    }

    /// Returns the age of the oldest event in the saved state.
    pub(crate) fn longest_age(&self) -> Duration {
        let ages = ["heard-ns", "sent-ns", "since-ns"].iter().filter_map(|name| self.age(name));
        ages.max().unwrap_or_default()
    }
}

impl Session {
    /// Returns the saved state for another process. It omits discard counters: each process counts its own discards.
    pub(crate) fn saved_state(&self, now: Duration, has_failed: bool) -> SavedState {
        let Remote {
            discriminator,
            state,
            min_rx_us,
            demand,
            min_tx_us,
            detect_mult,
            diagnostic,
            last_received,
        } = self.remote;
        let age = |time: Duration| u64::try_from(now.saturating_sub(time).as_nanos()).unwrap_or(u64::MAX);
        let mut saved_state = SavedState::default();
        let numbers = [
            ("desired-min-tx-us", self.timers.desired_min_tx_us.get().into()),
            ("required-min-rx-us", self.timers.required_min_rx_us.into()),
            ("detect-mult", self.timers.detect_mult.get().into()),
            ("discriminator", self.local_discriminator.get().into()),
            ("state", self.state as u64),
            ("diagnostic", self.diagnostic.code().into()),
            ("remote-discriminator", discriminator.into()),
            ("remote-state", state as u64),
            ("remote-min-rx-us", min_rx_us.into()),
            ("remote-demand", demand.into()),
            ("remote-min-tx-us", min_tx_us.into()),
            ("remote-detect-mult", detect_mult.into()),
            ("remote-diagnostic", diagnostic.code().into()),
            ("says-min-tx-us", self.desired_min_tx_us.into()),
            ("keeps-tx-us", self.tx_us.into()),
            ("keeps-rx-us", self.rx_us.into()),
            ("polls", (self.poll != PollSequence::Idle).into()),
            ("owes-final", self.owes_final.into()),
            ("told-state", self.last_sent.0 as u64),
            ("told-diagnostic", self.last_sent.1.code().into()),
            ("since-ns", age(self.since)),
            ("transitions", self.transitions),
            ("ups", self.ups),
            ("downs", self.downs),
            ("last-failure", self.last_failure.code().into()),
            ("transmitted", self.transmitted),
            ("received", self.received),
            ("failed", has_failed.into()),
        ];
        numbers.into_iter().for_each(|(name, number)| saved_state.set(name, number));
        let times = [("heard-ns", last_received), ("sent-ns", self.sent)];
        times.into_iter().for_each(|(name, time)| {
            if let Some(time) = time {
                saved_state.set(name, age(time));
            }
        });
        saved_state
    }

    /// Restores a session from its saved state; `None` if a value is missing or out of range.
    pub(crate) fn restore(saved_state: &SavedState, now: Duration, random: Rng) -> Option<Session> {
        let word = |name| saved_state.get(name).and_then(|number| u32::try_from(number).ok());
        let byte = |name| saved_state.get(name).and_then(|number| u8::try_from(number).ok());
        let state = |name| byte(name).map(State::from_bits);
        let diagnostic = |name| byte(name).map(Diagnostic::from_code);
        let time = |name| saved_state.age(name).map(|age| now.saturating_sub(age));
        let timers = Timers {
            desired_min_tx_us: NonZeroU32::new(word("desired-min-tx-us")?)?,
            required_min_rx_us: word("required-min-rx-us")?,
            detect_mult: byte("detect-mult")?.try_into().ok()?,
        };
        let remote = Remote {
            discriminator: word("remote-discriminator")?,
            state: state("remote-state")?,
            min_rx_us: word("remote-min-rx-us")?,
            demand: word("remote-demand")? != 0,
            min_tx_us: word("remote-min-tx-us")?,
            detect_mult: byte("remote-detect-mult")?,
            diagnostic: diagnostic("remote-diagnostic")?,
            last_received: time("heard-ns"),
        };
        let mut poll = PollSequence::default();
        if word("polls")? != 0 {
            // The session may have missed the peer's answer during the takeover, so it polls again.
            poll.request();
        }
        Some(Session {
            timers,
            local_discriminator: NonZeroU32::new(word("discriminator")?)?,
            state: state("state")?,
            diagnostic: diagnostic("diagnostic")?,
            remote,
            desired_min_tx_us: word("says-min-tx-us")?,
            tx_us: word("keeps-tx-us")?,
            rx_us: word("keeps-rx-us")?,
            poll,
            owes_final: word("owes-final")? != 0,
            sent: time("sent-ns"),
            last_sent: (state("told-state")?, diagnostic("told-diagnostic")?),
            jitter: 0.0,
            random,
            since: time("since-ns")?,
            transitions: saved_state.get("transitions")?,
            ups: saved_state.get("ups")?,
            downs: saved_state.get("downs")?,
            last_failure: diagnostic("last-failure")?,
            transmitted: saved_state.get("transmitted")?,
            received: saved_state.get("received")?,
            discards: Discards::default(),
        })
    }
}
