use crate::workload::protocol::{ParseOutcome, ProtocolState};
use crate::workload::response::Response;

/// An HTTP/1.1 request.
#[derive(Clone, Debug)]
pub struct HttpRequest {
    /// The method, for example `GET`.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// The value of the Host header.
    pub authority: String,
    /// Additional headers: name and value.
    pub headers: Vec<(String, String)>,
    /// The request body.
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

    /// Returns whether the text can be the value of a header: it ends neither the header nor the request.
    pub fn is_value(text: &str) -> bool {
        !text.bytes().any(|byte| matches!(byte, b'\r' | b'\n' | 0))
    }

    /// Checks that method and headers are one line each.
    pub(crate) fn check(&self) -> Result<(), String> {
        if !HttpRequest::is_token(&self.method) {
            return Err(format!("invalid value {:?} for '--method': expected a name of HTTP", self.method));
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
            header("User-Agent", concat!("fourtuple/", env!("CARGO_PKG_VERSION")));
        }
        for (name, value) in &self.headers {
            header(name, value);
        }
        // Servers may demand the length of an empty body too where the method has a meaning for a body (RFC 9110, 8.6).
        let expects_body = ["POST", "PUT", "PATCH"].contains(&self.method.as_str());
        let has_length = has("content-length") || has("transfer-encoding");
        if (expects_body || !self.body.is_empty()) && !has_length {
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

/// The state of an HTTP/1.1 connection, without pipelining.
pub(super) struct Http {
    request: Vec<u8>,
    last_request: Vec<u8>,
    last: bool,
    head: bool,
    response: Response,
}

impl Http {
    pub(super) fn new(request: &HttpRequest) -> Self {
        Http {
            request: request.bytes(false),
            last_request: request.bytes(true),
            last: false,
            head: request.method == "HEAD",
            response: Response::new(false),
        }
    }
}

impl ProtocolState for Http {
    fn begin(&mut self, last: bool) {
        self.last = last;
        self.response = Response::new(self.head);
    }

    fn outgoing(&self) -> &[u8] {
        if self.last { &self.last_request } else { &self.request }
    }

    fn receive(&mut self, bytes: &[u8]) -> ParseOutcome {
        self.response.receive(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(
            text,
            "POST /a HTTP/1.1\r\nHost: h:1\r\nuser-agent: me\r\nX-A: b\r\nContent-Length: 3\r\n\r\nabc"
        );
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
}
