//! A group of UDP sockets whose table says who gets a datagram, and may be changed while they come.

use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::call::{self, MapKind};
use crate::error::BpfError;
use crate::object::Program;
use crate::shared::{AllAtomic, Shared};

const SLOTS: usize = 4096;
const SEATS: usize = 1024;

#[derive(Debug)]
#[repr(C)]
struct State {
    rule: AtomicU64,
    control: AtomicU64,
    control_value: AtomicU64,
    strays: AtomicU64,
    room: [u64; 4],
    slot: [AtomicU32; SLOTS],
}

// SAFETY: all of it is atomics; `room` is never read.
unsafe impl AllAtomic for State {}

// As struct state in group_map.bpf.c.
const _: () = assert!(mem::offset_of!(State, slot) == 64 && mem::size_of::<State>() == 64 + 4 * SLOTS);

/// What chooses the slot of the table, modulo their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Chooser {
    /// The kernel's hash of the 4-tuple.
    Hash,
    /// A random number.
    Random,
    /// A big-endian number in the payload. Packets that end before it have the number 0.
    Key {
        /// Where it begins, in bytes.
        offset: u16,
        /// Its length: 1, 2 or 4 bytes.
        width: u8,
        /// Which of its bits count.
        mask: u32,
    },
    /// The number of the processor that handles the packet.
    Processor,
}

/// What makes a packet one of control.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Control {
    /// A big-endian number in the payload, masked.
    Bytes {
        /// Where it begins, in bytes.
        offset: u16,
        /// Its length: 1, 2 or 4 bytes.
        width: u8,
        /// Which of its bits count.
        mask: u32,
        /// What they are.
        value: u32,
    },
    /// The time to live, or hop limit, with which it came.
    Hops(u8),
    /// Its source port.
    SourcePort(u16),
    /// A number in the payload as in `Bytes`, of a packet that came with 255 hops to live.
    Neighbour {
        /// Where it begins, in bytes.
        offset: u16,
        /// Its length: 1, 2 or 4 bytes.
        width: u8,
        /// Which of its bits count.
        mask: u32,
        /// What they are.
        value: u32,
    },
}

/// Kind, width, offset and mask, as the program takes them apart.
fn word(kind: u8, offset: u16, width: u8, mask: u32) -> u64 {
    u64::from(mask) << 32 | u64::from(offset) << 16 | u64::from(width) << 8 | u64::from(kind)
}

impl Chooser {
    fn word(self) -> u64 {
        match self {
            Chooser::Hash => 0,
            Chooser::Random => 1,
            Chooser::Key { offset, width, mask } => word(2, offset, width, mask),
            Chooser::Processor => 3,
        }
    }
}

/// The program, its sockets and its table. Everything ends with the value and the last socket of the group.
#[derive(Debug)]
pub struct GroupMap {
    program: OwnedFd,
    sockets: OwnedFd,
    /// Only its mapping is used; the map lives as long as that and the program.
    state: Shared<State>,
}

impl GroupMap {
    /// Entries of the table.
    pub const SLOTS: usize = SLOTS;
    /// The most sockets that data can be spread over.
    pub const SEATS: usize = SEATS;

    /// Gives the program to the kernel. All slots are seat 0's.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_NET_ADMIN, [`BpfError::Absent`] before Linux 5.14.
    pub fn load(chooser: Chooser, control: Option<Control>) -> Result<GroupMap, BpfError> {
        let program = Program::read("group_map", include_bytes!("group_map.o"))?;
        let map = |kind, size, entries, flags, name, what| {
            call::create_map(kind, size, entries, flags, name)
                .map_err(|source| BpfError::or_absent("bpf(BPF_MAP_CREATE)", what, source))
        };
        let sockets = map(MapKind::Sockets, 8, SEATS + 1, 0, "sockets", "REUSEPORT_SOCKARRAY (Linux 4.19)")?;
        let size = mem::size_of::<State>();
        let array = map(MapKind::Array, size, 1, call::MMAPABLE, "state", "BPF_F_MMAPABLE (Linux 5.5)")?;
        let state = Shared::<State>::map(array.as_fd())
            .map_err(|source| BpfError::of("mmap of a BPF array", source))?;
        state.rule.store(chooser.word(), Ordering::Release);
        if let Some(control) = control {
            let (control, value) = match control {
                Control::Bytes { offset, width, mask, value } => (word(1, offset, width, mask), value),
                Control::Hops(hops) => (word(2, 0, 0, 0), hops.into()),
                Control::SourcePort(port) => (word(3, 0, 0, 0), port.into()),
                Control::Neighbour { offset, width, mask, value } => (word(4, offset, width, mask), value),
            };
            state.control_value.store(value.into(), Ordering::Release);
            state.control.store(control, Ordering::Release);
        }
        let program = program.load(&[("state", &array), ("sockets", &sockets)])?;
        Ok(GroupMap { program, sockets, state })
    }

    /// Makes it the program of the group that a UDP socket with SO_REUSEPORT belongs to or will found with bind().
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`], with EINVAL for a socket without SO_REUSEPORT.
    pub fn attach(&self, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        call::attach(socket, self.program.as_fd())
            .map_err(|source| BpfError::of("setsockopt(SO_ATTACH_REUSEPORT_EBPF)", source))
    }

    /// Puts a bound socket of the group at a seat, in place of who was there.
    ///
    /// # Errors
    ///
    /// [`BpfError::NoSuchSeat`]. [`BpfError::Call`], with EINVAL for a socket that is not bound or lacks SO_REUSEPORT, EBUSY
    /// for one that has a seat already.
    pub fn seat(&self, seat: usize, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        if seat >= SEATS {
            return Err(BpfError::NoSuchSeat { seat, seats: SEATS });
        }
        self.put(seat, socket)
    }

    /// Makes a bound socket of the group the one that control packets go to.
    ///
    /// # Errors
    ///
    /// As [`GroupMap::seat`].
    pub fn seat_control(&self, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        self.put(SEATS, socket)
    }

    fn put(&self, seat: usize, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        call::put_socket(self.sockets.as_fd(), seat as u32, socket)
            .map_err(|source| BpfError::of("bpf(BPF_MAP_UPDATE_ELEM)", source))
    }

    /// Empties a seat. What its slots still get goes to the next slots that have somebody.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`]; an empty seat is none.
    pub fn leave(&self, seat: usize) -> Result<(), BpfError> {
        match call::take_socket(self.sockets.as_fd(), seat as u32) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => {
                Err(BpfError::of("bpf(BPF_MAP_DELETE_ELEM)", error))
            }
            _ => Ok(()),
        }
    }

    /// Another way to choose, from the next packet on.
    pub fn choose(&self, chooser: Chooser) {
        self.state.rule.store(chooser.word(), Ordering::Release);
    }

    /// Gives a slot to a seat, from the next packet on. Slots beyond the last are nobody's.
    pub fn give(&self, slot: usize, seat: usize) {
        if let Some(slot) = self.state.slot.get(slot) {
            slot.store(seat as u32, Ordering::Release);
        }
    }

    /// Packets whose slot and the seven behind it were of empty seats, so that the kernel's hash chose.
    pub fn strays(&self) -> u64 {
        self.state.strays.load(Ordering::Relaxed)
    }
}
