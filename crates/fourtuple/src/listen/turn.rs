//! One request of a connection that returns to its group after the response.
//!
//! hyper reads from a connection until its end. So that an idle worker gets the next request, the stream reports an end of file
//! between two requests. hyper then drops the stream, and the socket returns to the epoll that all workers share. This is correct only
//! when hyper has neither bytes of the next request in its buffer nor bytes of the response: the stream therefore compares the
//! bytes that it has returned with the length of the request, and waits until the response is flushed.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// No request has begun.
const NEW: u8 = 0;
/// A request is in progress.
#[cfg(feature = "axum")]
const OPEN: u8 = 1;
/// The body of the response has been produced.
const ANSWERED: u8 = 2;
/// The connection stays with its worker.
#[cfg(feature = "axum")]
const STAYS: u8 = 3;

/// The request of a connection, as its service sees it.
#[derive(Debug, Default)]
pub(super) struct Turn {
    state: AtomicU8,
    /// Length of the body of the request.
    body: AtomicU64,
}

impl Turn {
    fn is_answered(&self) -> bool {
        self.state.load(Ordering::Acquire) == ANSWERED
    }

    fn change(&self, from: u8, to: u8) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

#[cfg(feature = "axum")]
impl Turn {
    /// A request has begun. `body` is the length of its body; `None`: the length is unknown, and the connection stays.
    pub(super) fn begin(&self, body: Option<u64>) {
        self.body.store(body.unwrap_or(0), Ordering::Relaxed);
        // A second request begins before the first has been answered and returned: it was pipelined.
        if body.is_none() || !self.change(NEW, OPEN) {
            self.stay();
        }
    }

    /// The service has produced the whole response.
    pub(super) fn answer(&self) {
        self.change(OPEN, ANSWERED);
    }

    /// The connection stays with its worker.
    pub(super) fn stay(&self) {
        self.state.store(STAYS, Ordering::Release);
    }
}

/// The bytes of a connection, as its stream sees them.
#[derive(Debug, Default)]
pub(super) struct TurnBytes {
    /// Bytes read since the last request was answered.
    read: u64,
    head: Head,
    /// Whether bytes were written and not flushed since.
    unflushed: bool,
    /// Whether the stream has reported the end of file that ends it for hyper only.
    pub(super) has_ended: bool,
}

/// The end of the head of a request: the first empty line. Lines end with CR LF; a head with other line ends never ends, nor does one
/// that begins with an empty line, which HTTP servers skip.
#[derive(Debug, Default)]
struct Head {
    /// Matched bytes of CR LF CR LF.
    matched: u8,
    length: Option<u64>,
    is_unknown: bool,
}

impl Head {
    fn read(&mut self, before: u64, bytes: &[u8]) {
        if self.length.is_some() || self.is_unknown {
            return;
        }
        for (at, byte) in (before + 1..).zip(bytes) {
            self.matched = match (byte, self.matched) {
                (b'\r', 0) if at > 1 => 1,
                (b'\n', 1) => 2,
                (b'\r', 2) => 3,
                (b'\n', 3) => 4,
                (b'\r' | b'\n', _) => {
                    self.is_unknown = true;
                    return;
                }
                _ => 0,
            };
            if self.matched == 4 {
                self.length = Some(at);
                return;
            }
        }
    }
}

impl TurnBytes {
    /// Notes bytes that the stream returns to hyper.
    pub(super) fn read(&mut self, turn: &Turn, bytes: &[u8]) {
        if self.is_whole(turn) && turn.change(ANSWERED, NEW) {
            (self.read, self.head) = (0, Head::default());
        }
        self.head.read(self.read, bytes);
        self.read += bytes.len() as u64;
    }

    pub(super) fn wrote(&mut self) {
        self.unflushed = true;
    }

    /// Notes that everything is flushed. Returns whether hyper has to read again, to find the end of file.
    pub(super) fn flushed(&mut self, turn: &Turn) -> bool {
        std::mem::take(&mut self.unflushed) && self.is_whole(turn)
    }

    /// Returns whether the connection can return to its group now.
    pub(super) fn is_over(&self, turn: &Turn) -> bool {
        !self.unflushed && self.is_whole(turn)
    }

    /// Returns whether exactly the answered request was read.
    fn is_whole(&self, turn: &Turn) -> bool {
        let body = turn.body.load(Ordering::Relaxed);
        turn.is_answered() && self.head.length.and_then(|head| head.checked_add(body)) == Some(self.read)
    }
}

#[cfg(all(test, feature = "axum"))]
mod tests {
    use super::*;

    /// Returns whether the connection returns after a request with these reads and this length of its body was answered.
    fn returns(reads: &[&[u8]], body: Option<u64>) -> bool {
        let (turn, mut bytes) = (Turn::default(), TurnBytes::default());
        reads.iter().for_each(|read| bytes.read(&turn, read));
        turn.begin(body);
        assert!(!bytes.is_over(&turn));
        turn.answer();
        bytes.wrote();
        assert!(!bytes.is_over(&turn), "the response is not flushed");
        assert_eq!(bytes.flushed(&turn), bytes.is_over(&turn));
        bytes.is_over(&turn)
    }

    #[test]
    fn a_whole_request_returns_its_connection() {
        assert!(returns(&[b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"], Some(0)));
        assert!(returns(&[b"GET / HTTP/1.1\r\nhost: x\r", b"\n\r", b"\n"], Some(0)));
        assert!(returns(&[b"POST / HTTP/1.1\r\n\r\nab", b"\r\n\r\n"], Some(6)));
    }

    #[test]
    fn a_connection_with_other_bytes_stays() {
        for (reads, body) in [
            (b"GET / HTTP/1.1\r\n\r\nG".as_slice(), Some(0)),
            (b"POST / HTTP/1.1\r\n\r\nab", Some(3)),
            (b"POST / HTTP/1.1\r\n\r\nab", Some(u64::MAX)),
            (b"POST / HTTP/1.1\r\n\r\n0\r\n\r\n", None),
            (b"GET / HTTP/1.1\n\n", Some(0)),
            (b"GET / HTTP/1.1\r\nhost: x\n\r\n", Some(0)),
            (b"\r\nGET / HTTP/1.1\r\n\r\n", Some(0)),
            (b"\r\n\r\nGET / HTTP/1.1\r\n\r\n", Some(18)),
        ] {
            assert!(!returns(&[reads], body), "{:?}", String::from_utf8_lossy(reads));
        }
    }

    #[test]
    fn a_pipelined_request_keeps_the_connection() {
        let (turn, mut bytes) = (Turn::default(), TurnBytes::default());
        let request = b"GET / HTTP/1.1\r\n\r\n";
        bytes.read(&turn, &request.repeat(2));
        for _ in 0..2 {
            turn.begin(Some(0));
            turn.answer();
            assert!(!bytes.is_over(&turn));
        }
    }

    #[test]
    fn a_request_at_once_after_the_response_is_a_new_one() {
        let (turn, mut bytes) = (Turn::default(), TurnBytes::default());
        for _ in 0..3 {
            bytes.read(&turn, b"GET / HTTP/1.1\r\n\r\n");
            turn.begin(Some(0));
            turn.answer();
            assert!(bytes.is_over(&turn));
        }
    }
}
