//! SO_REUSEPORT with a BPF program instead of the hash.
//!
//! At the SYN the program chooses the listener of the least busy worker. It reads counters that the workers maintain in memory
//! shared with it. A connection counts from its SYN on, so two connections that arrive together do not go to the same idle
//! worker.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fourtuple_bpf::{BpfError, Leaks, LeastBusy};
use fourtuple_syscalls::epoll::Interest;
use fourtuple_syscalls::option;

use crate::listen::ListenError;
use crate::listen::connection::Connection;
use crate::listen::policy::AcceptPolicy;
use crate::listen::seats::Count;
use crate::listen::wait::pool::{ListenerInterest, Pool};
use crate::listen::wait::{Preparation, Released, Seat, SharedState, Wait, sooner};

/// The interval at which a worker looks for connections that were counted at their SYN and never completed (SYN floods,
/// resets).
const LEAK_INTERVAL: Duration = Duration::from_millis(500);

/// Loads the program, which the workers attach.
pub(crate) fn prepare(preparation: &Preparation<'_>) -> Result<SharedState, ListenError> {
    let program = LeastBusy::load(preparation.seats).map_err(refused)?;
    Ok(SharedState::LeastBusy(Arc::new(program)))
}

struct Chosen {
    program: Arc<LeastBusy>,
    pool: Pool,
    leaks: Leaks,
    reconciled: Instant,
    begun: Instant,
}

pub(crate) fn open(seat: &Seat) -> Result<Box<dyn Wait>, ListenError> {
    let SharedState::LeastBusy(program) = &seat.group.0.shared else {
        unreachable!("the group was opened with this policy")
    };
    let pool = Pool::open(seat, ListenerInterest { interest: Interest::ACCEPT, readd_after: None })?;
    let listener = pool.listener().as_fd();
    // A SO_REUSEPORT group whose last listener was closed has lost its program. Otherwise attaching again has no effect.
    program.attach(listener).map_err(refused)?;
    program.seat_taken(seat.number, listener).map_err(refused)?;
    let now = Instant::now();
    Ok(Box::new(Chosen {
        program: Arc::clone(program),
        pool,
        leaks: Leaks::new(),
        reconciled: now,
        begun: now,
    }))
}

impl Wait for Chosen {
    /// Waits for at most [`LEAK_INTERVAL`] and keeps the worker's counters up to date.
    fn next(&mut self, seat: &Seat, timeout: Option<Duration>) -> Result<Option<Connection>, ListenError> {
        let counters = self.program.seat(seat.number).map_err(refused)?;
        let seats = &seat.group.0.seats;
        counters.set_open(seats.open(seat.number));
        counters.set_busy(self.pool.pending_events());
        let listener = self.pool.listener().as_fd();
        // An error of this call is ignored here; the reconciliation below reports it.
        counters.glance(&mut self.leaks, || option::accept_queue(listener).map_or(0, u64::from));
        let before = seats.get(seat.number, Count::Accepts);
        let found = self.pool.next(seat, sooner(timeout, Some(LEAK_INTERVAL)));
        let accepted = seats.get(seat.number, Count::Accepts) - before;
        if let Ok(Some(_)) = &found {
            // Set before the accepts are counted; the worker would look idle in between.
            counters.set_busy(1 + self.pool.pending_events());
        }
        for _ in 0..accepted {
            counters.accepted();
        }
        if self.reconciled.elapsed() >= LEAK_INTERVAL {
            self.reconciled = Instant::now();
            let queued = option::accept_queue(self.pool.listener().as_fd());
            let queued = queued.map_err(seat.group.failed("getsockopt(TCP_INFO)"))?;
            let leaked = counters.reconcile(&mut self.leaks, self.begun.elapsed(), queued.into());
            // A negative number means connections that were never counted.
            seats.add(seat.number, Count::Leaked, u64::try_from(leaked).unwrap_or(0));
        }
        found
    }

    fn keep(&mut self, seat: &Seat, connection: Connection) -> Result<(), ListenError> {
        self.pool.keep(seat, connection)
    }

    fn misplaced(&self, seat: &Seat, kept: Instant, asked: Instant) -> Duration {
        self.pool.misplaced(seat, kept, asked)
    }

    fn forget(&mut self, seat: &Seat, connection: &mut Connection) -> Result<(), ListenError> {
        self.pool.forget(seat, connection)
    }

    fn hand_over(&mut self, seat: &Seat) -> Result<(), ListenError> {
        self.pool.hand_over(seat)
    }

    fn release(&mut self, seat: &Seat, until: Instant) -> Released {
        // The program stops choosing this listener before the listener is handed off with its accept queue.
        let left = self.program.seat_left(seat.number).map_err(refused);
        let Released { connections, told } = self.pool.release(seat, until);
        Released { connections, told: left.and(told) }
    }
}

fn refused(error: BpfError) -> ListenError {
    let policy = AcceptPolicy::ReuseportLeastBusy;
    match error {
        BpfError::NotPermitted { call, source } => {
            ListenError::NotPermitted { policy, call, needs: BpfError::NEEDS, error: source }
        }
        BpfError::Absent { what, source, .. } => ListenError::Absent { policy, what, error: source },
        BpfError::Seats { seats } => ListenError::Setting {
            setting: "max_workers",
            value: seats.to_string(),
            accepted: "1 to 64 with reuseport-least-busy",
        },
        other => ListenError::Bpf { policy, error: other.into() },
    }
}
