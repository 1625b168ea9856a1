//! Entry point for the fuzzer (`fuzz/`): the decoder of HTTP requests.

use crate::serve::decoder::{Answer, Position};
use crate::serve::protocol::Protocol;

/// The outcome of decoding a stream of requests.
#[derive(Debug, PartialEq, Eq)]
pub struct Served {
    /// Names of the responses, without `100 Continue`, which depends on how much of the body has arrived.
    pub answers: Vec<String>,
    /// Number of bytes that are part of an incomplete head.
    pub kept: usize,
    /// Position in a request body, as a number.
    pub place: u64,
}

/// Decodes a stream that arrives in these pieces, in the same way as a worker.
pub fn http_requests(pieces: &[&[u8]]) -> Served {
    let decoder = Protocol::Http { body: 2 }.decoder().expect("HTTP is spoken on streams");
    let (mut place, mut kept, mut answers) = (Position::Between, Vec::new(), Vec::new());
    for piece in pieces {
        kept.extend_from_slice(piece);
        loop {
            let step = decoder.next(&mut place, &kept, false);
            kept.drain(..step.used);
            match step.answer {
                None => break,
                Some(Answer::Continue) => {}
                Some(answer) => {
                    answers.push(format!("{answer:?}"));
                    if answer.ends() {
                        return Served { answers, kept: 0, place: 0 };
                    }
                }
            }
        }
    }
    Served { answers, kept: kept.len(), place: place.mark() }
}
