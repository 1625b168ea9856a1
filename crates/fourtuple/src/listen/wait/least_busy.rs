//! SO_REUSEPORT with a BPF program in the place of the hash: at the SYN it chooses the worker with the least to do, which it
//! reads from counters that the workers keep in memory shared with it. A connection counts from its SYN on, so that two that
//! come at once do not go to the same idle worker.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_bpf::{BpfError, Leaks, LeastBusy};
use fourtuple_syscalls::epoll::Interest;
use fourtuple_syscalls::option;

use crate::listen::connection::Connection;
use crate::listen::error::ListenError;
use crate::listen::policy::Policy;
use crate::listen::seats::Count;
use crate::listen::wait::pool::{Pool, Watching};
use crate::listen::wait::{self, Seat, Wait};

/// What was counted at a SYN and never came (floods, resets) is looked for this often.
const LOOK: Duration = Duration::from_millis(500);

/// Loads the program, which the workers attach.
pub(super) fn common(seats: usize) -> Result<wait::Common, ListenError> {
    LeastBusy::load(seats).map(|program| wait::Common::LeastBusy(Arc::new(program))).map_err(refused)
}

struct Chosen {
    program: Arc<LeastBusy>,
    pool: Pool,
    leaks: Leaks,
    looked: Instant,
    begun: Instant,
}

pub(super) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    let wait::Common::LeastBusy(program) = &seat.group.0.common else {
        unreachable!("the group was opened with this policy")
    };
    let pool = Pool::open(seat, Watching { interest: Interest::ACCEPT, anew_after: None })?;
    let listener = pool.listener().as_fd();
    // A group that lost its last listener has lost its program; for any other this changes nothing.
    program.attach(listener).map_err(refused)?;
    program.seat_taken(seat.number, listener).map_err(refused)?;
    let now = Instant::now();
    Ok(Box::new(Chosen { program: Arc::clone(program), pool, leaks: Leaks::new(), looked: now, begun: now }))
}

impl Chosen {
    /// Waits for at most one look.
    fn wait(&mut self, seat: &Seat, slice: Duration) -> Result<Option<Connection>, ListenError> {
        let counters = self.program.seat(seat.number).map_err(refused)?;
        let seats = &seat.group.0.seats;
        counters.set_open(seats.get(seat.number, Count::Open));
        counters.set_busy(self.pool.waiting());
        let listener = self.pool.listener().as_fd();
        // Where the queue cannot be had the look below says so.
        counters.glance(&mut self.leaks, || option::accept_queue(listener).map_or(0, u64::from));
        let before = seats.get(seat.number, Count::Accepts);
        let found = self.pool.next(seat, Some(slice));
        let accepted = seats.get(seat.number, Count::Accepts) - before;
        if let Ok(Some(_)) = &found {
            // Before the accepts are counted: in between the worker would look idle.
            counters.set_busy(1 + self.pool.waiting());
        }
        for _ in 0..accepted {
            counters.accepted();
        }
        if self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            let queued = option::accept_queue(self.pool.listener().as_fd());
            let queued = queued.map_err(seat.group.failed("TCP_INFO"))?;
            let leaked = counters.reconcile(&mut self.leaks, self.begun.elapsed(), queued.into());
            // Below 0 it is connections that nobody had counted.
            seats.add(seat.number, Count::Leaked, u64::try_from(leaked).unwrap_or(0));
        }
        found
    }
}

impl Wait for Chosen {
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let slice = left.map_or(LOOK, |left| left.min(LOOK));
            let begun = Instant::now();
            match self.wait(seat, slice)? {
                // Neither the slice is over nor the time: the bell was rung.
                None if begun.elapsed() >= slice && left.is_none_or(|left| left > slice) => {}
                found => return Ok(found),
            }
        }
    }

    fn keep(&mut self, seat: &Seat, connection: Connection) -> Result<(), ListenError> {
        self.pool.keep(seat, connection)
    }

    fn misplaced(&self, seat: &Seat, kept: Instant) -> Duration {
        self.pool.misplaced(seat, kept)
    }

    fn forget(&mut self, seat: &Seat, connection: &mut Connection) -> Result<(), ListenError> {
        self.pool.forget(seat, connection)
    }

    fn release(&mut self, seat: &Seat) -> Result<Vec<Connection>, ListenError> {
        // From now on nobody is sent here; who is in the queue goes with the listener.
        self.program.seat_left(seat.number).map_err(refused)?;
        self.pool.release(seat)
    }
}

fn refused(error: BpfError) -> ListenError {
    let policy = Policy::ReuseportLeastBusy;
    match error {
        BpfError::NotPermitted { call, source } => {
            ListenError::NotPermitted { policy, call, needs: BpfError::NEEDS, source }
        }
        BpfError::Absent { what, source, .. } => ListenError::Absent { policy, what, source },
        other => ListenError::Bpf(other),
    }
}
