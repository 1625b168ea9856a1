//! A client: one request under way at a time, and a diary of what it met.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fastrand::Rng;
use fourtuple_syscalls::errno_name;
use fourtuple_syscalls::resource::monotonic_ns;

use super::mix::{Mix, Pause};
use super::place::Place;
use super::wire::{self, Told};

/// Longer pauses are cut into pieces of this length, between which a client looks whether it is to stop.
const NAP: Duration = Duration::from_millis(20);

/// What became of one request; times are CLOCK_MONOTONIC in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answered {
    /// When it should have been sent. A client that is woken late is late for its request: that is part of the latency.
    pub(crate) intended_ns: u64,
    /// When it was sent: before connect() where it has a new connection.
    pub(crate) sent_ns: u64,
    /// When all of the answer was there.
    pub(crate) received_ns: u64,
    /// The work that was asked for.
    pub(crate) asked_ns: u64,
    /// What the answer told.
    pub(crate) told: Told,
    /// Whether it was the first of its connection.
    pub(crate) first: bool,
}

/// What a client met.
#[derive(Debug, Default)]
pub(crate) struct Diary {
    pub(crate) answered: Vec<Answered>,
    /// Requests that failed, by the name of the errno.
    pub(crate) errors: BTreeMap<String, u64>,
}

/// One client.
pub(crate) struct Client<'a> {
    place: &'a Place,
    /// After how many requests it closes, 0: never.
    close_every: u64,
    /// Source addresses take turns from here.
    turn: usize,
    open: Option<Open>,
    bytes: Vec<u8>,
    pub(crate) diary: Diary,
}

/// A connection.
struct Open {
    stream: TcpStream,
    /// Requests sent on it.
    sent: u64,
}

/// A request without an answer.
enum Failure {
    Call(io::Error),
    Ended,
    Malformed(&'static str),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Call(error)
    }
}

impl Failure {
    fn name(&self) -> String {
        match self {
            // What SO_RCVTIMEO says.
            Failure::Call(error) if error.kind() == io::ErrorKind::WouldBlock => "timeout".to_owned(),
            Failure::Call(error) => errno_name(error),
            Failure::Ended => "closed without an answer".to_owned(),
            Failure::Malformed(why) => (*why).to_owned(),
        }
    }
}

/// What a client of a load does, again and again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Habit {
    pub(crate) mix: Mix,
    pub(crate) pause: Pause,
    /// Seed of its own generator: with it the sequence of services and pauses is the same whatever the server does.
    pub(crate) seed: u64,
}

impl<'a> Client<'a> {
    pub(crate) fn new(place: &'a Place, close_every: u64, turn: usize) -> Client<'a> {
        Client { place, close_every, turn, open: None, bytes: Vec::new(), diary: Diary::default() }
    }

    /// Asks and pauses until `until_ns`, or until told to stop. Its connection stays open.
    pub(crate) fn go_on(&mut self, habit: Habit, until_ns: u64, stop: &AtomicBool) {
        let mut random = Rng::with_seed(habit.seed);
        let mut due = monotonic_ns() + nanos(habit.pause.draw(&mut random));
        while due < until_ns && sleep_until(due, stop) {
            let work = habit.mix.draw(&mut random);
            let pause = habit.pause.draw(&mut random);
            self.ask(work, due);
            due = monotonic_ns() + nanos(pause);
        }
    }

    /// Sends one request and waits for the answer; a failure goes to the diary.
    pub(crate) fn ask(&mut self, work: Duration, intended_ns: u64) {
        match self.exchange(work, intended_ns) {
            Ok(answered) => self.diary.answered.push(answered),
            Err(failure) => {
                self.open = None;
                *self.diary.errors.entry(failure.name()).or_default() += 1;
                // Whoever is refused at once would ask again at once.
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn exchange(&mut self, work: Duration, intended_ns: u64) -> Result<Answered, Failure> {
        let sent_ns = monotonic_ns();
        let mut open = match self.open.take() {
            Some(open) => open,
            None => {
                self.turn = self.turn.wrapping_add(1);
                Open { stream: self.place.connect(self.turn)?, sent: 0 }
            }
        };
        open.sent += 1;
        let first = open.sent == 1;
        let last = open.sent == self.close_every;
        self.bytes.clear();
        wire::write_request(&mut self.bytes, &self.place.path, &self.place.host, work, last);
        open.stream.write_all(&self.bytes)?;
        let heard = self.listen(&mut open.stream)?;
        let received_ns = monotonic_ns();
        if !last && !heard.close {
            self.open = Some(open);
        }
        Ok(Answered {
            intended_ns: intended_ns.min(sent_ns),
            sent_ns,
            received_ns,
            asked_ns: nanos(work),
            told: heard.told,
            first,
        })
    }

    /// Reads one whole answer.
    fn listen(&mut self, stream: &mut TcpStream) -> Result<wire::Heard, Failure> {
        self.bytes.clear();
        let mut room = [0; 4096];
        loop {
            let count = match stream.read(&mut room) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            self.bytes.extend_from_slice(&room[..count]);
            let heard =
                wire::read_answer(&self.bytes).map_err(|wire::Malformed(why)| Failure::Malformed(why))?;
            match heard {
                Some(heard) if heard.length.is_some_and(|length| self.bytes.len() >= length) => {
                    return Ok(heard);
                }
                Some(heard) if count == 0 && heard.length.is_none() => return Ok(heard),
                _ if count == 0 => return Err(Failure::Ended),
                _ => {}
            }
        }
    }

    /// Takes the connection that is open, so that the next request has a new one.
    pub(crate) fn take_connection(&mut self) -> Option<TcpStream> {
        self.open.take().map(|open| open.stream)
    }
}

/// Nanoseconds of a time that is none of centuries.
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX / 4).min(u64::MAX / 4)
}

/// False: told to stop.
fn sleep_until(due_ns: u64, stop: &AtomicBool) -> bool {
    loop {
        if stop.load(Ordering::Relaxed) {
            return false;
        }
        match due_ns.checked_sub(monotonic_ns()) {
            None | Some(0) => return true,
            Some(left) => thread::sleep(Duration::from_nanos(left).min(NAP)),
        }
    }
}
