//! Decoders of stream protocols: one file per protocol. A decoder uses neither a socket nor a clock.

mod crr;
mod http;
mod sink;
mod step;

use std::sync::Arc;

pub(crate) use crate::decoder::step::{Answer, Decoder, Position};
use crate::protocol::Protocol;

impl Protocol {
    /// Creates the decoder of the protocol; `None` for UDP.
    pub(crate) fn decoder(self) -> Option<Arc<dyn Decoder>> {
        match self {
            Protocol::Crr { request, response } => Some(Arc::new(crr::Crr::new(request, response))),
            Protocol::Http { body } => Some(Arc::new(http::Http::new(body))),
            Protocol::Sink => Some(Arc::new(sink::Sink)),
            Protocol::Udp { .. } => None,
        }
    }
}
