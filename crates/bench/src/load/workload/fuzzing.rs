//! Entry points for the fuzzer (`fuzz/`): the parsers of HTTP responses.

use crate::load::workload::ParseOutcome;
use crate::load::workload::http::{Chunked, Progress};
use crate::load::workload::http::{EXCESS, Response};

/// Parses one response from a stream that arrives in these pieces, and ends after them if `ends`. Returns the outcome as text.
/// Bytes after the response make it malformed, in the same piece or in a later one.
pub fn http_response(to_head: bool, pieces: &[&[u8]], ends: bool) -> String {
    let mut response = Response::new(to_head);
    let mut outcome = ParseOutcome::NeedMore;
    for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
        outcome = match outcome {
            ParseOutcome::NeedMore => response.receive(piece),
            ParseOutcome::Complete { .. } => ParseOutcome::malformed(EXCESS, piece),
            ParseOutcome::Failed(failure) => return failure.name.into_owned(),
            outcome => return format!("{outcome:?}"),
        };
    }
    if ends && outcome == ParseOutcome::NeedMore {
        outcome = response.receive(&[]);
    }
    match outcome {
        // The bytes that it quotes depend on the pieces.
        ParseOutcome::Failed(failure) => failure.name.into_owned(),
        outcome => format!("{outcome:?}"),
    }
}

/// Parses a chunked body that arrives in these pieces, and returns the outcome as text.
pub fn http_chunks(pieces: &[&[u8]]) -> String {
    let mut chunked = Chunked::new();
    let mut progress = Progress::More;
    for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
        progress = match progress {
            Progress::More => chunked.receive(piece),
            Progress::Whole | Progress::Malformed => Progress::Malformed,
        };
    }
    format!("{progress:?}")
}
