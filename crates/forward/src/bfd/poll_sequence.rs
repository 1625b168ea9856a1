//! Poll Sequences (RFC 5880, section 6.5): the session asks the peer to confirm a change of parameters.

use std::time::Duration;

/// The time after the end of a sequence at which the next sequence may begin even if no packet without F has arrived. It has to
/// exceed a round trip on a single link (section 6.8.3 names both ways to tell two sequences apart).
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// The progress of the current Poll Sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PollSequence {
    /// No change needs a confirmation.
    #[default]
    Idle,
    /// Periodic packets carry P.
    Running {
        /// At least one packet with P was sent.
        asked: bool,
        /// A parameter changed after a packet with P was sent. The peer's F may not cover this change, so another sequence
        /// follows.
        again: bool,
    },
    /// The peer has sent F. A second packet with F may be in flight, and must not be taken for an answer to the next sequence.
    Settling {
        /// The arrival time of the F.
        since: Duration,
        /// Another sequence follows.
        again: bool,
    },
}

const BEGUN: PollSequence = PollSequence::Running { asked: false, again: false };

impl PollSequence {
    /// Records a change that the peer has to confirm.
    pub(super) fn request(&mut self) {
        match self {
            PollSequence::Idle => *self = BEGUN,
            // The first packet of this sequence already carries the change.
            PollSequence::Running { asked: false, .. } => {}
            PollSequence::Running { again, .. } | PollSequence::Settling { again, .. } => *again = true,
        }
    }

    /// Returns whether packets carry P.
    pub(super) fn is_running(self) -> bool {
        matches!(self, PollSequence::Running { .. })
    }

    /// Records that a packet with P was sent.
    pub(super) fn sent(&mut self) {
        if let PollSequence::Running { asked, .. } = self {
            *asked = true;
        }
    }

    /// Records a received packet. Returns `true` if it ends a sequence in which every packet carried the present parameters, so
    /// that the peer has confirmed all changes.
    pub(super) fn received(&mut self, now: Duration, is_final: bool) -> bool {
        match *self {
            PollSequence::Running { asked: true, again } if is_final => {
                *self = PollSequence::Settling { since: now, again };
                !again
            }
            PollSequence::Settling { again, .. } if !is_final => {
                *self = if again { BEGUN } else { PollSequence::Idle };
                false
            }
            _ => false,
        }
    }

    /// Returns the time at which the next sequence begins if no packet arrives before.
    pub(super) fn due(self) -> Option<Duration> {
        match self {
            PollSequence::Settling { since, again: true } => Some(since + SETTLED_AFTER),
            _ => None,
        }
    }

    /// Begins the next sequence if it is due.
    pub(super) fn advance(&mut self, now: Duration) {
        if let PollSequence::Settling { since, again } = *self
            && now >= since + SETTLED_AFTER
        {
            *self = if again { BEGUN } else { PollSequence::Idle };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::from_secs(9);

    #[test]
    fn one_change_is_one_sequence() {
        let mut poll = PollSequence::default();
        assert!(!poll.received(T, true), "no Poll Sequence is in progress");
        poll.request();
        poll.request();
        assert!(poll.is_running());
        assert!(!poll.received(T, true), "the Final bit answers an older packet: no Poll has been sent yet");
        poll.sent();
        assert!(!poll.received(T, false));
        assert!(poll.received(T, true));
        assert!(!poll.is_running());
        assert!(!poll.received(T, false));
        assert_eq!(poll, PollSequence::Idle);
    }

    #[test]
    fn a_change_during_a_poll_needs_a_second_sequence() {
        let mut poll = PollSequence::default();
        poll.request();
        poll.sent();
        poll.request();
        assert!(!poll.received(T, true));
        assert!(!poll.is_running());
        assert!(!poll.received(T, true), "a second answer to the first sequence");
        assert!(!poll.is_running());
        assert!(!poll.received(T, false));
        assert!(poll.is_running());
        poll.sent();
        assert!(poll.received(T, true));
    }

    #[test]
    fn a_silent_peer_delays_the_next_sequence_by_a_second() {
        let mut poll = PollSequence::default();
        poll.request();
        poll.sent();
        assert!(poll.received(T, true));
        poll.request();
        assert_eq!(poll.due(), Some(T + SETTLED_AFTER));
        poll.advance(T + SETTLED_AFTER / 2);
        assert!(!poll.is_running());
        poll.advance(T + SETTLED_AFTER);
        assert!(poll.is_running());
    }
}
