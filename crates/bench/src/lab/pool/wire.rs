//! Requests and answers as bytes: the part of HTTP/1.1 that external servers need.

use std::time::Duration;

use crate::http1::{self, BadLength};

/// Maximum size of a head that is read, in bytes; the lab's own heads have a tenth of this.
const MAX_HEAD_BYTES: usize = 8 * 1024;

/// Maximum number of headers in a head.
const MAX_HEADERS: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Requested service time.
    pub(crate) work: Duration,
    /// Whether the connection closes after the answer.
    pub(crate) close: bool,
    /// Length of the request in bytes.
    pub(crate) length: usize,
}

/// The worker that served a request, and its timestamps: CLOCK_MONOTONIC in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ServerTiming {
    /// X-Worker: a number; for the lab's own workers the seat.
    pub(crate) worker: Option<u64>,
    /// X-Begin: start of the service.
    pub(crate) begun_ns: Option<u64>,
    /// X-End: end of the service.
    pub(crate) ended_ns: Option<u64>,
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Response {
    /// The worker and times that the response names.
    pub(crate) timing: ServerTiming,
    /// Whether the server closes the connection.
    pub(crate) close: bool,
    /// Length of the answer in bytes; `None`: the answer ends when the server closes.
    pub(crate) length: Option<usize>,
}

/// A parse error: the reason in a few words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) &'static str);

/// Appends a request for `work` to `out`. `path` may already have a query.
pub(crate) fn write_request(out: &mut Vec<u8>, path: &str, host: &str, work: Duration, close: bool) {
    let joint = if path.contains('?') { '&' } else { '?' };
    let closing = if close { "Connection: close\r\n" } else { "" };
    let work = work.as_nanos();
    out.extend_from_slice(
        format!("GET {path}{joint}work={work} HTTP/1.1\r\nHost: {host}\r\n{closing}\r\n").as_bytes(),
    );
}

/// Parses the request at the start of `bytes`; returns `None` if more bytes are needed.
pub(crate) fn parse_request(bytes: &[u8]) -> Result<Option<Request>, Malformed> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let length = match request.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if bytes.len() <= MAX_HEAD_BYTES => return Ok(None),
        Ok(httparse::Status::Partial) => return Err(Malformed("a head that is too long")),
        Err(_) => return Err(Malformed("no HTTP")),
    };
    let path = request.path.unwrap_or_default();
    let work = path
        .split_once('?')
        .and_then(|(_, query)| query.split('&').find_map(|part| part.strip_prefix("work=")))
        .map_or(Ok(0), |text| text.parse().map_err(|_| Malformed("work that is not a number")))?;
    if http1::content_length(request.headers).map_err(refused)?.is_some_and(|length| length > 0)
        || http1::value(request.headers, "transfer-encoding").is_some()
    {
        return Err(Malformed("a request with a body"));
    }
    let close = http1::closes(request.headers, request.version);
    Ok(Some(Request { work: Duration::from_nanos(work), close, length }))
}

/// Appends an answer to `out`.
pub(crate) fn write_response(out: &mut Vec<u8>, worker: usize, begun_ns: u64, ended_ns: u64, close: bool) {
    let closing = if close { "Connection: close\r\n" } else { "" };
    out.extend_from_slice(
        format!(
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nX-Worker: {worker}\r\nX-Begin: {begun_ns}\r\nX-End: {ended_ns}\r\n\
             {closing}\r\nok\n"
        )
        .as_bytes(),
    );
}

/// Parses the head of the answer at the start of `bytes`; returns `None` if more bytes are needed.
pub(crate) fn parse_response(bytes: &[u8]) -> Result<Option<Response>, Malformed> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let head = match response.parse(bytes) {
        Ok(httparse::Status::Complete(head)) => head,
        Ok(httparse::Status::Partial) if bytes.len() <= MAX_HEAD_BYTES => return Ok(None),
        Ok(httparse::Status::Partial) => return Err(Malformed("a head that is too long")),
        Err(_) => return Err(Malformed("no HTTP")),
    };
    if response.code != Some(200) {
        return Err(Malformed("another status than 200"));
    }
    if http1::value(response.headers, "transfer-encoding").is_some() {
        return Err(Malformed("a chunked answer"));
    }
    let body = http1::content_length(response.headers).map_err(refused)?;
    let tell = |name| http1::value(response.headers, name).and_then(|text| text.parse().ok());
    Ok(Some(Response {
        timing: ServerTiming { worker: tell("x-worker"), begun_ns: tell("x-begin"), ended_ns: tell("x-end") },
        // Without a length, the end of the connection ends the answer (RFC 9112, 6.3).
        close: body.is_none() || http1::closes(response.headers, response.version),
        length: body.map(|body| head.saturating_add(usize::try_from(body).unwrap_or(usize::MAX))),
    }))
}

fn refused(length: BadLength) -> Malformed {
    Malformed(match length {
        BadLength::NotANumber => "a length that is not a number",
        BadLength::Different => "two different lengths",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: Duration = Duration::from_nanos(100_000);

    #[test]
    fn a_request_survives_writing_and_parsing_in_pieces() {
        for (path, close) in [("/", false), ("/", true), ("/a?b=c", true)] {
            let mut bytes = Vec::new();
            write_request(&mut bytes, path, "lab", WORK, close);
            for cut in 0..bytes.len() {
                assert_eq!(parse_request(&bytes[..cut]), Ok(None), "{cut} of {path}");
            }
            let length = bytes.len();
            bytes.extend_from_slice(b"GET /the/next");
            assert_eq!(parse_request(&bytes), Ok(Some(Request { work: WORK, close, length })));
        }
    }

    #[test]
    fn a_response_survives_writing_and_parsing_in_pieces() {
        for close in [false, true] {
            let mut bytes = Vec::new();
            write_response(&mut bytes, 3, 70, 90, close);
            let head = bytes.len() - 3;
            for cut in 0..head {
                assert_eq!(parse_response(&bytes[..cut]), Ok(None), "{cut}");
            }
            let timing = ServerTiming { worker: Some(3), begun_ns: Some(70), ended_ns: Some(90) };
            for cut in head..=bytes.len() {
                let whole = Response { timing, close, length: Some(bytes.len()) };
                assert_eq!(parse_response(&bytes[..cut]), Ok(Some(whole)));
            }
        }
    }

    #[test]
    fn answers_of_external_servers_are_parsed() {
        let plain = b"HTTP/1.1 200 OK\r\nServer: nginx\r\ncontent-length: 2\r\n\r\nok";
        let response = parse_response(plain).unwrap().unwrap();
        let whole = Response { timing: ServerTiming::default(), close: false, length: Some(plain.len()) };
        assert_eq!(response, whole);
        let listed = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: TE, close\r\n\r\nok";
        assert!(parse_response(listed).unwrap().unwrap().close);
        let old = b"HTTP/1.0 200 OK\r\n\r\nuntil the end";
        let response = parse_response(old).unwrap().unwrap();
        assert_eq!((response.close, response.length), (true, None));
        for (bytes, why) in [
            (&b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"[..], "another status than 200"),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "a chunked answer"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "a length that is not a number"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nok", "a length that is not a number"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", "two different lengths"),
            (b"SSH-2.0-OpenSSH\r\n", "no HTTP"),
        ] {
            assert_eq!(parse_response(bytes), Err(Malformed(why)));
        }
    }

    #[test]
    fn invalid_requests_have_a_reason() {
        let endless = [b"GET / HTTP/1.1\r\nX: ".to_vec(), vec![b'a'; MAX_HEAD_BYTES]].concat();
        for (bytes, why) in [
            (&b"\x16\x03\x01 hello\r\n\r\n"[..], "no HTTP"),
            (b"GET /?work=soon HTTP/1.1\r\n\r\n", "work that is not a number"),
            (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\n", "a request with a body"),
            (&endless, "a head that is too long"),
        ] {
            assert_eq!(parse_request(bytes), Err(Malformed(why)));
        }
        let idle = parse_request(b"GET / HTTP/1.1\r\n\r\n").unwrap().unwrap();
        assert_eq!((idle.work, idle.close), (Duration::ZERO, false));
    }
}
