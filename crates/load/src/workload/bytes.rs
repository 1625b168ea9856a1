use super::{Heard, Talk};

/// So many bytes out, so many back; none of either is the workload `connect`.
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

impl Talk for Bytes {
    fn begin(&mut self, _last: bool) {
        self.missing = self.response;
    }

    fn outgoing(&self) -> &[u8] {
        &self.request
    }

    fn heard(&mut self, bytes: &[u8]) -> Heard {
        if bytes.is_empty() {
            return Heard::CLOSED_EARLY;
        }
        match self.missing.checked_sub(bytes.len()) {
            Some(0) => Heard::ANSWER,
            Some(missing) => {
                self.missing = missing;
                Heard::More
            }
            // More than was asked for.
            None => Heard::MALFORMED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_is_whole_when_all_its_bytes_are_there() {
        let mut talk = Bytes::new(2, 3);
        talk.begin(false);
        assert_eq!(talk.outgoing().len(), 2);
        assert_eq!(talk.heard(b"a"), Heard::More);
        assert_eq!(talk.heard(b"bc"), Heard::ANSWER);
        talk.begin(true);
        assert_eq!(talk.heard(b"ab"), Heard::More);
        assert_eq!(talk.heard(b""), Heard::CLOSED_EARLY);
        talk.begin(true);
        assert_eq!(talk.heard(b"abcd"), Heard::MALFORMED);
    }
}
