//! Workers that share a listener with EPOLLEXCLUSIVE: the one that has accepted is the last to be woken.
//!
//! The kernel wakes the first registered worker that waits, so that a few of many get nearly all connections. A move of the worker that
//! accepted to the tail of the wait queue makes them take turns. Nothing has to be undone at the end.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::RawFd;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_bpf::FixRotate;
use fourtuple_bpf::fix_rotate::{ListenerEvent, What};
use fourtuple_record::{FixAcceptListener, FixAcceptResults, Remark};
use fourtuple_syscalls::epoll::{Registration, Sleeper};
use fourtuple_syscalls::pidfd::Pidfd;

use crate::accept::discover::{self, Scope, SharedListener};
use crate::accept::mover::{Mover, Order, ROWS, Seat};
use crate::accept::session::{Choices, Closed};
use crate::accept::{Accept, AcceptError, AcceptProgress, AcceptTarget, Fixing, has_ended};
use crate::target;

/// Interval at which threads are looked at that have accepted: one that has just done so still runs, and others follow it.
const INTERVAL: Duration = Duration::from_millis(2);
/// Time after which the move of a thread that stays busy is given up: the kernel passes it over, and its next accept() asks again.
const MOVE_TIMEOUT: Duration = Duration::from_secs(1);

/// A worker at a listener, which is a row of the mover.
struct Worker {
    process: u32,
    command: String,
    cookie: u64,
    connections: u64,
}

/// A thread whose registration is to be moved.
struct Pending {
    since: Instant,
    /// Number of the order to the mover.
    sent: Option<u64>,
}

pub(super) struct Rotation {
    target: AcceptTarget,
    scope: Scope,
    process: Option<Pidfd>,
    trace: FixRotate,
    /// `None` in a dry run.
    mover: Option<Mover>,
    /// By cookie.
    listeners: BTreeMap<u64, SharedListener>,
    workers: BTreeMap<usize, Worker>,
    /// The registrations with EPOLLEXCLUSIVE, by worker and epoll instance.
    seats: BTreeMap<(usize, RawFd), Seat>,
    closed: Closed,
    joined: u64,
    chosen: u64,
    /// Threads that accepted, by worker.
    pending: BTreeMap<(usize, u32), Pending>,
    /// Threads that have accepted since the last look.
    threads: BTreeMap<u32, Sleeper>,
    /// Number of the last order to the mover.
    number: u64,
    /// The processes whose registrations at a listener were read since the last look.
    read: BTreeSet<(u32, u64)>,
    remarks: BTreeMap<&'static str, String>,
}

impl Rotation {
    pub(super) fn attach(settings: &Accept, mover: Option<Mover>) -> Result<Rotation, AcceptError> {
        let target = settings.target.clone();
        let process = target.open_process()?;
        let scope = Scope::open(&target)?;
        let mut rotation = Rotation {
            target,
            scope,
            process,
            trace: FixRotate::attach()?,
            mover,
            listeners: BTreeMap::new(),
            workers: BTreeMap::new(),
            seats: BTreeMap::new(),
            closed: Closed::default(),
            joined: 0,
            chosen: 0,
            pending: BTreeMap::new(),
            threads: BTreeMap::new(),
            number: 0,
            read: BTreeSet::new(),
            remarks: BTreeMap::new(),
        };
        rotation.look()?;
        rotation.check()?;
        rotation.joined = 0;
        Ok(rotation)
    }

    /// Returns the reason to refuse the server, if any.
    fn check(&self) -> Result<(), AcceptError> {
        let Some((&cookie, listener)) = self.listeners.first_key_value() else {
            return Err(self.target.nothing());
        };
        let waiting: BTreeSet<u64> = self.seats.values().map(|seat| seat.cookie).collect();
        let is_shared = |cookie: &u64| self.seats.values().filter(|seat| seat.cookie == *cookie).count() > 1;
        if waiting.iter().any(is_shared) {
            // A duplicate shows whether this process may do so.
            return self.seats.values().take(1).try_for_each(|seat| {
                let duplicate = |process: Pidfd| process.duplicate(seat.registration.descriptor);
                let failed = |source| AcceptError::Duplicate { process: seat.process, source };
                Pidfd::of_process(seat.process).and_then(duplicate).map(drop).map_err(failed)
            });
        }
        let holders = discover::handles_of(&[(listener.inode, cookie)].into())
            .remove(&listener.inode)
            .unwrap_or_default();
        match holders.first() {
            None => Err(AcceptError::Unseen { address: listener.name(), seen: 0, members: 1 }),
            Some(_) => {
                let process = discover::worker(&holders);
                let command = target::command(process);
                let listener = format!("{} ({command}, process {process})", listener.name());
                Err(AcceptError::NoLadder { listener, waiting: self.seats.len() })
            }
        }
    }

    /// Finds new listeners and their workers, and closes the rows of workers that have ended.
    fn look(&mut self) -> Result<(), AcceptError> {
        let found = self.scope.shared().map_err(AcceptError::List)?;
        let mut present = BTreeSet::new();
        let mut fresh = BTreeMap::new();
        for (cookie, listener) in found {
            present.insert(cookie);
            match self.listeners.get_mut(&cookie) {
                Some(known) => known.queue = listener.queue,
                None => {
                    // Before the registrations are read, so that no change is lost in between.
                    self.trace.watch(cookie)?;
                    fresh.insert(listener.inode, cookie);
                    self.listeners.insert(cookie, listener);
                }
            }
        }
        self.find_workers(&fresh);
        self.read.clear();
        self.threads.clear();
        let has_ended = |worker: &Worker| {
            !present.contains(&worker.cookie)
                || fs::symlink_metadata(format!("/proc/{}", worker.process)).is_err()
        };
        let ended: Vec<usize> =
            self.workers.iter().filter(|(_, worker)| has_ended(worker)).map(|(row, _)| *row).collect();
        for row in ended {
            let closed = self.row(row, &self.workers[&row], None);
            self.closed.add(closed);
            self.workers.remove(&row);
            self.seats.retain(|(of, _), _| *of != row);
        }
        for (cookie, _) in self.listeners.extract_if(.., |cookie, _| !present.contains(cookie)) {
            self.trace.forget(cookie);
        }
        Ok(())
    }

    /// Finds the workers of new listeners: cookies by inode. Reads all of /proc.
    fn find_workers(&mut self, listeners: &BTreeMap<u32, u64>) {
        if listeners.is_empty() {
            return;
        }
        for (inode, handles) in discover::handles_of(listeners) {
            for handle in handles {
                self.read_registrations(handle.process, inode, handle.cookie);
            }
        }
    }

    /// Reads the registrations of a listener in a process, once until the next look.
    fn read_registrations(&mut self, process: u32, inode: u32, cookie: u64) {
        if !self.read.insert((process, cookie)) {
            return;
        }
        for (epoll, registration, of) in discover::registrations(process) {
            if of == u64::from(inode) {
                self.set(process, cookie, epoll, registration);
            }
        }
    }

    fn set(&mut self, process: u32, cookie: u64, epoll: RawFd, registration: Registration) {
        if !registration.is_exclusive() {
            return self.remove(process, cookie, epoll);
        }
        let Some(row) = self.row_of(process, cookie) else { return };
        self.seats.insert((row, epoll), Seat { process, cookie, registration });
    }

    /// The worker has removed a registration, or added it without EPOLLEXCLUSIVE.
    fn remove(&mut self, process: u32, cookie: u64, epoll: RawFd) {
        if let Some(row) = self.known_row(process, cookie) {
            self.seats.remove(&(row, epoll));
        }
    }

    fn known_row(&self, process: u32, cookie: u64) -> Option<usize> {
        let is_it = |worker: &Worker| worker.process == process && worker.cookie == cookie;
        self.workers.iter().find(|(_, worker)| is_it(worker)).map(|(row, _)| *row)
    }

    /// Returns the row of a worker, which it gets if it has none. `None`: there are too many, or it is the mover, at work for a worker.
    fn row_of(&mut self, process: u32, cookie: u64) -> Option<usize> {
        if self.mover.as_ref().is_some_and(|mover| mover.id() == process) {
            return None;
        }
        if let Some(row) = self.known_row(process, cookie) {
            return Some(row);
        }
        let Some(row) = (0..ROWS).find(|row| !self.workers.contains_key(row)) else {
            let message = format!("further workers than {ROWS} are left alone");
            self.remarks.insert("not-followed", message);
            return None;
        };
        if let Some(mover) = &self.mover {
            mover.reset(row);
        }
        let command = target::command(process);
        self.workers.insert(row, Worker { process, command, cookie, connections: 0 });
        self.joined += 1;
        Some(row)
    }

    fn handle(&mut self, event: ListenerEvent) {
        let ListenerEvent { cookie, process, what } = event;
        match what {
            What::Added { epoll, registration } => self.set(process, cookie, epoll, registration),
            What::Removed { epoll } => self.remove(process, cookie, epoll),
            What::Accepted { thread } => {
                let Some(row) = self.row_of(process, cookie) else { return };
                if let Some(worker) = self.workers.get_mut(&row) {
                    worker.connections += 1;
                }
                // The event of its registration may have been missed.
                if !self.seats.keys().any(|(of, _)| *of == row)
                    && let Some(inode) = self.listeners.get(&cookie).map(|listener| listener.inode)
                {
                    self.read_registrations(process, inode, cookie);
                }
                if self.mover.is_some() {
                    self.pending.insert((row, thread), Pending { since: Instant::now(), sent: None });
                }
            }
        }
    }

    fn replace(&mut self, killed: Mover) {
        match killed.replace(&self.seats) {
            Ok(mover) => self.mover = Some(mover),
            Err(error) => {
                let message = format!(
                    "the process that moves workers was killed, and cannot be started again: {error}"
                );
                self.remarks.insert("guard-ended", message);
            }
        }
    }

    /// Handles the events that have arrived, and orders moves of the threads that sleep.
    fn turn(&mut self) {
        self.handle_all();
        let Some(mover) = &self.mover else { return };
        self.pending.retain(|&(row, _), pending| {
            let done = pending.sent.map(|number| mover.is_done(row, number));
            if done == Some(Some(false)) {
                pending.sent = None;
            }
            done != Some(Some(true)) && pending.since.elapsed() < MOVE_TIMEOUT
        });
        let mut asleep = Vec::new();
        self.pending.retain(|&(row, thread), pending| {
            if pending.sent.is_some() {
                return true;
            }
            match runs_asleep(&mut self.threads, thread) {
                Ok(Some((epoll, runs))) => asleep.push((row, thread, epoll, runs)),
                Ok(None) => {}
                Err(_) => {
                    // It has ended.
                    self.threads.remove(&thread);
                    return false;
                }
            }
            true
        });
        // What a thread did before it slept has been reported by now.
        self.handle_all();
        let mut orders = Vec::new();
        for (row, thread, epoll, runs) in asleep {
            let Some(&seat) = self.seats.get(&(row, epoll)) else {
                self.pending.remove(&(row, thread));
                continue;
            };
            self.number += 1;
            let number = self.number;
            if let Some(pending) = self.pending.get_mut(&(row, thread)) {
                pending.sent = Some(number);
            }
            orders.push(Order { number, row, thread, runs, epoll, seat });
        }
        if let Some(mover) = &mut self.mover {
            // A mover that has been killed is replaced soon.
            let _ = mover.tell(&orders);
        }
    }

    fn handle_all(&mut self) {
        while let Some(event) = self.trace.next_event() {
            self.handle(event);
        }
    }

    fn row(&self, row: usize, worker: &Worker, queue: Option<u32>) -> FixAcceptListener {
        let listener = self.listeners.get(&worker.cookie);
        FixAcceptListener {
            transport: listener.map_or("", |listener| listener.transport).to_owned(),
            address: listener.map(|listener| listener.address.clone()).unwrap_or_default(),
            cookie: worker.cookie,
            process: worker.process,
            command: worker.command.clone(),
            choices: 0,
            connections: worker.connections,
            moves: self.mover.as_ref().map_or(0, |mover| mover.moves(row)),
            share: None,
            open: None,
            queue,
        }
    }

    fn rows(&self) -> Vec<FixAcceptListener> {
        let open = self.workers.iter().map(|(row, worker)| {
            let queue = self.listeners.get(&worker.cookie).map(|listener| listener.queue);
            self.row(*row, worker, queue)
        });
        self.closed.rows.iter().cloned().chain(open).collect()
    }
}

/// Returns the epoll instance for which a thread sleeps, and the number of its runs; `None`: it does not sleep there.
fn runs_asleep(threads: &mut BTreeMap<u32, Sleeper>, thread: u32) -> io::Result<Option<(RawFd, u64)>> {
    let sleeper = match threads.entry(thread) {
        Entry::Occupied(entry) => entry.into_mut(),
        Entry::Vacant(entry) => entry.insert(Sleeper::of(thread, 0)?),
    };
    // In this order: if it has run between the two answers, the mover sees another number.
    let runs = sleeper.runs()?;
    Ok(sleeper.waits_for()?.map(|epoll| (epoll, runs)))
}

impl Fixing for Rotation {
    fn addresses(&self) -> Vec<String> {
        let names: BTreeSet<String> = self.listeners.values().map(SharedListener::name).collect();
        names.into_iter().collect()
    }

    fn has_ended(&self) -> bool {
        has_ended(self.process.as_ref())
    }

    fn follow(&mut self, looks: bool) -> Result<(), AcceptError> {
        if self.mover.as_ref().is_some_and(Mover::has_ended) {
            // Its own events carry its process id.
            self.handle_all();
            if let Some(mover) = self.mover.take() {
                self.replace(mover);
            }
        }
        if looks {
            // No descriptor or no thread is left: the next look follows soon.
            if let Err(error) = self.look() {
                self.remarks.insert("not-followed", error.to_string());
            }
        }
        Ok(())
    }

    /// Handles events until the time has passed.
    fn wait(&mut self, time: Duration) -> Result<(), AcceptError> {
        let end = Instant::now() + time;
        loop {
            self.turn();
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            if !self.pending.is_empty() || self.trace.wait(left)? {
                thread::sleep(INTERVAL.min(left));
            }
        }
    }

    fn progress(&mut self, elapsed: Duration, since: Duration) -> Result<AcceptProgress, AcceptError> {
        let rows = self.rows();
        let chosen = rows.iter().map(|row| row.moves).sum::<u64>();
        let before = std::mem::replace(&mut self.chosen, chosen);
        Ok(AcceptProgress {
            elapsed,
            groups: self.listeners.len(),
            listeners: self.workers.len(),
            chosen,
            chosen_per_s: chosen.saturating_sub(before) as f64 / since.as_secs_f64().max(1e-9),
            open: 0,
            left: 0,
            longest_queue: rows.iter().filter_map(|row| row.queue).max().unwrap_or(0),
        })
    }

    fn finish(mut self, elapsed: Duration) -> Result<(FixAcceptResults, Vec<Remark>), AcceptError> {
        self.handle_all();
        // Closes the rows of workers that have ended since the last look. If that fails, they are the rows of open ones.
        let _ = self.look();
        let failed = self.mover.as_ref().map_or(0, Mover::failed);
        if failed > 0 {
            let message =
                format!("{failed} registrations of workers could not be added again; reload the server");
            self.remarks.insert("registration-lost", message);
        }
        let missed = self.trace.missed()?;
        let groups = self.listeners.len() as u64;
        let rows = self.rows();
        if let Some(mover) = self.mover.take() {
            mover.end();
        }
        let (Choices { connections, moves, .. }, listeners, left_out) =
            self.closed.listed(rows, |of| of.connections);
        let results = FixAcceptResults {
            elapsed_ns: elapsed.as_nanos() as u64,
            groups,
            choices: 0,
            choices_per_s: 0.0,
            connections,
            moves,
            lapsed: 0,
            strays: 0,
            joined: self.joined,
            closed: self.closed.rows.len() as u64 + self.closed.left_out,
            missed,
            listeners,
            listeners_left_out: left_out,
        };
        Ok((results, self.remarks.into_iter().map(|(id, message)| Remark::new(id, message)).collect()))
    }
}
