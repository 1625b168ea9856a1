//! What is said on a stream: one file per protocol, each a decoder that knows neither socket nor clock.

mod crr;
mod http;
mod sink;

use crate::serve::Protocol;

/// How far into a request a connection is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Place {
    /// Between two requests.
    #[default]
    Between,
    /// The body, or the rest of it, is still to come.
    Body { left: u64, answer: Answer },
}

impl Place {
    /// As a number that is not 0 within a request and has bit 62 free; of a body that is longer than 2^56 bytes the rest is
    /// taken for shorter.
    pub(crate) fn mark(self) -> u64 {
        match self {
            Place::Between => 0,
            Place::Body { left, answer } => {
                let code = RESPONSES.iter().position(|response| *response == answer).unwrap_or_default();
                1 << 63 | (code as u64) << 56 | left.min(MOST_LEFT)
            }
        }
    }

    pub(crate) fn from_mark(mark: u64) -> Place {
        if mark == 0 {
            return Place::Between;
        }
        let answer = RESPONSES[(mark >> 56 & 3) as usize];
        Place::Body { left: mark & MOST_LEFT, answer }
    }
}

const RESPONSES: [Answer; 4] = [Answer::Keep, Answer::Close, Answer::HeadKeep, Answer::HeadClose];
const MOST_LEFT: u64 = (1 << 56) - 1;

/// What the server says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The response, after which the connection goes on.
    Keep,
    /// The response, after which the server closes.
    Close,
    /// The same two to HEAD: without a body.
    HeadKeep,
    HeadClose,
    /// 100: the body may come.
    Continue,
    /// 400
    BadRequest,
    /// 411: the length of the body must be said.
    LengthRequired,
    /// 431
    HeaderTooLarge,
}

impl Answer {
    /// Whether it answers a request that was understood, which is worked on and counted.
    pub(crate) fn is_response(self) -> bool {
        matches!(self, Answer::Keep | Answer::Close | Answer::HeadKeep | Answer::HeadClose)
    }

    /// Whether the server closes the connection after it.
    pub(crate) fn ends(self) -> bool {
        !matches!(self, Answer::Keep | Answer::HeadKeep | Answer::Continue)
    }

    /// The name under which a request that could not be served is counted.
    pub(crate) fn error(self) -> Option<&'static str> {
        match self {
            Answer::BadRequest => Some("malformed-request"),
            Answer::LengthRequired => Some("length-required"),
            Answer::HeaderTooLarge => Some("header-too-large"),
            _ => None,
        }
    }
}

/// What was made of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// So many of them, from the first, are done with.
    pub(crate) used: usize,
    /// What is to be said now. `None`: more bytes are needed.
    pub(crate) answer: Option<Answer>,
}

/// A protocol with its ready-made answers.
pub(crate) enum Talk {
    Crr(crr::Crr),
    Http(http::Http),
    Sink,
}

impl Talk {
    /// `None` of a protocol that is not spoken on streams.
    pub(crate) fn new(protocol: &Protocol) -> Option<Talk> {
        match *protocol {
            Protocol::Crr { request, response } => Some(Talk::Crr(crr::Crr::new(request, response))),
            Protocol::Http { body } => Some(Talk::Http(http::Http::new(body))),
            Protocol::Sink => Some(Talk::Sink),
            Protocol::Udp { .. } => None,
        }
    }

    /// Reads on in `bytes`. `last`: the next response is the one after which the server closes.
    pub(crate) fn next(&self, place: &mut Place, bytes: &[u8], last: bool) -> Step {
        match self {
            Talk::Crr(crr) => crr.next(place, bytes, last),
            Talk::Http(http) => http.next(place, bytes, last),
            Talk::Sink => sink::next(bytes),
        }
    }

    /// The bytes of an answer.
    pub(crate) fn bytes(&self, answer: Answer) -> &[u8] {
        match self {
            Talk::Crr(crr) => crr.response(),
            Talk::Http(http) => http.bytes(answer),
            Talk::Sink => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_survives_as_a_number() {
        assert_eq!((Place::Between.mark(), Place::from_mark(0)), (0, Place::Between));
        for answer in RESPONSES {
            for left in [0, 1, 70_000, MOST_LEFT] {
                let place = Place::Body { left, answer };
                assert_eq!(Place::from_mark(place.mark()), place);
                assert!(place.mark() & 1 << 62 == 0 && place.mark() != 0);
            }
        }
    }
}
