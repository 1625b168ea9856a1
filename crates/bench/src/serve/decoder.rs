//! Decoders of stream protocols. A decoder uses neither a socket nor a clock.

use std::sync::Arc;

use httparse::{EMPTY_HEADER, Header, Request, Status};

use crate::http1;
use crate::serve::protocol::Protocol;

impl Protocol {
    /// Creates the decoder of the protocol; `None` for UDP.
    pub(crate) fn decoder(self) -> Option<Arc<dyn Decoder>> {
        match self {
            Protocol::Crr { request, response } => Some(Arc::new(Crr::new(request, response))),
            Protocol::Http { body } => Some(Arc::new(Http::new(body))),
            Protocol::Sink => Some(Arc::new(Sink)),
            Protocol::Udp { .. } => None,
        }
    }
}

/// The decoder of a protocol, with its prepared responses.
pub(crate) trait Decoder: Send + Sync {
    /// Decodes the next request in `bytes`. `last`: the server closes after the next response.
    fn next(&self, position: &mut Position, bytes: &[u8], last: bool) -> Step;

    /// Returns the bytes of a response.
    fn bytes(&self, answer: Answer) -> &[u8];
}

/// The position of a connection in a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Position {
    /// Between two requests.
    #[default]
    Between,
    /// In a body, of which `left` bytes have not arrived.
    Body { left: u64, answer: Answer },
}

impl Position {
    /// Encodes the position as a number. It is 0 only between requests, and bit 62 is not used. The rest of a body is limited to
    /// 2^56 - 1 bytes.
    pub(crate) fn mark(self) -> u64 {
        match self {
            Position::Between => 0,
            Position::Body { left, answer } => {
                let code = RESPONSES.iter().position(|response| *response == answer).unwrap_or_default();
                1 << 63 | (code as u64) << 56 | left.min(MAX_LEFT)
            }
        }
    }

    pub(crate) fn from_mark(mark: u64) -> Position {
        if mark == 0 {
            return Position::Between;
        }
        let answer = RESPONSES.get((mark >> 56 & 7) as usize).copied().unwrap_or(Answer::Close);
        Position::Body { left: mark & MAX_LEFT, answer }
    }
}

const RESPONSES: [Answer; 6] = [
    Answer::Keep,
    Answer::Close,
    Answer::KeepAlive,
    Answer::HeadKeep,
    Answer::HeadClose,
    Answer::HeadKeepAlive,
];
const MAX_LEFT: u64 = (1 << 56) - 1;

/// A response of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The response, after which the connection stays open.
    Keep,
    /// The response, after which the server closes.
    Close,
    /// The response to a client of HTTP/1.0, after which the connection stays open as the client asked.
    KeepAlive,
    /// The response to HEAD, without a body, after which the connection stays open.
    HeadKeep,
    /// The response to HEAD, without a body, after which the server closes.
    HeadClose,
    /// The response to HEAD of a client of HTTP/1.0, after which the connection stays open.
    HeadKeepAlive,
    /// 100: the client may send the body.
    Continue,
    /// 400: the request is malformed.
    BadRequest,
    /// 411: the request has no Content-Length.
    LengthRequired,
    /// 431: the head is too large.
    HeaderTooLarge,
}

impl Answer {
    /// Returns whether this is a response to a valid request, which has a service time and is counted.
    pub(crate) fn is_response(self) -> bool {
        RESPONSES.contains(&self)
    }

    /// Returns whether the server closes the connection after it.
    pub(crate) fn ends(self) -> bool {
        !matches!(
            self,
            Answer::Keep | Answer::KeepAlive | Answer::HeadKeep | Answer::HeadKeepAlive | Answer::Continue
        )
    }

    /// Returns the name of the error under which a refused request is counted.
    pub(crate) fn error(self) -> Option<&'static str> {
        match self {
            Answer::BadRequest => Some("malformed-request"),
            Answer::LengthRequired => Some("length-required"),
            Answer::HeaderTooLarge => Some("header-too-large"),
            _ => None,
        }
    }
}

/// The outcome of one step of decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Number of bytes used, from the first.
    pub(crate) used: usize,
    /// The response that is due. `None`: more bytes are needed.
    pub(crate) answer: Option<Answer>,
}

struct Sink;

impl Decoder for Sink {
    fn next(&self, _position: &mut Position, bytes: &[u8], _last: bool) -> Step {
        Step { used: bytes.len(), answer: None }
    }

    fn bytes(&self, _answer: Answer) -> &[u8] {
        &[]
    }
}

pub(crate) struct Crr {
    request: u64,
    response: Vec<u8>,
}

impl Crr {
    fn new(request: u64, response: usize) -> Crr {
        Crr { request, response: vec![b'x'; response] }
    }
}

impl Decoder for Crr {
    fn bytes(&self, _answer: Answer) -> &[u8] {
        &self.response
    }

    fn next(&self, position: &mut Position, bytes: &[u8], last: bool) -> Step {
        let left = match *position {
            Position::Body { left, .. } => left,
            Position::Between => self.request,
        };
        let answer = if last { Answer::Close } else { Answer::Keep };
        if bytes.is_empty() || (bytes.len() as u64) < left {
            if !bytes.is_empty() {
                *position = Position::Body { left: left - bytes.len() as u64, answer };
            }
            return Step { used: bytes.len(), answer: None };
        }
        *position = Position::Between;
        // At most bytes.len(), so it fits into usize.
        Step { used: left as usize, answer: Some(answer) }
    }
}

/// Maximum length of a head in bytes; a longer head gets 431.
const MAX_HEAD_BYTES: usize = 16 * 1024;
/// Maximum number of headers; more headers get 431.
const MAX_HEADERS: usize = 100;

/// The prepared responses.
pub(crate) struct Http {
    keep: Response,
    close: Response,
    /// For HTTP/1.0, whose connections end unless both sides say otherwise.
    keep_alive: Response,
}

struct Response {
    bytes: Vec<u8>,
    /// Offset of the body.
    head: usize,
}

impl Response {
    fn head(&self) -> &[u8] {
        &self.bytes[..self.head]
    }
}

impl Http {
    fn new(body: usize) -> Http {
        let response = |connection: &str| {
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {body}\r\n{connection}\r\n"
            );
            let length = head.len();
            let mut bytes = head.into_bytes();
            bytes.resize(length + body, b'x');
            Response { bytes, head: length }
        };
        Http {
            keep: response(""),
            close: response("Connection: close\r\n"),
            keep_alive: response("Connection: keep-alive\r\n"),
        }
    }
}

impl Decoder for Http {
    fn bytes(&self, answer: Answer) -> &[u8] {
        match answer {
            Answer::Keep => &self.keep.bytes,
            Answer::Close => &self.close.bytes,
            Answer::KeepAlive => &self.keep_alive.bytes,
            Answer::HeadKeep => self.keep.head(),
            Answer::HeadClose => self.close.head(),
            Answer::HeadKeepAlive => self.keep_alive.head(),
            Answer::Continue => b"HTTP/1.1 100 Continue\r\n\r\n",
            Answer::BadRequest => {
                b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            }
            Answer::LengthRequired => {
                b"HTTP/1.1 411 Length Required\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            }
            Answer::HeaderTooLarge => {
                b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            }
        }
    }

    fn next(&self, position: &mut Position, bytes: &[u8], last: bool) -> Step {
        match *position {
            Position::Body { left, answer } => {
                if (bytes.len() as u64) < left {
                    *position = Position::Body { left: left - bytes.len() as u64, answer };
                    return Step { used: bytes.len(), answer: None };
                }
                *position = Position::Between;
                Step { used: left as usize, answer: Some(answer) }
            }
            Position::Between => head(position, bytes, last),
        }
    }
}

/// Decodes the head of a request.
fn head(position: &mut Position, bytes: &[u8], last: bool) -> Step {
    let mut headers = [EMPTY_HEADER; MAX_HEADERS];
    let mut request = Request::new(&mut headers);
    let refuse = |answer| Step { used: bytes.len(), answer: Some(answer) };
    // The parser never sees more than the longest head: the response must not depend on how many bytes have arrived.
    let used = match request.parse(&bytes[..bytes.len().min(MAX_HEAD_BYTES)]) {
        Ok(Status::Complete(used)) => used,
        Ok(Status::Partial) if bytes.len() <= MAX_HEAD_BYTES => return Step { used: 0, answer: None },
        Ok(Status::Partial) | Err(httparse::Error::TooManyHeaders) => return refuse(Answer::HeaderTooLarge),
        Err(_) => return refuse(Answer::BadRequest),
    };
    let length = match body_length(request.headers) {
        Ok(length) => length,
        Err(answer) => return refuse(answer),
    };
    let is_old = request.version == Some(0);
    let hosts = http1::named(request.headers, "host").count();
    // A request of HTTP/1.1 has exactly one Host, an older one at most one (RFC 9112, 3.2).
    if hosts > 1 || (hosts == 0 && !is_old) {
        return refuse(Answer::BadRequest);
    }
    let closes = last || http1::closes(request.headers, request.version);
    let answer = match (request.method == Some("HEAD"), closes, is_old) {
        (false, true, _) => Answer::Close,
        (false, false, false) => Answer::Keep,
        (false, false, true) => Answer::KeepAlive,
        (true, true, _) => Answer::HeadClose,
        (true, false, false) => Answer::HeadKeep,
        (true, false, true) => Answer::HeadKeepAlive,
    };
    let here = bytes.len() - used;
    if length == 0 {
        return Step { used, answer: Some(answer) };
    }
    *position = Position::Body { left: length, answer };
    // A client that waits for 100 gets it, unless the body has begun to arrive (RFC 9110, 10.1.1).
    let waits =
        here == 0 && request.version == Some(1) && http1::lists(request.headers, "expect", "100-continue");
    if waits {
        return Step { used, answer: Some(Answer::Continue) };
    }
    if here as u64 >= length {
        *position = Position::Between;
        return Step { used: used + length as usize, answer: Some(answer) };
    }
    *position = Position::Body { left: length - here as u64, answer };
    Step { used: bytes.len(), answer: None }
}

/// Returns the length of the body, 0 by default, or the response that refuses the request: chunked bodies are not supported.
fn body_length(headers: &[Header<'_>]) -> Result<u64, Answer> {
    if http1::named(headers, "transfer-encoding").next().is_some() {
        return Err(Answer::LengthRequired);
    }
    http1::content_length(headers).map(Option::unwrap_or_default).map_err(|_| Answer::BadRequest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_survives_encoding() {
        assert_eq!((Position::Between.mark(), Position::from_mark(0)), (0, Position::Between));
        for answer in RESPONSES {
            for left in [0, 1, 70_000, MAX_LEFT] {
                let position = Position::Body { left, answer };
                assert_eq!(Position::from_mark(position.mark()), position);
                assert!(position.mark() & 1 << 62 == 0 && position.mark() != 0);
            }
        }
    }

    #[test]
    fn a_request_may_be_split_at_any_byte() {
        let crr = Crr::new(3, 5);
        let mut position = Position::Between;
        assert_eq!(crr.next(&mut position, b"", false), Step { used: 0, answer: None });
        assert_eq!(position, Position::Between, "no byte of a request has arrived");
        assert_eq!(crr.next(&mut position, b"ab", false), Step { used: 2, answer: None });
        assert_ne!(position, Position::Between);
        assert_eq!(crr.next(&mut position, b"cdefgh", false), Step { used: 1, answer: Some(Answer::Keep) });
        assert_eq!(crr.next(&mut position, b"defgh", true), Step { used: 3, answer: Some(Answer::Close) });
        assert_eq!(crr.next(&mut position, b"gh", false), Step { used: 2, answer: None });
        assert_eq!(crr.bytes(Answer::Keep), b"xxxxx");
    }

    fn first(text: &str) -> Step {
        Http::new(2).next(&mut Position::Between, text.as_bytes(), false)
    }

    fn answer(text: &str) -> Option<Answer> {
        first(text).answer
    }

    #[test]
    fn version_and_header_decide_whether_to_close() {
        for (text, wanted) in [
            ("GET / HTTP/1.1\r\nHost: x\r\n\r\n", Answer::Keep),
            ("GET / HTTP/1.1\r\nHost: x\r\nconnection: keep-alive, Close\r\n\r\n", Answer::Close),
            ("GET / HTTP/1.0\r\n\r\n", Answer::Close),
            ("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", Answer::KeepAlive),
            ("HEAD / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", Answer::HeadKeepAlive),
            ("GET / HTTP/1.0\r\nConnection: keep-alive, close\r\n\r\n", Answer::Close),
            ("HEAD / HTTP/1.1\r\nHost: x\r\n\r\n", Answer::HeadKeep),
            ("HEAD / HTTP/1.0\r\n\r\n", Answer::HeadClose),
        ] {
            assert_eq!(answer(text), Some(wanted), "{text:?}");
        }
        for request in
            ["GET / HTTP/1.1\r\nHost: x\r\n\r\n", "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"]
        {
            let last = Http::new(2).next(&mut Position::Between, request.as_bytes(), true);
            assert_eq!(last.answer, Some(Answer::Close), "{request:?}");
        }
    }

    #[test]
    fn an_http_request_may_be_split_at_any_byte() {
        let text =
            "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbodyGET / HTTP/1.1\r\nHost: x\r\n\r\n";
        let http = Http::new(2);
        for cut in 0..=text.len() {
            let (mut position, mut kept, mut answers) = (Position::Between, Vec::new(), Vec::new());
            for part in [&text[..cut], &text[cut..]] {
                kept.extend_from_slice(part.as_bytes());
                loop {
                    let step = http.next(&mut position, &kept, false);
                    kept.drain(..step.used);
                    match step.answer {
                        Some(answer) => answers.push(answer),
                        None => break,
                    }
                }
            }
            assert_eq!((answers, kept.len()), (vec![Answer::Keep; 2], 0), "cut at {cut}");
        }
    }

    #[test]
    fn invalid_requests_get_their_status() {
        for text in [
            "nonsense\r\n\r\n",
            "GET / HTTP/3.0\r\n\r\n",
            "GET / HTTP/1.1\r\nNoHost: x\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: x\r\nhost: y\r\n\r\n",
            "GET / HTTP/1.0\r\nHost: x\r\nhost: y\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +1\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        ] {
            assert_eq!(answer(text), Some(Answer::BadRequest), "{text:?}");
        }
        let chunked = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(answer(chunked), Some(Answer::LengthRequired));
    }

    #[test]
    fn heads_end_at_16_kib_and_100_headers() {
        let head =
            |length: usize| format!("GET / HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "y".repeat(length - 32));
        assert_eq!(first(&head(16 * 1024)), Step { used: 16 * 1024, answer: Some(Answer::Keep) });
        assert_eq!(answer(&head(16 * 1024 + 1)), Some(Answer::HeaderTooLarge));
        let unended = head(16 * 1024 + 4);
        assert_eq!(answer(&unended[..16 * 1024]), None, "it may still end");
        assert_eq!(answer(&unended[..16 * 1024 + 1]), Some(Answer::HeaderTooLarge));
        let many = format!("GET / HTTP/1.1\r\nHost: x\r\n{}\r\n", "A: b\r\n".repeat(101));
        assert_eq!(answer(&many), Some(Answer::HeaderTooLarge));
    }

    #[test]
    fn expect_gets_100_before_the_body() {
        let http = Http::new(2);
        let head = "POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n";
        let mut position = Position::Between;
        let step = http.next(&mut position, head.as_bytes(), false);
        assert_eq!(step, Step { used: head.len(), answer: Some(Answer::Continue) });
        assert_eq!(http.next(&mut position, b"abc", false), Step { used: 3, answer: Some(Answer::Keep) });
        assert_eq!(answer(&format!("{head}abc")), Some(Answer::Keep), "it did not wait");
    }

    #[test]
    fn responses_have_a_content_length() {
        let http = Http::new(5);
        let text = |answer| String::from_utf8(http.bytes(answer).to_vec()).unwrap();
        assert!(text(Answer::Keep).ends_with("Content-Length: 5\r\n\r\nxxxxx"));
        assert!(text(Answer::HeadClose).ends_with("Content-Length: 5\r\nConnection: close\r\n\r\n"));
        assert!(text(Answer::KeepAlive).ends_with("Connection: keep-alive\r\n\r\nxxxxx"));
        assert!(text(Answer::HeadKeepAlive).ends_with("Connection: keep-alive\r\n\r\n"));
        for (answer, status) in
            [(Answer::BadRequest, "400"), (Answer::LengthRequired, "411"), (Answer::HeaderTooLarge, "431")]
        {
            assert!(text(answer).starts_with(&format!("HTTP/1.1 {status} ")) && answer.ends());
        }
    }
}
