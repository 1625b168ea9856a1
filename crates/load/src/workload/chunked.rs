/// A parser that finds the end of a chunked body (RFC 9112, 7.1) and discards the data.
pub(super) struct Chunked {
    state: State,
    /// The beginning of a line whose end has not arrived; of a malformed body the line that is wrong.
    line: Vec<u8>,
}

#[derive(Clone, Copy)]
enum State {
    Size,
    Data(u64),
    /// The CRLF after the data of a chunk.
    AfterData,
    Trailers,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    More,
    Whole,
    Malformed,
}

/// Maximum length of a line: a chunk size with its extensions, or a trailer.
const MAX_LINE_BYTES: usize = 8192;

impl Chunked {
    pub(super) fn new() -> Self {
        Chunked { state: State::Size, line: Vec::new() }
    }

    /// Returns the line at which the body was malformed.
    pub(super) fn wrong_line(&self) -> &[u8] {
        &self.line
    }

    pub(super) fn receive(&mut self, mut bytes: &[u8]) -> Progress {
        while !bytes.is_empty() {
            if let State::Data(missing) = self.state {
                let here = missing.min(bytes.len() as u64);
                bytes = &bytes[here as usize..];
                self.state = if here == missing { State::AfterData } else { State::Data(missing - here) };
                continue;
            }
            let end = bytes.iter().position(|byte| *byte == b'\n');
            self.line.extend_from_slice(&bytes[..end.unwrap_or(bytes.len())]);
            if self.line.len() > MAX_LINE_BYTES {
                return Progress::Malformed;
            }
            let Some(end) = end else { return Progress::More };
            bytes = &bytes[end + 1..];
            let line = std::mem::take(&mut self.line);
            let line = line.strip_suffix(b"\r").unwrap_or(&line);
            self.state = match (self.state, line) {
                (State::Size, line) if let Some(size) = size(line) => {
                    if size == 0 {
                        State::Trailers
                    } else {
                        State::Data(size)
                    }
                }
                (State::AfterData, b"") => State::Size,
                (State::Trailers, b"") if bytes.is_empty() => return Progress::Whole,
                (State::Trailers, line) if !line.is_empty() => State::Trailers,
                // No size, bytes instead of the CRLF after a chunk, or bytes after the body.
                (_, line) => {
                    self.line = if line.is_empty() { bytes } else { line }.to_vec();
                    return Progress::Malformed;
                }
            };
        }
        Progress::More
    }
}

/// Parses a chunk size: hexadecimal digits up to the chunk extensions.
fn size(line: &[u8]) -> Option<u64> {
    let digits = line.split(|byte| *byte == b';').next()?.trim_ascii();
    let is_hexadecimal = !digits.is_empty() && digits.iter().all(u8::is_ascii_hexdigit);
    let text = std::str::from_utf8(digits).ok().filter(|_| is_hexadecimal)?;
    u64::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_in_pieces(text: &str, piece: usize) -> Progress {
        let mut chunked = Chunked::new();
        let mut pieces = text.as_bytes().chunks(piece).peekable();
        while let Some(bytes) = pieces.next() {
            let progress = chunked.receive(bytes);
            if progress != Progress::More || pieces.peek().is_none() {
                assert!(pieces.peek().is_none() || progress == Progress::Malformed, "{text:?}");
                return progress;
            }
        }
        Progress::More
    }

    #[test]
    fn the_end_is_found_in_pieces_of_any_size() {
        for (text, expected) in [
            ("0\r\n\r\n", Progress::Whole),
            ("a;x=y\r\n0123456789\r\n1\r\nx\r\n0\r\nTrailer: 1\r\n\r\n", Progress::Whole),
            ("5\r\nabc", Progress::More),
            ("5\r\nabcdefg\r\n", Progress::Malformed),
            ("x\r\n", Progress::Malformed),
            ("\r\n", Progress::Malformed),
            ("-1\r\n", Progress::Malformed),
            ("ffffffffffffffffff\r\n", Progress::Malformed),
        ] {
            for piece in 1..=text.len() {
                assert_eq!(parse_in_pieces(text, piece), expected, "{text:?} in pieces of {piece}");
            }
        }
        assert_eq!(parse_in_pieces("0\r\n\r\nx", 99), Progress::Malformed);
    }
}
