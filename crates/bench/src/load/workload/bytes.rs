use crate::load::workload::{ParseOutcome, ProtocolState};

/// A request and a response of fixed sizes. With size 0 this is the workload `connect`.
pub(super) struct Bytes {
    request: Vec<u8>,
    response: usize,
    missing: usize,
}

impl Bytes {
    pub(super) fn new(request: usize, response: usize) -> Self {
        Bytes { request: vec![b'x'; request], response, missing: 0 }
    }
}

impl ProtocolState for Bytes {
    fn begin(&mut self, _last: bool) {
        self.missing = self.response;
    }

    fn outgoing(&self) -> &[u8] {
        &self.request
    }

    fn receive(&mut self, bytes: &[u8]) -> ParseOutcome {
        if bytes.is_empty() {
            return ParseOutcome::CLOSED_EARLY;
        }
        match self.missing.checked_sub(bytes.len()) {
            Some(0) => ParseOutcome::COMPLETE,
            Some(missing) => {
                self.missing = missing;
                ParseOutcome::NeedMore
            }
            // The server sent more than the response.
            None => ParseOutcome::malformed("more bytes than the response has", &bytes[self.missing..]),
        }
    }
}

/// Length of the sequence number, which distinguishes a late response from the expected one.
const NUMBER: usize = 8;

/// Sends a datagram and waits for one in return. A datagram of at least 8 bytes carries a sequence number; a response with
/// another number is late and ignored.
pub(super) struct Datagram {
    payload: Vec<u8>,
    number: u64,
    answered: bool,
}

impl Datagram {
    pub(super) fn new(request: usize) -> Self {
        Datagram { payload: vec![b'x'; request.max(1)], number: 0, answered: false }
    }
}

impl ProtocolState for Datagram {
    fn begin(&mut self, _last: bool) {
        self.number += 1;
        self.answered = false;
        if let Some(room) = self.payload.get_mut(..NUMBER) {
            room.copy_from_slice(&self.number.to_be_bytes());
        }
    }

    fn outgoing(&self) -> &[u8] {
        &self.payload
    }

    fn receive(&mut self, bytes: &[u8]) -> ParseOutcome {
        match (bytes.get(..NUMBER), self.payload.get(..NUMBER)) {
            (Some(theirs), Some(ours)) if theirs != ours => ParseOutcome::NeedMore,
            _ => {
                self.answered = true;
                ParseOutcome::COMPLETE
            }
        }
    }

    fn answered(&self) -> bool {
        self.answered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_ends_with_its_last_byte() {
        let mut protocol = Bytes::new(2, 3);
        protocol.begin(false);
        assert_eq!(protocol.outgoing().len(), 2);
        assert_eq!(protocol.receive(b"a"), ParseOutcome::NeedMore);
        assert_eq!(protocol.receive(b"bc"), ParseOutcome::COMPLETE);
        protocol.begin(true);
        assert_eq!(protocol.receive(b"ab"), ParseOutcome::NeedMore);
        assert_eq!(protocol.receive(b""), ParseOutcome::CLOSED_EARLY);
        protocol.begin(true);
        let ParseOutcome::Failed(failure) = protocol.receive(b"abcd") else { panic!("a byte too many") };
        let detail = "more bytes than the response has: \"d\"";
        assert_eq!((failure.name.as_ref(), failure.detail.as_deref()), ("malformed", Some(detail)));
    }

    #[test]
    fn a_late_response_is_ignored() {
        let mut protocol = Datagram::new(16);
        protocol.begin(false);
        let late = protocol.outgoing().to_vec();
        protocol.begin(false);
        assert_eq!(protocol.receive(&late), ParseOutcome::NeedMore);
        assert!(!protocol.answered());
        let now = protocol.outgoing().to_vec();
        assert_eq!(protocol.receive(&now), ParseOutcome::COMPLETE);
        assert!(protocol.answered());
        let mut short = Datagram::new(1);
        short.begin(false);
        assert_eq!(short.receive(b"x"), ParseOutcome::COMPLETE, "a short datagram has no sequence number");
    }
}
