use std::borrow::Cow;

use super::Heard;
use super::chunked::{Chunked, Progress};

/// Headers that a response may have.
const MOST_HEADERS: usize = 64;

/// Bytes that the headers of a response may have.
const LONGEST_HEAD: usize = 64 * 1024;

/// A response of HTTP/1.1 as it comes in (RFC 9112).
pub(super) struct Response {
    /// The request was HEAD: there is no body, whatever the headers say.
    to_head: bool,
    /// The beginning of a head that is not whole yet.
    head: Vec<u8>,
    body: Body,
    closing: bool,
    failure: Option<Cow<'static, str>>,
}

enum Body {
    /// The head is still to come.
    Unknown,
    Length(u64),
    Chunked(Chunked),
    /// Until the connection is closed.
    Rest,
}

/// What the head of a response says.
struct Head {
    length: usize,
    status: u16,
    content_length: Option<u64>,
    chunked: bool,
    closing: bool,
}

impl Response {
    pub(super) fn new(to_head: bool) -> Self {
        Response { to_head, head: Vec::new(), body: Body::Unknown, closing: false, failure: None }
    }

    pub(super) fn heard(&mut self, bytes: &[u8]) -> Heard {
        if bytes.is_empty() {
            return if matches!(self.body, Body::Rest) { self.answer() } else { Heard::CLOSED_EARLY };
        }
        if !matches!(self.body, Body::Unknown) {
            return self.body(bytes);
        }
        // Nearly always the whole head is in the first bytes: then nothing is copied.
        if self.head.is_empty() {
            return self.begin(bytes);
        }
        let mut all = std::mem::take(&mut self.head);
        all.extend_from_slice(bytes);
        self.begin(&all)
    }

    fn begin(&mut self, bytes: &[u8]) -> Heard {
        let mut rest = bytes;
        loop {
            let head = match parse(rest) {
                Err(()) => return Heard::MALFORMED,
                Ok(None) if rest.len() > LONGEST_HEAD => return Heard::MALFORMED,
                Ok(None) => {
                    self.head = rest.to_vec();
                    return Heard::More;
                }
                Ok(Some(head)) => head,
            };
            rest = &rest[head.length..];
            // 1xx only announces a response; 101 is the end of HTTP, for which nobody asked.
            if head.status == 101 {
                return Heard::MALFORMED;
            } else if head.status < 200 {
                continue;
            }
            self.closing = head.closing;
            if head.status >= 400 {
                self.failure = Some(format!("status-{}", head.status).into());
            }
            self.body = if self.to_head || matches!(head.status, 204 | 304) {
                Body::Length(0)
            } else if head.chunked {
                Body::Chunked(Chunked::new())
            } else {
                head.content_length.map_or(Body::Rest, Body::Length)
            };
            return self.body(rest);
        }
    }

    fn body(&mut self, bytes: &[u8]) -> Heard {
        match &mut self.body {
            Body::Unknown => unreachable!("the head comes first"),
            Body::Rest => Heard::More,
            Body::Length(missing) => match missing.checked_sub(bytes.len() as u64) {
                Some(0) => self.answer(),
                Some(rest) => {
                    *missing = rest;
                    Heard::More
                }
                None => Heard::MALFORMED,
            },
            Body::Chunked(chunked) => match chunked.heard(bytes) {
                Progress::More => Heard::More,
                Progress::Whole => self.answer(),
                Progress::Malformed => Heard::MALFORMED,
            },
        }
    }

    fn answer(&mut self) -> Heard {
        Heard::Answer {
            closing: self.closing || matches!(self.body, Body::Rest),
            failure: self.failure.take(),
        }
    }
}

/// The head at the beginning of `bytes`, if it is whole.
fn parse(bytes: &[u8]) -> Result<Option<Head>, ()> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let length = match response.parse(bytes).map_err(drop)? {
        httparse::Status::Partial => return Ok(None),
        httparse::Status::Complete(length) => length,
    };
    let mut head = Head {
        length,
        status: response.code.ok_or(())?,
        content_length: None,
        chunked: false,
        // HTTP/1.0 closes unless it says otherwise.
        closing: response.version == Some(0),
    };
    for header in response.headers.iter() {
        if header.name.eq_ignore_ascii_case("content-length") {
            let value = std::str::from_utf8(header.value).map_err(drop)?.trim();
            let value: u64 = value.parse().map_err(drop)?;
            // Two lengths that differ are an attack or a mistake (RFC 9112, 6.3).
            if head.content_length.is_some_and(|other| other != value) {
                return Err(());
            }
            head.content_length = Some(value);
        } else if header.name.eq_ignore_ascii_case("transfer-encoding") {
            head.chunked |= mentions(header.value, "chunked");
        } else if header.name.eq_ignore_ascii_case("connection") {
            head.closing =
                (head.closing && !mentions(header.value, "keep-alive")) || mentions(header.value, "close");
        }
    }
    Ok(Some(head))
}

/// Whether a comma-separated list has `word`.
fn mentions(value: &[u8], word: &str) -> bool {
    let mut words = value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    words.any(|one| one.eq_ignore_ascii_case(word.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is heard at the end, in whichever pieces the bytes come.
    fn hear(text: &str, ends: bool) -> Heard {
        let whole = in_pieces(text, ends, text.len());
        for piece in 1..text.len().min(40) {
            assert_eq!(in_pieces(text, ends, piece), whole, "in pieces of {piece}: {text:?}");
        }
        whole
    }

    fn in_pieces(text: &str, ends: bool, piece: usize) -> Heard {
        let mut response = Response::new(false);
        let mut heard = Heard::More;
        for bytes in text.as_bytes().chunks(piece) {
            assert_eq!(heard, Heard::More, "{text:?}");
            heard = response.heard(bytes);
            if matches!(heard, Heard::Failed(_)) {
                return heard;
            }
        }
        if ends { response.heard(b"") } else { heard }
    }

    fn answer(closing: bool, failure: Option<&'static str>) -> Heard {
        Heard::Answer { closing, failure: failure.map(Cow::Borrowed) }
    }

    #[test]
    fn responses_end_where_they_say() {
        for (text, ends, expected) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", false, answer(false, None)),
            ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close\r\n\r\n", false, answer(true, None)),
            ("HTTP/1.1 204 No Content\r\n\r\n", false, answer(false, None)),
            ("HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", false, answer(true, None)),
            (
                "HTTP/1.0 200 OK\r\nContent-Length: 1\r\nConnection: keep-alive\r\n\r\nx",
                false,
                answer(false, None),
            ),
            ("HTTP/1.1 200 OK\r\n\r\nuntil the end", true, answer(true, None)),
            (
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
                false,
                answer(false, None),
            ),
            ("HTTP/1.1 503 Busy\r\nContent-Length: 1\r\n\r\nx", false, answer(false, Some("status-503"))),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
                false,
                answer(false, None),
            ),
        ] {
            assert_eq!(hear(text, ends), expected, "{text:?}");
        }
    }

    #[test]
    fn what_is_no_response_or_ends_early_is_told() {
        for text in [
            "SSH-2.0-OpenSSH_9.2\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            "HTTP/1.1 101 Switching Protocols\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxy",
        ] {
            assert_eq!(in_pieces(text, false, text.len()), Heard::MALFORMED, "{text:?}");
        }
        for text in ["HTTP/1.1 200 OK\r\nContent-Le", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nx"] {
            assert_eq!(hear(text, true), Heard::CLOSED_EARLY, "{text:?}");
        }
        let endless = format!("HTTP/1.1 200 OK\r\nX: {}", "x".repeat(LONGEST_HEAD));
        assert_eq!(in_pieces(&endless, false, 9999), Heard::MALFORMED);
    }
}
