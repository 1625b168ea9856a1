//! A worker, which serves one request at a time, from its first byte to the last byte of the answer.

use std::hint;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple::listen::{Acceptor, Connection, ListenError};
use fourtuple_syscalls::resource::{self, monotonic_ns};
use fourtuple_syscalls::schedule;

use crate::pool::client::nanos;
use crate::pool::mix::Spend;
use crate::pool::wire;

/// Longest piece of work between two checks of the stop flag; longer work is split.
const NAP: Duration = Duration::from_millis(20);

/// Interval at which a worker without events checks the stop flag.
const GLANCE: Duration = Duration::from_millis(500);

/// The next step for a connection.
enum Next {
    Keep,
    Close,
}

/// Serves connections until told to stop; returns the CPU time that this thread has used.
pub(crate) fn serve(
    acceptor: &mut Acceptor,
    spend: Spend,
    stop: &AtomicBool,
) -> Result<Duration, ListenError> {
    // With the default timer slack each sleep takes up to 50 us longer than the service time; X-End reports the true end.
    let _ = schedule::sleep_precisely();
    let mut answer = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let Some(mut connection) = acceptor.next(Some(GLANCE))? else { continue };
        let begun_ns = monotonic_ns();
        match serve_one(&mut connection, acceptor.seat(), begun_ns, spend, stop, &mut answer) {
            Next::Keep => acceptor.keep(connection)?,
            Next::Close => drop(connection),
        }
    }
    Ok(resource::thread_cpu_time())
}

fn serve_one(
    connection: &mut Connection,
    seat: usize,
    begun_ns: u64,
    spend: Spend,
    stop: &AtomicBool,
    answer: &mut Vec<u8>,
) -> Next {
    let mut room = [0; 2048];
    let request = loop {
        // A client that sends anything but HTTP requests gets its connection closed.
        match wire::parse_request(&connection.carry) {
            Ok(Some(request)) => break request,
            Ok(None) => {}
            Err(_) => return Next::Close,
        }
        match connection.read(&mut room) {
            Ok(0) => return Next::Close,
            Ok(count) => connection.carry.extend_from_slice(&room[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Next::Keep,
            Err(_) => return Next::Close,
        }
    };
    connection.carry.drain(..request.length);
    work(request.work, spend, stop);
    let close = request.close || connection.is_last();
    answer.clear();
    // The end is recorded before the answer is written, so the time for the write counts as wait.
    wire::write_response(answer, seat, begun_ns, monotonic_ns(), close);
    if connection.write_all(answer).is_err() {
        return Next::Close;
    }
    connection.answered();
    if close { Next::Close } else { Next::Keep }
}

/// Spends the service time.
fn work(time: Duration, spend: Spend, stop: &AtomicBool) {
    if time.is_zero() {
        return;
    }
    let until = monotonic_ns().saturating_add(nanos(time));
    loop {
        let left = until.saturating_sub(monotonic_ns());
        if left == 0 || stop.load(Ordering::Relaxed) {
            return;
        }
        match spend {
            // A sleep may end early if io_uring notifies the thread; the loop then sleeps on.
            Spend::Sleep => thread::sleep(Duration::from_nanos(left).min(NAP)),
            Spend::Spin => hint::spin_loop(),
        }
    }
}
