//! So many bytes are a request, so many others the response; what they are does not matter.

use super::{Answer, Place, Step};

pub(crate) struct Crr {
    request: u64,
    response: Vec<u8>,
}

impl Crr {
    pub(super) fn new(request: u64, response: usize) -> Crr {
        Crr { request, response: vec![b'x'; response] }
    }

    pub(super) fn response(&self) -> &[u8] {
        &self.response
    }

    pub(super) fn next(&self, place: &mut Place, bytes: &[u8], last: bool) -> Step {
        let left = match *place {
            Place::Body { left, .. } => left,
            Place::Between => self.request,
        };
        let answer = if last { Answer::Close } else { Answer::Keep };
        if bytes.is_empty() || (bytes.len() as u64) < left {
            if !bytes.is_empty() {
                *place = Place::Body { left: left - bytes.len() as u64, answer };
            }
            return Step { used: bytes.len(), answer: None };
        }
        *place = Place::Between;
        // It fits into the length of a slice.
        Step { used: left as usize, answer: Some(answer) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_in_bytes_wherever_they_are_cut() {
        let crr = Crr::new(3, 5);
        let mut place = Place::Between;
        assert_eq!(crr.next(&mut place, b"", false), Step { used: 0, answer: None });
        assert_eq!(place, Place::Between, "nothing of a request has come");
        assert_eq!(crr.next(&mut place, b"ab", false), Step { used: 2, answer: None });
        assert_ne!(place, Place::Between);
        assert_eq!(crr.next(&mut place, b"cdefgh", false), Step { used: 1, answer: Some(Answer::Keep) });
        assert_eq!(crr.next(&mut place, b"defgh", true), Step { used: 3, answer: Some(Answer::Close) });
        assert_eq!(crr.next(&mut place, b"gh", false), Step { used: 2, answer: None });
        assert_eq!(crr.response(), b"xxxxx");
    }
}
