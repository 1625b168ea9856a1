//! The interface between a worker and a decoder: the position in the stream, and the response that is due.

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
}
