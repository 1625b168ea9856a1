//! A group of listeners in which the kernel chooses the least busy worker at the SYN.

use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fourtuple_syscalls::{Errno, option};

use crate::call::{self, MapKind};
use crate::error::BpfError;
use crate::leaks::Leaks;
use crate::object::Program;
use crate::shared::{AllAtomic, Shared};

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
    room: [u64; 3],
}

#[derive(Debug)]
#[repr(C)]
struct State {
    seats: AtomicU64,
    cursor: AtomicU64,
    room: [u64; 6],
    seat: [Seat; SEATS],
}

// SAFETY: all fields are atomics; `room` is never read.
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
        let map = |kind, size, entries, flags, name, what| {
            call::create_map(kind, size, entries, flags, name)
                .map_err(|source| BpfError::or_absent("bpf(BPF_MAP_CREATE)", what, source))
        };
        let listeners = map(MapKind::Sockets, 8, seats, 0, "listeners", "REUSEPORT_SOCKARRAY (Linux 4.19)")?;
        let size = mem::size_of::<State>();
        let array = map(MapKind::Array, size, 1, call::MMAPABLE, "state", "BPF_F_MMAPABLE (Linux 5.5)")?;
        let state = Shared::<State>::map(array.as_fd())
            .map_err(|source| BpfError::of("mmap of a BPF array", source))?;
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
            .map_err(|source| BpfError::of("setsockopt(SO_ATTACH_REUSEPORT_EBPF)", source))
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
        call::put_socket(self.listeners.as_fd(), seat as u32, listener)
            .map_err(|source| BpfError::of("bpf(BPF_MAP_UPDATE_ELEM)", source))?;
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
        match call::take_socket(self.listeners.as_fd(), seat as u32) {
            Err(error) if Errno::of(&error) != Some(Errno::ENOENT) => {
                Err(BpfError::of("bpf(BPF_MAP_DELETE_ELEM)", error))
            }
            _ => Ok(()),
        }
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
