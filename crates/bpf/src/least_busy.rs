//! Groups of listeners: one in which the kernel chooses the least busy worker at the SYN, and one whose members close without a reset
//! of the connections in their accept queues (`hand_over`).

use std::collections::VecDeque;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fourtuple_syscalls::option;

use crate::call::{self, AllAtomic, Shared};
use crate::error::BpfError;
use crate::object::Program;

/// Maximum number of seats of a group, as in least_busy.bpf.c.
pub const SEATS: usize = 64;

/// The load of one worker as the program sees it. It is shared with the kernel and with forked processes.
///
/// The program compares connections on their way plus requests in progress, then open connections.
#[derive(Debug)]
#[repr(C)]
pub struct Seat {
    /// The cookie of the listener; 0 for a free seat.
    listener: AtomicU64,
    claimed: AtomicU64,
    accepted: AtomicU64,
    busy: AtomicU64,
    open: AtomicU64,
    padding: [u64; 3],
}

#[derive(Debug)]
#[repr(C)]
struct State {
    seats: AtomicU64,
    cursor: AtomicU64,
    padding: [u64; 6],
    seat: [Seat; SEATS],
}

// SAFETY: all fields are atomics; `padding` is never read.
unsafe impl AllAtomic for State {}

// The layout must equal struct seat and struct state in least_busy.bpf.c.
const _: () = assert!(mem::size_of::<Seat>() == 64 && mem::offset_of!(Seat, open) == 32);
const _: () = assert!(mem::size_of::<State>() == 64 * (SEATS + 1) && mem::offset_of!(State, seat) == 64);

/// The counters of a seat at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Connections that the program has sent here.
    pub claimed: u64,
    /// Claimed connections that were accepted or are known to be lost.
    pub accepted: u64,
    /// Requests in progress.
    pub busy: u64,
    pub open: u64,
}

impl Seat {
    /// Counts a connection that the worker took from the accept queue. Call `set_busy` or `opened` for the connection before,
    /// or the worker looks idle in between.
    pub fn accepted(&self) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
    }

    /// Sets the number of requests in progress.
    pub fn set_busy(&self, requests: u64) {
        self.busy.store(requests, Ordering::Relaxed);
    }

    /// Sets the number of open connections, for a caller that counts them itself.
    pub fn set_open(&self, connections: u64) {
        self.open.store(connections, Ordering::Relaxed);
    }

    /// Counts an opened connection.
    pub fn opened(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a closed connection.
    pub fn closed(&self) {
        // A connection may outlive its worker's seat, which may be reused with its counters at 0.
        let less = |open: u64| open.checked_sub(1);
        let _ = self.open.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Returns whether the seat is taken. The seat of a killed worker stays taken until the program finds its listener closed.
    pub fn is_taken(&self) -> bool {
        self.listener.load(Ordering::Acquire) != 0
    }

    /// Returns the current counters. `accepted` is read before `claimed`, so that a connection in between counts as on its way.
    pub fn counters(&self) -> Counters {
        let accepted = self.accepted.load(Ordering::Acquire);
        Counters {
            accepted,
            claimed: self.claimed.load(Ordering::Acquire),
            busy: self.busy.load(Ordering::Relaxed),
            open: self.open.load(Ordering::Relaxed),
        }
    }

    /// Subtracts leaked claims. The worker itself must call this at least every 500 ms, but not between accept() and
    /// [`Seat::accepted`]. `now` is any monotonic clock, `queued` is the length that [`option::accept_queue`] returns. Returns
    /// the change of `accepted`, which is 0 most of the time.
    pub fn reconcile(&self, leaks: &mut Leaks, now: Duration, queued: u64) -> i64 {
        let counters = self.counters();
        let change = leaks.look(now, counters.claimed, counters.accepted, queued);
        // Wrapping: a negative number is added as its two's complement.
        self.accepted.fetch_add(change as u64, Ordering::Relaxed);
        change
    }

    /// Records the connections on their way, for [`Seat::reconcile`]. The worker itself must call this whenever it is about to
    /// wait. `queued` is called only if its result matters.
    pub fn glance(&self, leaks: &mut Leaks, queued: impl FnOnce() -> u64) {
        let counters = self.counters();
        leaks.glance(counters.claimed, counters.accepted, queued);
    }

    fn reset(&self) {
        for counter in [&self.claimed, &self.accepted, &self.busy, &self.open] {
            counter.store(0, Ordering::Relaxed);
        }
    }
}

/// The program, its listeners and its counters.
///
/// Load it before forking: children share counters and descriptors. The kernel frees all objects with the last descriptor.
#[derive(Debug)]
pub struct LeastBusy {
    program: OwnedFd,
    listeners: OwnedFd,
    /// The mapped state. The map lives as long as this mapping and the program.
    state: Shared<State>,
    seats: usize,
}

impl LeastBusy {
    /// Loads the program into the kernel for a group of at most `seats` workers at one time, 1 to [`SEATS`].
    ///
    /// # Errors
    ///
    /// [`BpfError::Seats`], [`BpfError::NotPermitted`] without CAP_BPF and CAP_NET_ADMIN, [`BpfError::Absent`] before
    /// Linux 5.14.
    pub fn load(seats: usize) -> Result<LeastBusy, BpfError> {
        if !(1..=SEATS).contains(&seats) {
            return Err(BpfError::Seats { seats });
        }
        let program = Program::read("least_busy", include_bytes!("least_busy.o"))?;
        let listeners = call::create_socket_map(seats, "listeners")?;
        let (array, state) = Shared::<State>::create("state")?;
        state.seats.store(seats as u64, Ordering::Release);
        let program = program.load(&[("state", &array), ("listeners", &listeners)])?;
        Ok(LeastBusy { program, listeners, state, seats })
    }

    /// Attaches the program to the SO_REUSEPORT group of a TCP socket. One call per group suffices: the group keeps the program
    /// while it has members. A group that lost its last member needs another call.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`], with EINVAL for a socket without SO_REUSEPORT.
    pub fn attach(&self, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        call::attach(socket, self.program.as_fd())
    }

    /// Takes a seat for a worker with its own listener. The counters start at 0, and connections may arrive from now on.
    ///
    /// # Errors
    ///
    /// [`BpfError::NoSuchSeat`]. [`BpfError::Call`], with EINVAL for a socket that does not listen or lacks
    /// SO_REUSEPORT, EBUSY for a socket that has a seat already.
    pub fn seat_taken(&self, seat: usize, listener: BorrowedFd<'_>) -> Result<(), BpfError> {
        let counters = self.seat(seat)?;
        let cookie = option::cookie(listener)
            .map_err(|source| BpfError::Call { call: "getsockopt(SO_COOKIE)", source })?;
        counters.listener.store(0, Ordering::Release);
        counters.reset();
        call::put_socket(self.listeners.as_fd(), seat as u32, listener)?;
        // Last: the program frees a seat whose socket it does not find, but only if the cookie is still the one it saw.
        counters.listener.store(cookie, Ordering::Release);
        Ok(())
    }

    /// Gives up a worker's seat: the program sends no new connections to it, but a few may still be on their way. The worker
    /// keeps its accept queue; when it closes the listener, the kernel moves the queued connections to other listeners.
    ///
    /// # Errors
    ///
    /// [`BpfError::NoSuchSeat`], [`BpfError::Call`]. A seat that is already free is not an error.
    pub fn seat_left(&self, seat: usize) -> Result<(), BpfError> {
        self.seat(seat)?.listener.store(0, Ordering::Release);
        call::take_socket(self.listeners.as_fd(), seat as u32)
    }

    /// Returns the counters of a seat.
    ///
    /// # Errors
    ///
    /// [`BpfError::NoSuchSeat`]
    pub fn seat(&self, seat: usize) -> Result<&Seat, BpfError> {
        let seats = self.seats;
        self.state.seat[..seats].get(seat).ok_or(BpfError::NoSuchSeat { seat, seats })
    }

    /// Returns the number of seats, taken or free.
    pub fn seats(&self) -> usize {
        self.seats
    }
}

/// A program that leaves the choice to the kernel's hash and moves the connections of a closed listener to other listeners of
/// its group. Without it, or the sysctl `net.ipv4.tcp_migrate_req`, the kernel resets these connections
/// (`inet_csk_listen_stop`).
#[derive(Debug)]
pub struct HandOver {
    program: OwnedFd,
}

impl HandOver {
    /// Loads the program into the kernel.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_NET_ADMIN, [`BpfError::Absent`] before Linux 5.14.
    pub fn load() -> Result<HandOver, BpfError> {
        let program = Program::read("hand_over", include_bytes!("hand_over.o"))?.load(&[])?;
        Ok(HandOver { program })
    }

    /// Attaches the program to the SO_REUSEPORT group of a TCP socket. One call per group suffices: the group keeps the program
    /// while it has members.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`], with EINVAL for a socket without SO_REUSEPORT.
    pub fn attach(&self, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        call::attach(socket, self.program.as_fd())
    }
}

/// The age from which a claim counts as lost. Handshakes over the longest paths take less time. A lost SYN-ACK is retransmitted
/// after this time (TCP_TIMEOUT_INIT); the count of such a connection is corrected when it completes.
const PATIENCE: Duration = Duration::from_secs(1);

/// The time during which the number of claims in flight must not have been lower before it is subtracted.
const STEADY: Duration = Duration::from_secs(2);

/// Minimum number of glances that tell a constant number from a random one. A starved worker has few glances: one for each
/// connection that it still gets.
const GLANCES: u32 = 8;

/// The history of one worker's looks: finds connections that were counted at their SYN and never completed, by SYN floods, resets before
/// the accept, full queues.
///
/// Each worker checks its counters at intervals. A claim that is older than one second and is neither accepted nor in the
/// accept queue has leaked. While accepts continue, newer connections hide some leaks, so the check finds too few leaks but
/// never too many. A worker that gets no connection finds the remaining leaks within a second. A worker that gets only a few
/// connections, because all other workers are busier, would count as busier than it is: two leaked claims took nine tenths of
/// its share from a worker. So a second rule also subtracts the lowest number of claims in flight in any glance during
/// two seconds. This number can include handshakes over long paths, of which some are always in flight. All workers have
/// the same share of such handshakes, so the difference between workers is unaffected. When these handshakes stop, `accepted`
/// is too high by their number, and the next look corrects it.
#[derive(Debug, Default)]
pub struct Leaks {
    /// Time of each look and claims at that time, oldest first. Only the first look may be older than [`PATIENCE`].
    looks: VecDeque<(Duration, u64)>,
    /// The lowest number of claims in flight since the first look of this span.
    least: Option<Least>,
}

#[derive(Debug)]
struct Least {
    since: Duration,
    coming: u64,
    glances: u32,
}

impl Leaks {
    /// Returns an empty history. Each time a worker takes a seat, it needs a new value.
    pub fn new() -> Leaks {
        Leaks::default()
    }

    /// Records the current counters between two looks and changes no count. If this span had a glance with no connection on its
    /// way, the call returns at once and does not call `queued`.
    pub fn glance(&mut self, claimed: u64, accepted: u64, queued: impl FnOnce() -> u64) {
        let Some(least) = self.least.as_mut().filter(|least| least.coming > 0) else { return };
        least.glances += 1;
        let coming = claimed.saturating_sub(accepted);
        // The length of the queue can only reduce the number.
        let coming = if coming == 0 { 0 } else { coming.saturating_sub(queued()) };
        least.coming = least.coming.min(coming);
    }

    /// Returns the number to add to `accepted`: the lost claims. A negative number stands for connections that were never
    /// claimed for this worker (SYN cookies, the kernel's hash).
    pub fn look(&mut self, now: Duration, claimed: u64, accepted: u64, queued: u64) -> i64 {
        self.looks.push_back((now, claimed));
        let is_old = |&(then, _): &(Duration, u64)| now.saturating_sub(then) >= PATIENCE;
        while self.looks.get(1).is_some_and(is_old) {
            self.looks.pop_front();
        }
        if accepted > claimed {
            self.least = None;
            return -signed(accepted - claimed);
        }
        let lost = match self.looks.front().filter(|look| is_old(look)) {
            Some(&(_, then)) => then.saturating_sub(accepted.saturating_add(queued)),
            None => 0,
        };
        let steady = self.steady(now, (claimed - accepted).saturating_sub(queued));
        let change = lost.max(steady);
        if change > 0 {
            self.least = None;
        }
        signed(change)
    }

    /// Returns the lowest number of the span when the span is complete, otherwise 0.
    fn steady(&mut self, now: Duration, coming: u64) -> u64 {
        let least = self.least.get_or_insert(Least { since: now, coming, glances: 0 });
        least.coming = least.coming.min(coming);
        if now.saturating_sub(least.since) < STEADY || (least.coming > 0 && least.glances < GLANCES) {
            return 0;
        }
        let found = least.coming;
        self.least = None;
        found
    }
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn a_claim_is_lost_after_a_second_and_only_once() {
        let mut leaks = Leaks::new();
        assert_eq!(leaks.look(ms(0), 5, 0, 0), 0);
        assert_eq!(leaks.look(ms(500), 5, 0, 0), 0);
        assert_eq!(leaks.look(ms(1000), 5, 0, 0), 5);
        assert_eq!(leaks.look(ms(1500), 5, 5, 0), 0);
        assert_eq!(leaks.look(ms(2500), 5, 5, 0), 0);
    }

    #[test]
    fn queued_connections_are_not_lost() {
        let mut leaks = Leaks::new();
        for look in 0..10 {
            assert_eq!(leaks.look(ms(500 * look), 7, 0, 7), 0);
        }
        assert_eq!(leaks.look(ms(6000), 7, 0, 4), 3);
    }

    #[test]
    fn handshakes_in_progress_are_not_lost() {
        // 100 connections a second, each in flight for 200 ms, and a look every 500 ms.
        let mut leaks = Leaks::new();
        for look in 0..20_u64 {
            let claimed = 50 * look + 20;
            assert_eq!(leaks.look(ms(500 * look), claimed, 50 * look, 0), 0);
        }
    }

    #[test]
    fn load_hides_some_leaks_until_it_ends() {
        let mut leaks = Leaks::new();
        // 10 connections of the first second never complete; 50 further connections complete every half second.
        let mut accepted = 0;
        for look in 1..6_u64 {
            accepted += 50;
            assert_eq!(leaks.look(ms(500 * look), 10 + 50 * look, accepted, 0), 0);
        }
        let claimed = 10 + 250;
        assert_eq!(leaks.look(ms(3000), claimed, accepted, 0), 0);
        assert_eq!(leaks.look(ms(3500), claimed, accepted, 0), 10);
        assert_eq!(leaks.look(ms(4000), claimed, accepted + 10, 0), 0);
    }

    #[test]
    fn frequent_looks_find_connections_in_flight_under_load() {
        let mut leaks = Leaks::new();
        // 3 claims leaked at the start; then a connection arrives every 10 ms and is in flight at every second glance.
        let mut found = 0;
        for tick in 0..500_u64 {
            let accepted = tick / 2 + found;
            let claimed = 3 + tick.div_ceil(2);
            leaks.glance(claimed, accepted, || 0);
            if tick % 100 == 0 {
                found += leaks.look(ms(5 * tick), claimed, accepted, 0).unsigned_abs();
            }
        }
        assert_eq!(found, 3);
    }

    #[test]
    fn two_leaks_do_not_starve_a_worker_at_ten_per_second() {
        let mut leaks = Leaks::new();
        // Seen in the soak test: new connections hide the missing ones without end.
        let mut found = 0;
        for tick in 0..100_u64 {
            leaks.glance(2 + tick, tick + found, || 0);
            if tick % 5 == 0 {
                found += leaks.look(ms(100 * tick), 2 + tick, tick + found, 0).unsigned_abs();
            }
        }
        assert_eq!(found, 2);
    }

    #[test]
    fn connections_sometimes_on_their_way_are_kept() {
        let mut leaks = Leaks::new();
        for tick in 0..2_000_u64 {
            let coming = u64::from(tick % 70 != 0);
            leaks.glance(tick + coming, tick, || 0);
            if tick % 100 == 1 {
                assert_eq!(leaks.look(ms(5 * tick), tick + coming, tick, 0), 0);
            }
        }
    }

    #[test]
    fn unclaimed_connections_are_corrected_at_once() {
        let mut leaks = Leaks::new();
        assert_eq!(leaks.look(ms(0), 3, 5, 0), -2);
        assert_eq!(leaks.look(ms(100), 3, 3, 0), 0);
    }

    #[test]
    fn late_or_frequent_looks_change_nothing() {
        let mut leaks = Leaks::new();
        for look in 0..100_000_u64 {
            assert_eq!(leaks.look(Duration::from_micros(look), 1, 0, 0), 0);
        }
        assert_eq!(leaks.look(ms(60_000), 9, 0, 0), 1, "only what was there a second ago");
        assert_eq!(leaks.looks.len(), 2);
    }
}
