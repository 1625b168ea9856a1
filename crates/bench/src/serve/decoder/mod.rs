//! Decoders of stream protocols: one file per protocol. A decoder uses neither a socket nor a clock.

mod http;

use std::sync::Arc;

use crate::serve::protocol::Protocol;

impl Protocol {
    /// Creates the decoder of the protocol; `None` for UDP.
    pub(crate) fn decoder(self) -> Option<Arc<dyn Decoder>> {
        match self {
            Protocol::Crr { request, response } => Some(Arc::new(Crr::new(request, response))),
            Protocol::Http { body } => Some(Arc::new(http::Http::new(body))),
            Protocol::Sink => Some(Arc::new(Sink)),
            Protocol::Udp { .. } => None,
        }
    }
}

/// The decoder of a protocol, with its prepared responses.
pub(crate) trait Decoder: Send + Sync {
    /// Decodes the next request in `bytes`. `last`: the server closes after the next response.
    fn next(&self, position: &mut Position, bytes: &[u8], last: bool) -> Step;

    /// Returns the bytes of a response.
    fn bytes(&self, answer: Answer) -> &[u8];
}

/// The position of a connection in a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Position {
    /// Between two requests.
    #[default]
    Between,
    /// In a body, of which `left` bytes have not arrived.
    Body { left: u64, answer: Answer },
}

impl Position {
    /// Encodes the position as a number. It is 0 only between requests, and bit 62 is not used. The rest of a body is limited to
    /// 2^56 - 1 bytes.
    pub(crate) fn mark(self) -> u64 {
        match self {
            Position::Between => 0,
            Position::Body { left, answer } => {
                let code = RESPONSES.iter().position(|response| *response == answer).unwrap_or_default();
                1 << 63 | (code as u64) << 56 | left.min(MAX_LEFT)
            }
        }
    }

    pub(crate) fn from_mark(mark: u64) -> Position {
        if mark == 0 {
            return Position::Between;
        }
        let answer = RESPONSES.get((mark >> 56 & 7) as usize).copied().unwrap_or(Answer::Close);
        Position::Body { left: mark & MAX_LEFT, answer }
    }
}

const RESPONSES: [Answer; 6] = [
    Answer::Keep,
    Answer::Close,
    Answer::KeepAlive,
    Answer::HeadKeep,
    Answer::HeadClose,
    Answer::HeadKeepAlive,
];
const MAX_LEFT: u64 = (1 << 56) - 1;

/// A response of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The response, after which the connection stays open.
    Keep,
    /// The response, after which the server closes.
    Close,
    /// The response to a client of HTTP/1.0, after which the connection stays open as the client asked.
    KeepAlive,
    /// The response to HEAD, without a body, after which the connection stays open.
    HeadKeep,
    /// The response to HEAD, without a body, after which the server closes.
    HeadClose,
    /// The response to HEAD of a client of HTTP/1.0, after which the connection stays open.
    HeadKeepAlive,
    /// 100: the client may send the body.
    Continue,
    /// 400: the request is malformed.
    BadRequest,
    /// 411: the request has no Content-Length.
    LengthRequired,
    /// 431: the head is too large.
    HeaderTooLarge,
}

impl Answer {
    /// Returns whether this is a response to a valid request, which has a service time and is counted.
    pub(crate) fn is_response(self) -> bool {
        RESPONSES.contains(&self)
    }

    /// Returns whether the server closes the connection after it.
    pub(crate) fn ends(self) -> bool {
        !matches!(
            self,
            Answer::Keep | Answer::KeepAlive | Answer::HeadKeep | Answer::HeadKeepAlive | Answer::Continue
        )
    }

    /// Returns the name of the error under which a refused request is counted.
    pub(crate) fn error(self) -> Option<&'static str> {
        match self {
            Answer::BadRequest => Some("malformed-request"),
            Answer::LengthRequired => Some("length-required"),
            Answer::HeaderTooLarge => Some("header-too-large"),
            _ => None,
        }
    }
}

/// The outcome of one step of decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Number of bytes used, from the first.
    pub(crate) used: usize,
    /// The response that is due. `None`: more bytes are needed.
    pub(crate) answer: Option<Answer>,
}

struct Sink;

impl Decoder for Sink {
    fn next(&self, _position: &mut Position, bytes: &[u8], _last: bool) -> Step {
        Step { used: bytes.len(), answer: None }
    }

    fn bytes(&self, _answer: Answer) -> &[u8] {
        &[]
    }
}

pub(crate) struct Crr {
    request: u64,
    response: Vec<u8>,
}

impl Crr {
    fn new(request: u64, response: usize) -> Crr {
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
    fn a_position_survives_encoding() {
        assert_eq!((Position::Between.mark(), Position::from_mark(0)), (0, Position::Between));
        for answer in RESPONSES {
            for left in [0, 1, 70_000, MAX_LEFT] {
                let position = Position::Body { left, answer };
                assert_eq!(Position::from_mark(position.mark()), position);
                assert!(position.mark() & 1 << 62 == 0 && position.mark() != 0);
            }
        }
    }

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
