//! The protocol crr: requests and responses of fixed sizes with arbitrary contents.

use crate::decoder::step::{Answer, Decoder, Position, Step};

pub(crate) struct Crr {
    request: u64,
    response: Vec<u8>,
}

impl Crr {
    pub(super) fn new(request: u64, response: usize) -> Crr {
        Crr { request, response: vec![b'x'; response] }
    }
}

impl Decoder for Crr {
    fn bytes(&self, _answer: Answer) -> &[u8] {
        &self.response
    }

    fn next(&self, position: &mut Position, bytes: &[u8], last: bool) -> Step {
        let left = match *position {
            Position::Body { left, .. } => left,
            Position::Between => self.request,
        };
        let answer = if last { Answer::Close } else { Answer::Keep };
        if bytes.is_empty() || (bytes.len() as u64) < left {
            if !bytes.is_empty() {
                *position = Position::Body { left: left - bytes.len() as u64, answer };
            }
            return Step { used: bytes.len(), answer: None };
        }
        *position = Position::Between;
        // At most bytes.len(), so it fits into usize.
        Step { used: left as usize, answer: Some(answer) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_may_be_split_at_any_byte() {
        let crr = Crr::new(3, 5);
        let mut position = Position::Between;
        assert_eq!(crr.next(&mut position, b"", false), Step { used: 0, answer: None });
        assert_eq!(position, Position::Between, "no byte of a request has arrived");
        assert_eq!(crr.next(&mut position, b"ab", false), Step { used: 2, answer: None });
        assert_ne!(position, Position::Between);
        assert_eq!(crr.next(&mut position, b"cdefgh", false), Step { used: 1, answer: Some(Answer::Keep) });
        assert_eq!(crr.next(&mut position, b"defgh", true), Step { used: 3, answer: Some(Answer::Close) });
        assert_eq!(crr.next(&mut position, b"gh", false), Step { used: 2, answer: None });
        assert_eq!(crr.bytes(Answer::Keep), b"xxxxx");
    }
}
