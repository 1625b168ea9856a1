//! Poll Sequences (RFC 5880, section 6.5): the peer is asked to confirm that it has heard of a change.

use std::time::Duration;

/// How long after the end of a sequence another may begin although no packet without F has come. It has to be longer than
/// a round trip, on a single link (section 6.8.3 has both ways to tell two sequences apart).
const SETTLED_AFTER: Duration = Duration::from_secs(1);

/// Where the session is with its sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum PollSequence {
    /// Nothing is to be confirmed.
    #[default]
    Idle,
    /// Packets go out with P.
    Running {
        /// One has.
        asked: bool,
        /// Something has changed after it had, of which the peer's F says nothing: another sequence is to follow.
        again: bool,
    },
    /// The peer has answered, but a second answer may be on its way, and would be taken for one to the next sequence.
    Settling {
        /// When the answer came.
        since: Duration,
        /// Another sequence is to follow.
        again: bool,
    },
}

const BEGUN: PollSequence = PollSequence::Running { asked: false, again: false };

impl PollSequence {
    /// Something has changed that the peer has to confirm.
    pub(super) fn request(&mut self) {
        match self {
            PollSequence::Idle => *self = BEGUN,
            // The change goes out with the first packet of this sequence.
            PollSequence::Running { asked: false, .. } => {}
            PollSequence::Running { again, .. } | PollSequence::Settling { again, .. } => *again = true,
        }
    }

    /// Whether packets carry P.
    pub(super) fn is_running(self) -> bool {
        matches!(self, PollSequence::Running { .. })
    }

    /// A packet with P went out.
    pub(super) fn sent(&mut self) {
        if let PollSequence::Running { asked, .. } = self {
            *asked = true;
        }
    }

    /// A packet came; `true` when it ends a sequence whose every packet told what is true now, so that all changes are
    /// confirmed.
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

    /// When another sequence begins, should nothing come.
    pub(super) fn due(self) -> Option<Duration> {
        match self {
            PollSequence::Settling { since, again: true } => Some(since + SETTLED_AFTER),
            _ => None,
        }
    }

    /// Begins what is due.
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
        assert!(!poll.received(T, true), "nobody asked");
        poll.request();
        poll.request();
        assert!(poll.is_running());
        assert!(!poll.received(T, true), "nobody has asked yet: the answer is to something older");
        poll.sent();
        assert!(!poll.received(T, false));
        assert!(poll.received(T, true));
        assert!(!poll.is_running());
        assert!(!poll.received(T, false));
        assert_eq!(poll, PollSequence::Idle);
    }

    #[test]
    fn a_change_in_the_middle_is_confirmed_by_a_second_sequence_alone() {
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
    fn a_peer_that_sends_nothing_unasked_is_given_a_second() {
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
