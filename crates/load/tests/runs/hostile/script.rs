//! The script of a hostile peer, as data, and its log.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_syscalls::option;

use crate::run;

/// A step of a peer on one connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    /// Reads a request to the end of its head, and logs it.
    Read,
    Send(&'static str),
    /// Sends byte by byte, 50 ms apart.
    Drip(&'static str),
    /// Sends the same bytes repeatedly until the client closes.
    Flood(&'static str),
    /// Sends nothing for this many milliseconds.
    Wait(u64),
    /// Sends FIN, and reads on until the client closes.
    HalfClose,
    /// Sends RST.
    Reset,
}

/// Maximum length of a flood: a run that never ends then fails its test.
const MAX_FLOOD: Duration = Duration::from_secs(150);

/// The counts of a peer.
#[derive(Debug, Default)]
pub(crate) struct Log {
    connections: AtomicU64,
    requests: AtomicU64,
}

impl Log {
    pub(crate) fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}

/// Starts a peer that executes `script` on each connection and then closes it.
pub(crate) fn peer(script: &'static [Act]) -> (SocketAddr, Arc<Log>) {
    let log = Arc::new(Log::default());
    let counted = Arc::clone(&log);
    let address = run::answer(move |stream| {
        counted.connections.fetch_add(1, Ordering::Relaxed);
        script.iter().try_for_each(|act| play(*act, &stream, &counted))
    });
    (address, log)
}

fn play(act: Act, mut stream: &TcpStream, log: &Log) -> io::Result<()> {
    match act {
        Act::Read => {
            read_head(stream)?;
            log.requests.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
        Act::Send(text) => stream.write_all(text.as_bytes()),
        Act::Drip(text) => text.bytes().try_for_each(|byte| {
            thread::sleep(Duration::from_millis(50));
            stream.write_all(&[byte])
        }),
        Act::Flood(text) => {
            let (piece, begun) = (text.repeat(65_536 / text.len()), Instant::now());
            while begun.elapsed() < MAX_FLOOD {
                stream.write_all(piece.as_bytes())?;
            }
            Ok(())
        }
        Act::Wait(milliseconds) => {
            thread::sleep(Duration::from_millis(milliseconds));
            Ok(())
        }
        Act::HalfClose => {
            stream.shutdown(Shutdown::Write)?;
            stream.read_to_end(&mut Vec::new()).map(drop)
        }
        // The RST goes out when the connection is closed, at the end of the script.
        Act::Reset => option::set_reset_on_close(stream.as_fd()),
    }
}

/// Reads to the empty line; requests of these tests have no body, and are not pipelined.
fn read_head(mut stream: &TcpStream) -> io::Result<()> {
    let mut head = Vec::new();
    let mut room = [0; 2000];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut room)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => head.extend_from_slice(&room[..count]),
        }
    }
    Ok(())
}
