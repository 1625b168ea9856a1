//! Selectors for the SO_REUSEPORT groups of unmodified servers, and the counts of their listeners.

use std::fmt;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use aya::maps::{Array, Map, MapData, SkStorage};
use aya::{Pod, include_bytes_aligned};
use fourtuple_syscalls::Errno;

use crate::call::{self, AllAtomic, Shared};
use crate::error::BpfError;
use crate::group_map::{Chooser, Control};
use crate::object::Program;
use crate::tracing::{self, Programs, failure, monotonic_ns, thread_name};

const NAME: &str = "fix_accept_counts";

/// Maximum number of listeners at a time.
pub const LISTENERS: usize = 4096;
/// Maximum number of listeners of one group.
pub const MEMBERS: usize = 1024;
/// The name of the selector's program in the kernel.
pub const SELECTOR: &str = "fix_accept";

const PROGRAMS: [(&str, &str); 3] = [
    ("destroyed", "tcp_destroy_sock"),
    ("set_state", "inet_sock_set_state"),
    ("set_state_again", "inet_sock_set_state"),
];
const LEAST_BUSY: u64 = 4;

#[derive(Debug)]
#[repr(C)]
struct Listener {
    socket: AtomicU64,
    queue_at: AtomicU64,
    young_at: AtomicU64,
    open: AtomicU64,
    chosen: AtomicU64,
    connections: AtomicU64,
    generation: AtomicU32,
    mean_us: AtomicU32,
    progress_ns: AtomicU64,
}

#[derive(Debug)]
#[repr(C)]
struct Everything {
    beat_ns: AtomicU64,
    padding: [u64; 7],
    listener: [Listener; LISTENERS],
}

#[derive(Debug)]
#[repr(C)]
struct Group {
    rule: AtomicU64,
    control: AtomicU64,
    control_value: AtomicU64,
    control_listener: AtomicU64,
    members: AtomicU64,
    lapsed: AtomicU64,
    strays: AtomicU64,
    padding: [u64; 1],
    member: [AtomicU32; MEMBERS],
}

// SAFETY: all fields are atomics; `padding` is never read.
unsafe impl AllAtomic for Everything {}
// SAFETY: as above.
unsafe impl AllAtomic for Group {}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Mark {
    listener: u32,
    seen: u32,
    generation: u64,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Answer {
    socket: u64,
    queue_at: u64,
    young_at: u64,
    group: u64,
    members: u32,
    has_program: u32,
    program: u32,
    hole: u32,
    program_name: [u8; 16],
}

// SAFETY: integers without holes, in the layout of the map's values.
unsafe impl Pod for Mark {}
// SAFETY: as above.
unsafe impl Pod for Answer {}

// The layouts must equal the layouts in fix_accept.h, fix_accept.bpf.c and fix_accept_counts.bpf.c.
const _: () = assert!(mem::size_of::<Listener>() == 64 && mem::offset_of!(Listener, progress_ns) == 56);
const _: () = assert!(mem::size_of::<Everything>() == 64 * (LISTENERS + 1));
const _: () = assert!(mem::size_of::<Group>() == 64 + 4 * MEMBERS && mem::offset_of!(Group, member) == 64);
const _: () = assert!(mem::size_of::<Mark>() == 16 && mem::size_of::<Answer>() == 64);

/// The rule by which a selector chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// The listener with the shortest queue, handshakes in progress included; among equals the one with the fewest open
    /// connections, then a random one. For UDP: the socket with the fewest bytes in its receive queue.
    LeastBusy,
    /// The member whose place is the number of this chooser, modulo the number of members.
    Place(Chooser),
}

/// A socket as the kernel knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundSocket {
    socket: u64,
    queue_at: u64,
    young_at: u64,
    /// Number that identifies its SO_REUSEPORT group while the group exists, also when the group grows; `None` without a group.
    pub group: Option<u64>,
    /// Number of sockets in the group.
    pub members: u32,
    /// Selector that is attached to the group.
    pub program: Option<FoundProgram>,
}

/// A selector that is attached to a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundProgram {
    /// Id of the program; 0 for classic BPF, which has none.
    pub id: u32,
    /// Name of the program.
    pub name: String,
}

/// The counts of a listener.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AcceptCounts {
    /// Connections or datagrams that the selector sent to the listener.
    pub chosen: u64,
    /// TCP connections that entered its queue.
    pub connections: u64,
    /// Connections that entered its queue and were not closed.
    pub open: u64,
}

/// Asks the kernel about sockets and their groups, without a trace and without a change of any socket.
pub struct Learner {
    programs: Programs,
    answer: Array<MapData, Answer>,
    learn: OwnedFd,
}

impl fmt::Debug for Learner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Learner").finish_non_exhaustive()
    }
}

impl Learner {
    /// Loads the program.
    ///
    /// # Errors
    ///
    /// As for [`FixAccept::attach`].
    pub fn load() -> Result<Learner, BpfError> {
        let mut programs = Programs::load(NAME, include_bytes_aligned!("fix_accept_counts.o"))?;
        let answer = programs.map("answer")?;
        let learn = programs.runnable("learn")?;
        Ok(Learner { programs, answer, learn })
    }

    /// Asks the kernel about a socket of this process.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails, or with ENOTSOCK for another file.
    pub fn learn(&self, socket: BorrowedFd<'_>) -> Result<FoundSocket, BpfError> {
        let call = |source| BpfError::of("bpf(BPF_PROG_TEST_RUN)", source);
        loop {
            match call::run(self.learn.as_fd(), socket.as_raw_fd() as u64) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                result => break result.map_err(call)?,
            }
        }
        let answer = tracing::value(NAME, &self.answer)?;
        if answer.socket == 0 {
            return Err(call(Errno::ENOTSOCK.into()));
        }
        let name = thread_name(&answer.program_name);
        Ok(FoundSocket {
            socket: answer.socket,
            queue_at: answer.queue_at,
            young_at: answer.young_at,
            group: (answer.group != 0).then_some(answer.group),
            members: answer.members,
            program: (answer.has_program != 0).then_some(FoundProgram { id: answer.program, name }),
        })
    }
}

/// The maps and the counting programs, which all groups share. The kernel detaches the programs when this value is dropped or the
/// process ends; a [`GroupSelector`] without heartbeat chooses no more.
pub struct FixAccept {
    learner: Learner,
    marks: SkStorage<MapData, Mark>,
    /// The programs need the map when they are loaded.
    _array: MapData,
    listeners: OwnedFd,
    sockets: OwnedFd,
    state: Arc<Shared<Everything>>,
}

impl fmt::Debug for FixAccept {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("FixAccept").finish_non_exhaustive()
    }
}

/// Tells the selectors that the process lives.
#[derive(Clone, Debug)]
pub struct Heartbeat(Arc<Shared<Everything>>);

impl Heartbeat {
    /// Time without a heartbeat after which the kernel's hash chooses, in milliseconds.
    pub const TIMEOUT_MS: u64 = 500;

    /// Lets the selectors choose until [`Heartbeat::TIMEOUT_MS`] from now.
    pub fn beat(&self) {
        self.0.beat_ns.store(monotonic_ns(), Ordering::Release);
    }
}

impl FixAccept {
    /// Loads the counting programs and attaches them.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON; [`BpfError::Absent`] on a kernel without BTF;
    /// [`BpfError::Refused`] by a kernel without socket storage in tracing programs (Linux 5.11).
    pub fn attach() -> Result<FixAccept, BpfError> {
        let mut learner = Learner::load()?;
        let programs = &mut learner.programs;
        let array = match programs.map("listeners")? {
            Map::Array(array) => array,
            _ => {
                return Err(BpfError::Object { program: NAME, what: "listeners is not an array".to_owned() });
            }
        };
        let listeners = array.fd().as_fd().try_clone_to_owned();
        let listeners = listeners.map_err(|source| BpfError::of("fcntl(F_DUPFD_CLOEXEC)", source))?;
        let state = Shared::map(listeners.as_fd())?;
        let sockets = call::create_socket_map(LISTENERS, "sockets")?;
        let marks = programs.map("marks")?;
        for (program, tracepoint) in PROGRAMS {
            programs.attach(program, tracepoint)?;
        }
        let state = Arc::new(state);
        Ok(FixAccept { learner, marks, _array: array, listeners, sockets, state })
    }

    /// Returns the heartbeat of all selectors.
    pub fn heartbeat(&self) -> Heartbeat {
        Heartbeat(Arc::clone(&self.state))
    }

    /// Returns the part that asks about sockets.
    pub fn learner(&self) -> &Learner {
        &self.learner
    }

    /// Gives a free entry to a socket: counts its connections, and with `is_choice` makes it eligible for selectors. The kernel
    /// removes the socket from the entry when it is closed.
    ///
    /// # Errors
    ///
    /// [`BpfError::NoSuchSeat`]. [`BpfError::Call`], with EINVAL for a socket outside of a group, EBUSY for a socket that is in
    /// another map of sockets.
    pub fn enter(
        &mut self,
        entry: usize,
        socket: BorrowedFd<'_>,
        found: &FoundSocket,
        is_choice: bool,
    ) -> Result<(), BpfError> {
        let of_entry = self.entry(entry)?;
        of_entry.socket.store(0, Ordering::Release);
        let generation = of_entry.generation.fetch_add(1, Ordering::AcqRel) + 1;
        for counter in [&of_entry.open, &of_entry.chosen, &of_entry.connections, &of_entry.progress_ns] {
            counter.store(0, Ordering::Relaxed);
        }
        of_entry.mean_us.store(0, Ordering::Relaxed);
        of_entry.queue_at.store(found.queue_at, Ordering::Relaxed);
        of_entry.young_at.store(found.young_at, Ordering::Relaxed);
        if is_choice {
            call::put_socket(self.sockets.as_fd(), entry as u32, socket)?;
        }
        let mark = Mark { listener: entry as u32, seen: 0, generation: generation.into() };
        self.marks
            .insert(&socket.as_raw_fd(), mark, 0)
            .map_err(|error| failure(NAME, "bpf(BPF_MAP_UPDATE_ELEM) of socket storage", &error))?;
        // Last: selectors skip an entry without a socket.
        self.entry(entry)?.socket.store(found.socket, Ordering::Release);
        Ok(())
    }

    /// Frees an entry. Its counts stay readable until the entry is given to another socket.
    pub fn leave(&self, entry: usize) {
        if let Ok(of_entry) = self.entry(entry) {
            of_entry.socket.store(0, Ordering::Release);
            let _ = call::take_socket(self.sockets.as_fd(), entry as u32);
        }
    }

    /// Returns the counts of an entry.
    ///
    /// # Errors
    ///
    /// [`BpfError::NoSuchSeat`]
    pub fn counts(&self, entry: usize) -> Result<AcceptCounts, BpfError> {
        let of_entry = self.entry(entry)?;
        Ok(AcceptCounts {
            chosen: of_entry.chosen.load(Ordering::Relaxed),
            connections: of_entry.connections.load(Ordering::Relaxed),
            open: of_entry.open.load(Ordering::Relaxed),
        })
    }

    /// Returns the number of events that the counting programs missed because they were already running on that processor.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn missed(&self) -> Result<u64, BpfError> {
        self.learner.programs.missed()
    }

    /// Loads a selector for one group. It has no members yet, so that the kernel's hash chooses.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`]; [`BpfError::Absent`] before Linux 5.14.
    pub fn selector(
        &self,
        selection: Selection,
        control: Option<Control>,
    ) -> Result<GroupSelector, BpfError> {
        let program = Program::read(SELECTOR, include_bytes!("fix_accept.o"))?;
        let (group, state) = Shared::<Group>::create("group")?;
        let rule = match selection {
            Selection::LeastBusy => LEAST_BUSY,
            Selection::Place(chooser) => chooser.word(),
        };
        state.rule.store(rule, Ordering::Release);
        if let Some((word, value)) = control.map(Control::words) {
            state.control_value.store(value, Ordering::Release);
            state.control.store(word, Ordering::Release);
        }
        let program =
            program.load(&[("listeners", &self.listeners), ("group", &group), ("sockets", &self.sockets)])?;
        Ok(GroupSelector { program, state })
    }

    fn entry(&self, entry: usize) -> Result<&Listener, BpfError> {
        self.state.listener.get(entry).ok_or(BpfError::NoSuchSeat { seat: entry, seats: LISTENERS })
    }
}

/// The selector of one group. It stays attached after this value is dropped, until it is detached or the group ends.
#[derive(Debug)]
pub struct GroupSelector {
    program: OwnedFd,
    state: Shared<Group>,
}

impl GroupSelector {
    /// Attaches the selector to the group of a socket, and replaces the selector that the group had.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`]
    pub fn attach(&self, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        call::attach(socket, self.program.as_fd())
    }

    /// Returns the id of the program.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn id(&self) -> Result<u32, BpfError> {
        call::program_id(self.program.as_fd())
            .map_err(|source| BpfError::of("bpf(BPF_OBJ_GET_INFO_BY_FD)", source))
    }

    /// Sets the entries among which the selector chooses, at most [`MEMBERS`]. With a filter for control packets, the first entry
    /// gets the control packets and no others, unless it is the only entry.
    pub fn set_members(&self, entries: &[usize]) {
        let has_control = self.state.control.load(Ordering::Relaxed) != 0;
        let others = match entries {
            [control, others @ ..] if has_control => {
                self.state.control_listener.store(*control as u64, Ordering::Release);
                if others.is_empty() { entries } else { others }
            }
            _ => entries,
        };
        let others = &others[..others.len().min(MEMBERS)];
        // A packet that meets both the old number and a new place, or the reverse, reaches a member even so.
        for (place, entry) in self.state.member.iter().zip(others) {
            place.store(*entry as u32, Ordering::Release);
        }
        self.state.members.store(others.len() as u64, Ordering::Release);
    }

    /// Returns the packets for which the selector left the choice to the kernel's hash: without a heartbeat, and because it met
    /// closed listeners only.
    pub fn left(&self) -> (u64, u64) {
        (self.state.lapsed.load(Ordering::Relaxed), self.state.strays.load(Ordering::Relaxed))
    }
}
