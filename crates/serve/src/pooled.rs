//! A worker that waits as a policy of the library says, and serves one request at a time to its end.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;

use fourtuple::listen::{Acceptor, Connection, ListenError};
use fourtuple_syscalls::{errno_name, option, socket};

use crate::counts::Counts;
use crate::serve::Close;
use crate::stop::Stop;
use crate::talk::{Answer, Place, Talk};
use crate::work::Work;

/// Room for what one recv() brings.
const ROOM: usize = 64 * 1024;
/// Of what a client goes on sending after the server's last word so much is read, so that a RST does not take that word
/// away from it (RFC 9112, 9.6).
const DRAIN: u64 = 1024 * 1024;

/// In the mark of a connection whose last word is said; the rest of the mark is what it has said since.
const DRAINING: u64 = 1 << 62;

pub(crate) struct Pooled {
    acceptor: Acceptor,
    talk: Arc<Talk>,
    close: Close,
    work: Work,
    stop: Stop,
    counts: Arc<Counts>,
    room: Vec<u8>,
    accepted: u64,
}

/// What is next for a connection.
enum Next {
    Keep,
    Close,
}

impl Pooled {
    pub(crate) fn new(
        acceptor: Acceptor,
        talk: Arc<Talk>,
        close: Close,
        work: Work,
        stop: Stop,
        counts: Arc<Counts>,
    ) -> Pooled {
        Pooled { acceptor, talk, close, work, stop, counts, room: vec![0; ROOM], accepted: 0 }
    }

    /// Serves until it is told to stop.
    pub(crate) fn run(mut self) -> io::Result<()> {
        while !self.stop.is_set() {
            let next = self.acceptor.next(None).map_err(into_io)?;
            let accepted = self.acceptor.stats().accepts;
            self.counts.accepted.add(accepted - self.accepted);
            self.accepted = accepted;
            let Some(mut connection) = next else { continue };
            self.work.stall();
            if matches!(self.serve(&mut connection), Next::Keep) {
                self.acceptor.keep(connection).map_err(into_io)?;
            }
        }
        Ok(())
    }

    /// Reads what is there, and answers what is whole of it.
    fn serve(&mut self, connection: &mut Connection) -> Next {
        let count = match connection.read(&mut self.room) {
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
                self.counts.error(&errno_name(&error));
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
        bytes.extend_from_slice(&self.room[..count]);
        // There is nothing behind it.
        let whole = count < ROOM;
        match self.digest(connection, &bytes, whole) {
            Ok((used, next)) => {
                bytes.drain(..used);
                connection.carry = bytes;
                next
            }
            Err(error) => {
                self.counts.error(&errno_name(&error));
                Next::Close
            }
        }
    }

    /// Answers the requests that are whole: how many bytes are done with, and what is next. How far the next request was
    /// read travels with the connection, in its mark.
    fn digest(
        &mut self,
        connection: &mut Connection,
        bytes: &[u8],
        whole: bool,
    ) -> io::Result<(usize, Next)> {
        let (mut place, mut used) = (Place::from_mark(connection.mark), 0);
        while used < bytes.len() {
            let every = self.close.every().is_some_and(|every| u64::from(connection.served()) + 1 >= every);
            let step = self.talk.next(&mut place, &bytes[used..], every || connection.is_last());
            used += step.used;
            connection.mark = place.mark();
            let Some(answer) = step.answer else { break };
            if let Some(name) = answer.error() {
                self.counts.error(name);
            }
            if answer.is_response() {
                connection.answered();
                // Before the answer: whoever has it finds it counted.
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

    fn send(&self, connection: &mut Connection, answer: Answer) -> io::Result<()> {
        let bytes = self.talk.bytes(answer);
        connection.write_all(bytes)?;
        self.counts.sent_bytes.add(bytes.len() as u64);
        Ok(())
    }

    /// After the last word. `drained`: the client has said nothing that was not read.
    fn end(&self, connection: &mut Connection, drained: bool) -> Next {
        if let Close::Reset { every } = self.close
            && u64::from(connection.served()) >= every
        {
            if let Err(error) = option::set_reset_on_close(connection.as_fd()) {
                self.counts.error(&errno_name(&error));
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

/// The errno, for the name under which the end of a worker is counted.
fn into_io(error: ListenError) -> io::Error {
    match error {
        ListenError::Call { source, .. } => source,
        other => io::Error::other(other),
    }
}
