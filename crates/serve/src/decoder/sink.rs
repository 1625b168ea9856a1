//! The protocol sink: discards all bytes and never responds.

use crate::decoder::step::{Answer, Decoder, Position, Step};

pub(super) struct Sink;

impl Decoder for Sink {
    fn next(&self, _position: &mut Position, bytes: &[u8], _last: bool) -> Step {
        Step { used: bytes.len(), answer: None }
    }

    fn bytes(&self, _answer: Answer) -> &[u8] {
        &[]
    }
}
