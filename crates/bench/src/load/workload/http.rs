use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;

use crate::http1::{self, BadLength};
use crate::load::workload::{ParseOutcome, ProtocolState, Status};

/// The value of the header User-Agent.
const AGENT: &str = concat!("fourtuple/", env!("CARGO_PKG_VERSION"));

/// A request of HTTP.
#[derive(Clone, Debug)]
pub struct HttpRequest {
    /// The method, for example `GET`.
    pub method: String,
    pub path: String,
    /// The value of the Host header.
    pub authority: String,
    /// Additional headers: name and value.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// The last request of a connection asks the server to close it (`Connection: close`).
    pub asks_to_close: bool,
}

impl HttpRequest {
    /// A request of which nothing is known yet.
    pub(super) const EMPTY: HttpRequest = HttpRequest {
        method: String::new(),
        path: String::new(),
        authority: String::new(),
        headers: Vec::new(),
        body: Vec::new(),
        asks_to_close: false,
    };

    /// Returns whether the text is a token (RFC 9110, section 5.6.2), as methods and names of headers are.
    pub fn is_token(text: &str) -> bool {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        !text.is_empty() && text.bytes().all(is_part)
    }

    /// Returns whether the text can be the path and query of a request.
    pub fn is_path(text: &str) -> bool {
        text.starts_with('/') && !text.contains(|c: char| c.is_control() || c == ' ')
    }

    /// Returns whether the text can be the value of a header: it ends neither the header nor the request.
    pub fn is_value(text: &str) -> bool {
        !text.bytes().any(|byte| matches!(byte, b'\r' | b'\n' | 0))
    }

    /// Checks that method and headers are one line each.
    pub(crate) fn check(&self) -> Result<(), String> {
        if !HttpRequest::is_token(&self.method) {
            return Err(format!("invalid value {:?} for '--method': expected a name of HTTP", self.method));
        }
        if !HttpRequest::is_path(&self.path) {
            return Err(format!(
                "invalid path {:?}: expected one that begins with / and has no blanks",
                self.path
            ));
        }
        let is_header =
            |(name, value): &&(String, String)| HttpRequest::is_token(name) && HttpRequest::is_value(value);
        match self.headers.iter().find(|header| !is_header(header)) {
            Some((name, value)) => Err(format!(
                "invalid value {:?} for '--header': expected 'Name: value' on one line",
                format!("{name}: {value}")
            )),
            None => Ok(()),
        }
    }

    /// Whether the method is idempotent (RFC 9110, 9.2.2).
    pub(super) fn is_idempotent(&self) -> bool {
        ["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"].contains(&self.method.as_str())
    }

    /// Returns the head of the request for HTTP/2, or the reason why it cannot be sent.
    pub(crate) fn for_http2(&self, with_tls: bool) -> Result<http::Request<()>, String> {
        let refuse = |error: http::Error| format!("this request cannot be sent over HTTP/2: {error}");
        let of_connection = ["connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"];
        let is_stray = |name: &str| of_connection.iter().any(|other| name.eq_ignore_ascii_case(other));
        if let Some((name, value)) = self.headers.iter().find(|(name, _)| is_stray(name)) {
            return Err(format!(
                "invalid value '{name}: {value}' for '--header': HTTP/2 has no header of the connection (RFC 9113, 8.2.2)"
            ));
        } else if self.method == "CONNECT" {
            return Err("invalid value 'CONNECT' for '--method': expected another with --http2".to_owned());
        }
        let given = |wanted: &str| self.headers.iter().find(|(name, _)| name.eq_ignore_ascii_case(wanted));
        let authority = given("host").map_or(&self.authority, |(_, value)| value);
        let uri = http::Uri::builder()
            .scheme(if with_tls { "https" } else { "http" })
            .authority(authority.as_str())
            .path_and_query(self.path.as_str())
            .build()
            .map_err(refuse)?;
        let mut request = http::Request::builder().method(self.method.as_str()).uri(uri);
        if given("user-agent").is_none() {
            request = request.header("user-agent", AGENT);
        }
        for (name, value) in self.headers.iter().filter(|(name, _)| !name.eq_ignore_ascii_case("host")) {
            request = request.header(name, value);
        }
        if self.says_length() && given("content-length").is_none() {
            request = request.header("content-length", self.body.len());
        }
        request.body(()).map_err(refuse)
    }

    /// Servers may demand the length of an empty body too where the method has a meaning for a body (RFC 9110, 8.6).
    fn says_length(&self) -> bool {
        !self.body.is_empty() || ["POST", "PUT", "PATCH"].contains(&self.method.as_str())
    }

    fn bytes(&self, last: bool) -> Vec<u8> {
        let mut text = format!("{} {} HTTP/1.1\r\n", self.method, self.path);
        let has = |name: &str| self.headers.iter().any(|(given, _)| given.eq_ignore_ascii_case(name));
        let mut header = |name: &str, value: &str| {
            text.push_str(name);
            text.push_str(": ");
            text.push_str(value);
            text.push_str("\r\n");
        };
        if !has("host") {
            header("Host", &self.authority);
        }
        if !has("user-agent") {
            header("User-Agent", AGENT);
        }
        for (name, value) in &self.headers {
            header(name, value);
        }
        let has_length = has("content-length") || has("transfer-encoding");
        if self.says_length() && !has_length {
            header("Content-Length", &self.body.len().to_string());
        }
        if last && self.asks_to_close && !has("connection") {
            header("Connection", "close");
        }
        text.push_str("\r\n");
        let mut bytes = text.into_bytes();
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

/// The order in which the requests of a list are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// One after another, over all connections, and again from the first.
    Turn,
    /// At random, by the seed of the run.
    Random,
}

/// The requests of a run that sends more than one.
#[derive(Clone, Debug)]
pub struct RequestList {
    /// Name of the file that they are from.
    pub file: String,
    /// The requests, at least one.
    pub requests: Vec<HttpRequest>,
    pub order: Order,
}

/// A request as bytes.
struct Encoded {
    bytes: Vec<u8>,
    /// As the last request of its connection, if that differs.
    last: Option<Vec<u8>>,
    is_head: bool,
    is_idempotent: bool,
}

/// The requests that all connections of a run share.
pub(crate) struct Requests {
    all: Vec<Encoded>,
    order: Order,
    seed: u64,
    next: AtomicU64,
}

impl Requests {
    pub(crate) fn new(requests: &[HttpRequest], order: Order, seed: u64) -> Self {
        let encode = |request: &HttpRequest| Encoded {
            bytes: request.bytes(false),
            last: request.asks_to_close.then(|| request.bytes(true)),
            is_head: request.method == "HEAD",
            is_idempotent: request.is_idempotent(),
        };
        Requests { all: requests.iter().map(encode).collect(), order, seed, next: AtomicU64::new(0) }
    }

    /// Returns the number of the next request.
    fn take(&self) -> usize {
        if self.all.len() == 1 {
            return 0;
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        match self.order {
            Order::Turn => (number % self.all.len() as u64) as usize,
            // A generator for each number: the choices are the same for any number of threads.
            Order::Random => {
                let seed = self.seed ^ (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                Rng::with_seed(seed).usize(..self.all.len())
            }
        }
    }
}

/// The state of an HTTP/1.1 connection, without pipelining.
pub(super) struct Http {
    requests: Arc<Requests>,
    current: usize,
    /// The next request is the current one again.
    repeats: bool,
    last: bool,
    response: Response,
}

impl Http {
    pub(super) fn new(requests: Arc<Requests>) -> Self {
        Http { requests, current: 0, repeats: false, last: false, response: Response::new(false) }
    }

    fn request(&self) -> &Encoded {
        &self.requests.all[self.current]
    }
}

impl ProtocolState for Http {
    fn begin(&mut self, last: bool) {
        if !std::mem::take(&mut self.repeats) {
            self.current = self.requests.take();
        }
        self.last = last;
        self.response = Response::new(self.request().is_head);
    }

    fn repeat(&mut self) {
        self.repeats = true;
    }

    fn current(&self) -> usize {
        self.current
    }

    fn may_be_sent_again(&self) -> bool {
        self.request().is_idempotent
    }

    fn outgoing(&self) -> &[u8] {
        let Encoded { bytes, last, .. } = self.request();
        last.as_ref().filter(|_| self.last).unwrap_or(bytes)
    }

    fn receive(&mut self, bytes: &[u8]) -> ParseOutcome {
        self.response.receive(bytes)
    }
}

/// Maximum number of headers of a response.
const MAX_HEADERS: usize = 64;

/// Maximum length of the status line and the headers, in bytes.
const MAX_HEAD_BYTES: usize = 64 * 1024;

/// Maximum length of a Location that is kept.
const MAX_LOCATION: usize = 200;

/// Why bytes after a response are malformed: `load` has sent no further request.
pub(super) const EXCESS: &str = "bytes after the end of the response";

/// A parser of one HTTP/1.1 response (RFC 9112).
pub(super) struct Response {
    /// The request was HEAD: the response has no body, even if its headers say so.
    to_head: bool,
    /// At least one byte has arrived.
    begun: bool,
    /// The beginning of a head whose end has not arrived.
    head: Vec<u8>,
    body: Body,
    closing: bool,
    status: Option<Status>,
}

enum Body {
    /// The head is not complete.
    Unknown,
    Length(u64),
    Chunked(Chunked),
    /// The body ends when the connection is closed.
    Rest,
}

/// The contents of the status line and the headers.
struct Head {
    length: usize,
    status: u16,
    content_length: Option<u64>,
    chunked: bool,
    closing: bool,
    location: Option<String>,
}

impl Response {
    pub(super) fn new(to_head: bool) -> Self {
        Response {
            to_head,
            begun: false,
            head: Vec::new(),
            body: Body::Unknown,
            closing: false,
            status: None,
        }
    }

    pub(super) fn receive(&mut self, bytes: &[u8]) -> ParseOutcome {
        if bytes.is_empty() {
            return match self.body {
                Body::Rest => self.answer(),
                _ if self.begun => ParseOutcome::CLOSED_EARLY,
                _ => ParseOutcome::ClosedUnanswered,
            };
        }
        self.begun = true;
        if !matches!(self.body, Body::Unknown) {
            return self.body(bytes);
        }
        // Nearly always the first bytes contain the whole head: then nothing is copied.
        if self.head.is_empty() {
            return self.begin(bytes);
        }
        let mut all = std::mem::take(&mut self.head);
        all.extend_from_slice(bytes);
        self.begin(&all)
    }

    fn begin(&mut self, bytes: &[u8]) -> ParseOutcome {
        let mut rest = bytes;
        loop {
            // The parser never sees more than the longest head: the outcome must not depend on how many bytes have arrived.
            let head = match parse(&rest[..rest.len().min(MAX_HEAD_BYTES)]) {
                Err(why) => return ParseOutcome::malformed(why, rest),
                Ok(None) if rest.len() > MAX_HEAD_BYTES => {
                    return ParseOutcome::malformed("a head of more than 64 KiB", rest);
                }
                Ok(None) => {
                    self.head = rest.to_vec();
                    return ParseOutcome::NeedMore;
                }
                Ok(Some(head)) => head,
            };
            let (text, body) = rest.split_at(head.length);
            // 1xx is an interim response, except 101: the client did not ask for another protocol. A status code is at least
            // 100 (RFC 9110, 15).
            if head.status == 101 || head.status < 100 {
                return ParseOutcome::malformed("a status without a request for it", text);
            } else if head.status < 200 {
                rest = body;
                continue;
            }
            self.closing = head.closing;
            self.status = Some(Status { code: head.status, location: head.location });
            self.body = if self.to_head || matches!(head.status, 204 | 304) {
                Body::Length(0)
            } else if head.chunked {
                Body::Chunked(Chunked::new())
            } else {
                head.content_length.map_or(Body::Rest, Body::Length)
            };
            return self.body(body);
        }
    }

    fn body(&mut self, bytes: &[u8]) -> ParseOutcome {
        match &mut self.body {
            Body::Unknown => unreachable!("the head comes first"),
            Body::Rest => ParseOutcome::NeedMore,
            Body::Length(missing) => match missing.checked_sub(bytes.len() as u64) {
                Some(0) => self.answer(),
                Some(rest) => {
                    *missing = rest;
                    ParseOutcome::NeedMore
                }
                None => ParseOutcome::malformed(EXCESS, &bytes[*missing as usize..]),
            },
            Body::Chunked(chunked) => match chunked.receive(bytes) {
                Progress::More => ParseOutcome::NeedMore,
                Progress::Whole => self.answer(),
                Progress::Malformed => ParseOutcome::malformed("not a chunk", chunked.wrong_line()),
            },
        }
    }

    fn answer(&mut self) -> ParseOutcome {
        ParseOutcome::Complete {
            closing: self.closing || matches!(self.body, Body::Rest),
            status: self.status.take(),
        }
    }
}

/// Parses the head at the beginning of `bytes`; `None` if it is not complete.
///
/// # Errors
///
/// The reason why it is not a head of HTTP.
fn parse(bytes: &[u8]) -> Result<Option<Head>, &'static str> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let length = match response.parse(bytes).map_err(why)? {
        httparse::Status::Partial => return Ok(None),
        httparse::Status::Complete(length) => length,
    };
    let headers = &*response.headers;
    let status = response.code.ok_or(NOT_HTTP)?;
    let location = http1::named(headers, "location").next().filter(|_| (300..400).contains(&status));
    Ok(Some(Head {
        length,
        status,
        content_length: http1::content_length(headers).map_err(|length| match length {
            BadLength::NotANumber => "a Content-Length that is not a number",
            BadLength::Different => "two different values of Content-Length",
        })?,
        chunked: http1::lists(headers, "transfer-encoding", "chunked"),
        closing: http1::closes(headers, response.version),
        location: location.map(|location| {
            location.value[..location.value.len().min(MAX_LOCATION)].escape_ascii().to_string()
        }),
    }))
}

const NOT_HTTP: &str = "not a status line of HTTP/1";

fn why(error: httparse::Error) -> &'static str {
    match error {
        httparse::Error::TooManyHeaders => "more than 64 header fields",
        httparse::Error::HeaderName | httparse::Error::HeaderValue => "not a header field of HTTP/1",
        _ => NOT_HTTP,
    }
}

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
    fn wrong_line(&self) -> &[u8] {
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
    use crate::load::workload::Failure;

    #[test]
    fn a_request_has_each_given_header_once() {
        let request = HttpRequest {
            method: "POST".into(),
            path: "/a".into(),
            authority: "h:1".into(),
            headers: vec![("user-agent".into(), "me".into()), ("X-A".into(), "b".into())],
            body: b"abc".to_vec(),
            asks_to_close: true,
        };
        let text = String::from_utf8(request.bytes(false)).unwrap();
        let head = "POST /a HTTP/1.1\r\nHost: h:1\r\nuser-agent: me\r\nX-A: b\r\nContent-Length: 3\r\n\r\n";
        assert_eq!(text, format!("{head}abc"));
        for (method, expected) in
            [("POST", true), ("PUT", true), ("PATCH", true), ("GET", false), ("DELETE", false)]
        {
            let request = HttpRequest { method: method.into(), body: Vec::new(), ..request.clone() };
            let text = String::from_utf8(request.bytes(false)).unwrap();
            assert_eq!(text.ends_with("X-A: b\r\nContent-Length: 0\r\n\r\n"), expected, "{text}");
        }
        let last = String::from_utf8(request.bytes(true)).unwrap();
        assert!(last.contains("\r\nConnection: close\r\n\r\nabc"), "{last}");
    }

    /// Returns the outcome at the end, which must not depend on the pieces in which the bytes arrive.
    fn parse_in_pieces(text: &str, ends: bool) -> ParseOutcome {
        let whole = in_pieces(text, ends, text.len());
        for piece in 1..text.len().min(40) {
            assert_eq!(in_pieces(text, ends, piece), whole, "in pieces of {piece}: {text:?}");
        }
        whole
    }

    fn in_pieces(text: &str, ends: bool, piece: usize) -> ParseOutcome {
        let mut response = Response::new(false);
        let mut outcome = ParseOutcome::NeedMore;
        for bytes in text.as_bytes().chunks(piece) {
            assert_eq!(outcome, ParseOutcome::NeedMore, "{text:?}");
            outcome = response.receive(bytes);
            if let ParseOutcome::Failed(failure) = outcome {
                // The bytes that it quotes depend on the pieces.
                return ParseOutcome::Failed(Failure { detail: None, ..failure });
            }
        }
        if ends { response.receive(b"") } else { outcome }
    }

    fn answer(closing: bool, code: u16) -> ParseOutcome {
        ParseOutcome::Complete { closing, status: Some(Status { code, location: None }) }
    }

    /// Returns the detail of a malformed response, which arrives in one piece.
    fn detail(text: &str) -> String {
        match Response::new(false).receive(text.as_bytes()) {
            ParseOutcome::Failed(Failure { name, detail: Some(detail) }) if name == "malformed" => detail,
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn responses_end_at_their_declared_length() {
        for (rest, closing, code) in [
            ("1 200 OK\r\nContent-Length: 2\r\n\r\nok", false, 200),
            ("1 200 OK\r\nContent-Length: 0\r\nConnection: Close\r\n\r\n", true, 200),
            ("1 204 No Content\r\n\r\n", false, 204),
            ("0 200 OK\r\nContent-Length: 1\r\n\r\nx", true, 200),
            ("0 200 OK\r\nContent-Length: 1\r\nConnection: keep-alive\r\n\r\nx", false, 200),
            ("1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", false, 200),
            ("1 503 Busy\r\nContent-Length: 1\r\n\r\nx", false, 503),
            ("1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", false, 200),
        ] {
            let text = format!("HTTP/1.{rest}");
            assert_eq!(parse_in_pieces(&text, false), answer(closing, code), "{text:?}");
        }
        assert_eq!(parse_in_pieces("HTTP/1.1 200 OK\r\n\r\nuntil the end", true), answer(true, 200));
    }

    #[test]
    fn malformed_and_truncated_responses_are_errors() {
        for text in [
            "SSH-2.0-OpenSSH_9.2\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            "HTTP/1.1 101 Switching Protocols\r\n\r\n",
            "HTTP/1.1 000 None\r\nContent-Length: 0\r\n\r\n",
            "HTTP/1.1 099 None\r\nContent-Length: 0\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxy",
        ] {
            assert!(in_pieces(text, false, text.len()).is_malformed(), "{text:?}");
        }
        for text in ["HTTP/1.1 200 OK\r\nContent-Le", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nx"] {
            assert_eq!(parse_in_pieces(text, true), ParseOutcome::CLOSED_EARLY, "{text:?}");
        }
        assert_eq!(Response::new(false).receive(b""), ParseOutcome::ClosedUnanswered);
        assert_eq!(parse_in_pieces("HTTP/1.1 100 Continue\r\n\r\n", true), ParseOutcome::CLOSED_EARLY);
        let endless = format!("HTTP/1.1 200 OK\r\nX: {}", "x".repeat(MAX_HEAD_BYTES));
        assert!(in_pieces(&endless, false, 9999).is_malformed());
    }

    #[test]
    fn a_malformed_response_is_quoted() {
        let (ok, two) = ("HTTP/1.1 200 OK\r\n", "Content-Length: 1\r\nContent-Length: 2\r\n\r\n");
        for (text, expected) in [
            ("SSH-2.0-OpenSSH_9.2\r\n", "not a status line of HTTP/1: \"SSH-2.0-OpenSSH_9.2\\r\\n\""),
            ("\u{1b}[2J\u{e9}\r\n", "not a status line of HTTP/1: \"\\x1b[2J\\xc3\\xa9\\r\\n\""),
            (&format!("{ok}Content-Length: 2\r\n\r\nokXX"), "bytes after the end of the response: \"XX\""),
            (&format!("{ok}Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\nzz\r\n"), "not a chunk: \"zz\""),
            (&format!("{ok}X : a\r\n\r\n"), "not a header field of HTTP/1: "),
            (&format!("{ok}{two}"), "two different values of Content-Length: "),
        ] {
            assert!(detail(text).starts_with(expected), "{}", detail(text));
        }
        assert!(detail(&"x".repeat(1000)).ends_with("x\"..."), "the quotation is bounded");
        for value in ["+2", "-2", "0x2", "2, 2", "", "99999999999999999999"] {
            let detail = detail(&format!("{ok}Content-Length: {value}\r\n\r\nok"));
            let expected = "a Content-Length that is not a number: \"HTTP/1.1 200 OK";
            assert!(detail.starts_with(expected), "{detail}");
        }
    }

    #[test]
    fn a_redirection_has_its_location() {
        let location = |text: &str| match Response::new(false).receive(text.as_bytes()) {
            ParseOutcome::Complete { status: Some(Status { code, location }), .. } => (code, location),
            other => panic!("{other:?}"),
        };
        let head = "Content-Length: 0\r\nLocation: /a\u{e9}\r\n\r\n";
        assert_eq!(location(&format!("HTTP/1.1 301 Moved\r\n{head}")), (301, Some("/a\\xc3\\xa9".into())));
        assert_eq!(location(&format!("HTTP/1.1 201 Created\r\n{head}")), (201, None));
    }
}

#[cfg(test)]
mod chunked_tests {
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
