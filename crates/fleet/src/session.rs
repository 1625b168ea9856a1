//! Protection against replayed requests: an agent accepts a request only in a session that it opened, each sequence number once.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Maximum number of open sessions of an agent. The session that was unused for the longest time ends first. Every command opens a
/// session, and a coordinator in use asks every second.
const MAX_SESSIONS: usize = 1024;

/// The place of a request in a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// Name of the session, which the agent drew at random.
    pub session: String,
    /// Number of the request in the session, from 1.
    pub sequence: u64,
}

/// The reason why an agent refuses a ticket.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SessionError {
    /// The agent did not open the session, or has forgotten it.
    #[error("the agent has no session {session:?}: it is from another agent, or has expired")]
    Unknown {
        /// The session.
        session: String,
    },
    /// A request with this or a higher number was accepted before.
    #[error("request {sequence} of the session was accepted before: this is a replay")]
    Replayed {
        /// The number.
        sequence: u64,
    },
}

/// The open sessions of an agent.
#[derive(Debug, Default)]
pub struct Sessions {
    /// Sequence number of the last accepted request, and the order of the last uses, by session.
    open: BTreeMap<String, (u64, u64)>,
    uses: u64,
}

impl Sessions {
    /// Opens a session with a name that the caller drew at random.
    pub fn open(&mut self, name: String) {
        self.uses += 1;
        self.open.insert(name, (0, self.uses));
        if self.open.len() > MAX_SESSIONS {
            let oldest = self.open.iter().min_by_key(|(_, (_, used))| *used).map(|(name, _)| name.clone());
            oldest.map(|name| self.open.remove(&name));
        }
    }

    /// Accepts a ticket, once.
    ///
    /// # Errors
    ///
    /// [`SessionError`]
    pub fn accept(&mut self, ticket: &Ticket) -> Result<(), SessionError> {
        let Some((last, used)) = self.open.get_mut(&ticket.session) else {
            return Err(SessionError::Unknown { session: ticket.session.clone() });
        };
        if ticket.sequence <= *last {
            return Err(SessionError::Replayed { sequence: ticket.sequence });
        }
        self.uses += 1;
        (*last, *used) = (ticket.sequence, self.uses);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket(session: &str, sequence: u64) -> Ticket {
        Ticket { session: session.to_owned(), sequence }
    }

    #[test]
    fn a_ticket_is_accepted_once() {
        let mut sessions = Sessions::default();
        sessions.open("a".into());
        assert_eq!(sessions.accept(&ticket("a", 1)), Ok(()));
        assert_eq!(sessions.accept(&ticket("a", 1)), Err(SessionError::Replayed { sequence: 1 }));
        assert_eq!(sessions.accept(&ticket("a", 5)), Ok(()), "requests may be lost");
        assert_eq!(sessions.accept(&ticket("a", 4)), Err(SessionError::Replayed { sequence: 4 }));
        assert_eq!(sessions.accept(&ticket("a", 0)), Err(SessionError::Replayed { sequence: 0 }));
    }

    #[test]
    fn a_session_of_another_agent_is_refused() {
        let mut sessions = Sessions::default();
        assert_eq!(sessions.accept(&ticket("b", 1)), Err(SessionError::Unknown { session: "b".into() }));
    }

    #[test]
    fn the_session_unused_for_longest_ends_first() {
        let mut sessions = Sessions::default();
        for number in 0..=MAX_SESSIONS {
            sessions.open(format!("{number}"));
            assert_eq!(sessions.accept(&ticket("0", number as u64 + 1)), Ok(()), "it is in use");
        }
        assert!(sessions.accept(&ticket("1", 1)).is_err());
        assert!(sessions.accept(&ticket("2", 1)).is_ok());
        assert!(sessions.accept(&ticket(&MAX_SESSIONS.to_string(), 1)).is_ok());
    }
}
