//! A worker: one request at a time, from its first byte to the last of the answer.

use std::hint;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple::listen::{Acceptor, Connection, ListenError};
use fourtuple_syscalls::resource::{self, monotonic_ns};
use fourtuple_syscalls::schedule;

use super::client::nanos;
use super::mix::Spend;
use super::wire;

/// Longer work is cut into pieces of this length, between which the worker looks whether it is to stop.
const NAP: Duration = Duration::from_millis(20);

/// A worker that nobody wakes looks so often whether it is to stop.
const GLANCE: Duration = Duration::from_millis(500);

/// What becomes of a connection.
enum Next {
    Keep,
    Close,
}

/// Serves until told to stop, and gives the CPU time that this thread has used.
pub(crate) fn serve(
    acceptor: &mut Acceptor,
    spend: Spend,
    stop: &AtomicBool,
) -> Result<Duration, ListenError> {
    // Without it each sleep is up to 50 us longer than the service time; who cannot have it tells in X-End.
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
    let asked = loop {
        // Whoever sends something else than requests is left to the closing.
        match wire::read_request(&connection.carry) {
            Ok(Some(asked)) => break asked,
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
    connection.carry.drain(..asked.length);
    work(asked.work, spend, stop);
    let close = asked.close || connection.is_last();
    answer.clear();
    // Its end is told before the answer is written: what the writing takes is part of the wait.
    wire::write_answer(answer, seat, begun_ns, monotonic_ns(), close);
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
            // A sleep may end early where io_uring has something to tell the thread; then it goes on sleeping.
            Spend::Sleep => thread::sleep(Duration::from_nanos(left).min(NAP)),
            Spend::Spin => hint::spin_loop(),
        }
    }
}
