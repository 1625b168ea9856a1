//! Decoders of stream protocols: one file per protocol. A decoder uses neither a socket nor a clock.

mod crr;
mod http;
mod sink;
mod step;

pub(crate) use crate::decoder::step::{Answer, Position, Step};
use crate::settings::Protocol;

/// The decoder of a protocol, with its prepared responses.
pub(crate) enum Decoder {
    Crr(crr::Crr),
    Http(http::Http),
    Sink,
}

impl Decoder {
    /// Creates the decoder of a protocol; `None` for UDP.
    pub(crate) fn new(protocol: &Protocol) -> Option<Decoder> {
        match *protocol {
            Protocol::Crr { request, response } => Some(Decoder::Crr(crr::Crr::new(request, response))),
            Protocol::Http { body } => Some(Decoder::Http(http::Http::new(body))),
            Protocol::Sink => Some(Decoder::Sink),
            Protocol::Udp { .. } => None,
        }
    }

    /// Decodes the next request in `bytes`. `last`: the server closes after the next response.
    pub(crate) fn next(&self, position: &mut Position, bytes: &[u8], last: bool) -> Step {
        match self {
            Decoder::Crr(crr) => crr.next(position, bytes, last),
            Decoder::Http(http) => http.next(position, bytes, last),
            Decoder::Sink => sink::next(bytes),
        }
    }

    /// Returns the bytes of a response.
    pub(crate) fn bytes(&self, answer: Answer) -> &[u8] {
        match self {
            Decoder::Crr(crr) => crr.response(),
            Decoder::Http(http) => http.bytes(answer),
            Decoder::Sink => &[],
        }
    }
}
