//! A worker that waits with an accept policy of the library, and serves one request at a time.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use fourtuple::listen::{Acceptor, Connection, ListenError, SeatStats};
use fourtuple_syscalls::{errno_name, option, socket};

use crate::serve::Close;
use crate::serve::decoder::{Answer, Decoder, Position};
use crate::serve::running::{Counts, Stop};
use crate::serve::service::Work;

/// Size of the receive buffer, in bytes.
const BUFFER: usize = 64 * 1024;
/// Maximum number of bytes read and discarded after the last response. Closing with unread data would send a RST, which can
/// make the client lose the response (RFC 9112, 9.6).
const DRAIN: u64 = 1024 * 1024;

/// Maximum wait for a connection: an idle worker updates its counts this often.
const LOOK: Duration = Duration::from_millis(500);

/// Bit of the mark of a connection that is draining; the other bits are the number of bytes discarded so far.
const DRAINING: u64 = 1 << 62;

pub(crate) struct PolicyWorker {
    acceptor: Acceptor,
    decoder: Arc<dyn Decoder>,
    close: Close,
    work: Work,
    stop: Stop,
    counts: Arc<Counts>,
    buffer: Vec<u8>,
    /// The counts of the library at the last update.
    seen: SeatStats,
}

/// The next action on a connection.
enum Next {
    Keep,
    Close,
}

impl PolicyWorker {
    pub(crate) fn new(
        acceptor: Acceptor,
        decoder: Arc<dyn Decoder>,
        close: Close,
        work: Work,
        stop: Stop,
        counts: Arc<Counts>,
    ) -> PolicyWorker {
        PolicyWorker {
            acceptor,
            decoder,
            close,
            work,
            stop,
            counts,
            buffer: vec![0; BUFFER],
            seen: SeatStats::default(),
        }
    }

    /// Serves until the stop flag is set.
    pub(crate) fn run(mut self) -> io::Result<()> {
        while !self.stop.is_set() {
            // With a timeout: while no descriptor is free, next() has no connection to return.
            let next = self.acceptor.next(Some(LOOK)).map_err(into_io)?;
            self.count();
            let Some(mut connection) = next else { continue };
            self.work.stall();
            if matches!(self.serve(&mut connection), Next::Keep) {
                self.acceptor.keep(connection).map_err(into_io)?;
            }
        }
        self.count();
        Ok(())
    }

    /// Adds what the library has counted for this worker since the last update.
    fn count(&mut self) {
        let now = self.acceptor.stats();
        self.counts.accepted.add(now.accepts - self.seen.accepts);
        for (name, count) in failures(&now, &self.seen) {
            self.counts.errors(name, count);
        }
        self.seen = now;
    }

    /// Calls read() once and answers the complete requests.
    fn serve(&mut self, connection: &mut Connection) -> Next {
        let count = match connection.read(&mut self.buffer) {
            Ok(0) => {
                if connection.mark & DRAINING == 0 && (connection.mark != 0 || !connection.carry.is_empty()) {
                    self.counts.error("request-cut");
                }
                return Next::Close;
            }
            Ok(count) => count,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Next::Keep;
            }
            Err(error) => {
                self.counts.error(&errno_name(&error).to_string());
                return Next::Close;
            }
        };
        self.counts.received_bytes.add(count as u64);
        if connection.mark & DRAINING != 0 {
            let drained = (connection.mark & !DRAINING) + count as u64;
            connection.mark = DRAINING | drained;
            return if drained > DRAIN { Next::Close } else { Next::Keep };
        }
        let mut bytes = std::mem::take(&mut connection.carry);
        bytes.extend_from_slice(&self.buffer[..count]);
        // A short read: no more bytes are waiting.
        let whole = count < BUFFER;
        match self.decode_requests(connection, &bytes, whole) {
            Ok((used, next)) => {
                bytes.drain(..used);
                connection.carry = bytes;
                next
            }
            // The write limit of the group: the client does not read.
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                self.counts.error("unread-response");
                Next::Close
            }
            Err(error) => {
                self.counts.error(&errno_name(&error).to_string());
                Next::Close
            }
        }
    }

    /// Answers the complete requests in `bytes`. Returns the number of bytes used and the next action. The position in an
    /// incomplete request is kept in the mark of the connection.
    fn decode_requests(
        &mut self,
        connection: &mut Connection,
        bytes: &[u8],
        whole: bool,
    ) -> io::Result<(usize, Next)> {
        let (mut position, mut used) = (Position::from_mark(connection.mark), 0);
        while used < bytes.len() {
            let every = self.close.every().is_some_and(|every| u64::from(connection.served()) + 1 >= every);
            let step = self.decoder.next(&mut position, &bytes[used..], every || connection.should_close());
            used += step.used;
            connection.mark = position.mark();
            let Some(answer) = step.answer else { break };
            if let Some(name) = answer.error() {
                self.counts.error(name);
            }
            if answer.is_response() {
                connection.response_sent();
                // Counted before it is sent: a client that has the response finds the request counted.
                self.counts.requests.add(1);
                self.work.serve();
            }
            self.send(connection, answer)?;
            if answer.ends() {
                let drained = whole && used == bytes.len() && answer.is_response();
                return Ok((bytes.len(), self.end(connection, drained)));
            }
        }
        Ok((used, Next::Keep))
    }

    /// Sends an answer, and counts its bytes as the kernel takes them: the client gets the part before an error too.
    fn send(&self, connection: &mut Connection, answer: Answer) -> io::Result<()> {
        let mut bytes = self.decoder.bytes(answer);
        while !bytes.is_empty() {
            let sent = connection.write(bytes)?;
            self.counts.sent_bytes.add(sent as u64);
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Ends a connection after its last response. `drained`: no received bytes are unread.
    fn end(&self, connection: &mut Connection, drained: bool) -> Next {
        if let Close::Reset { every } = self.close
            && u64::from(connection.served()) >= every
        {
            if let Err(error) = option::set_reset_on_close(connection.as_fd()) {
                self.counts.error(&errno_name(&error).to_string());
            }
            return Next::Close;
        }
        if drained || socket::shutdown_write(connection.as_fd()).is_err() {
            return Next::Close;
        }
        connection.mark = DRAINING;
        Next::Keep
    }
}

/// Returns the failures since `before`, by name.
fn failures(now: &SeatStats, before: &SeatStats) -> [(&'static str, u64); 6] {
    [
        ("accept: EMFILE", now.out_of_process_descriptors - before.out_of_process_descriptors),
        ("accept: ENFILE", now.out_of_host_descriptors - before.out_of_host_descriptors),
        ("accept: ENOMEM", now.out_of_memory - before.out_of_memory),
        ("accept: other", now.other_failed_accepts - before.other_failed_accepts),
        ("epoll_ctl: ENOSPC", now.unwatched - before.unwatched),
        ("idle-closed", now.idle_closed - before.idle_closed),
    ]
}

/// Converts to an error with an errno, which names the reason why a worker or the dispatcher ended.
pub(crate) fn into_io(error: ListenError) -> io::Error {
    match error {
        ListenError::Call { error, .. } => error,
        other => io::Error::other(other),
    }
}
