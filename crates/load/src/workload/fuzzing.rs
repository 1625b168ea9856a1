//! Entry points for the fuzzer (`crates/fuzz`): the parsers of HTTP responses.

use crate::workload::chunked::{Chunked, Progress};
use crate::workload::protocol::ParseOutcome;
use crate::workload::response::Response;

/// Parses one response from a stream that arrives in these pieces, and ends after them if `ends`. Returns the outcome as text.
/// Bytes after the response make it malformed, in the same piece or in a later one.
pub fn http_response(to_head: bool, pieces: &[&[u8]], ends: bool) -> String {
    let mut response = Response::new(to_head);
    let mut outcome = ParseOutcome::NeedMore;
    for piece in pieces.iter().filter(|piece| !piece.is_empty()) {
        outcome = match outcome {
            ParseOutcome::NeedMore => response.receive(piece),
            ParseOutcome::Complete { .. } => ParseOutcome::MALFORMED,
            failed => return format!("{failed:?}"),
        };
    }
    if ends && outcome == ParseOutcome::NeedMore {
        outcome = response.receive(&[]);
    }
    format!("{outcome:?}")
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
