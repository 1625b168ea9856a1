use crate::workload::protocol::{ParseOutcome, ProtocolState};

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
}
