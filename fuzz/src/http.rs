//! HTTP targets. A stream must have the same meaning however it is cut into pieces.

use fourtuple_bench::load::fuzzing::{http_chunks, http_response};
use fourtuple_bench::serve::fuzzing::http_requests;

/// Maximum length of a stream that is cut at every byte. A longer stream is cut at 64 positions, and at each of its last `ALL_CUTS` bytes.
const ALL_CUTS: usize = 192;

/// Checks that `read` returns the same for the whole stream, for the stream in two pieces, and for pieces of one byte.
fn same_in_pieces<T: PartialEq + std::fmt::Debug>(stream: &[u8], read: impl Fn(&[&[u8]]) -> T) {
    let whole = read(&[stream]);
    let first = stream.len().saturating_sub(ALL_CUTS);
    for cut in (0..first).step_by((first / 64).max(1)).chain(first..=stream.len()) {
        let (first, rest) = stream.split_at(cut);
        assert_eq!(read(&[first, rest]), whole, "cut at {cut}");
    }
    if stream.len() <= 1024 {
        let bytes: Vec<&[u8]> = stream.chunks(1).collect();
        assert_eq!(read(&bytes), whole, "in pieces of one byte");
    }
}

pub(crate) fn request(bytes: &[u8]) {
    same_in_pieces(bytes, http_requests);
}

/// Parses a response. Bit 0 of the first byte says that the request was HEAD, bit 1 that the server closes at the end.
pub(crate) fn response(bytes: &[u8]) {
    let Some((flags, stream)) = bytes.split_first() else { return };
    same_in_pieces(stream, |pieces| http_response(flags & 1 != 0, pieces, flags & 2 != 0));
}

pub(crate) fn chunks(bytes: &[u8]) {
    same_in_pieces(bytes, http_chunks);
}
