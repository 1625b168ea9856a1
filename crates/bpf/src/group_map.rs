//! A group of UDP sockets with a table that selects the socket for each datagram. The table may change at any time.

use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::call::{self, AllAtomic, Shared};
use crate::error::BpfError;
use crate::object::Program;

const SLOTS: usize = 4096;
const SEATS: usize = 1024;

#[derive(Debug)]
#[repr(C)]
struct State {
    rule: AtomicU64,
    control: AtomicU64,
    control_value: AtomicU64,
    strays: AtomicU64,
    padding: [u64; 4],
    slot: [AtomicU32; SLOTS],
}

// SAFETY: all fields are atomics; `padding` is never read.
unsafe impl AllAtomic for State {}

// The layout must equal struct state in group_map.bpf.c.
const _: () = assert!(mem::offset_of!(State, slot) == 64 && mem::size_of::<State>() == 64 + 4 * SLOTS);

/// The value that selects the slot of the table, modulo the number of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Chooser {
    /// The kernel's hash of the 4-tuple.
    Hash,
    Random,
    /// A big-endian number in the payload. For packets too short to contain the number, it is 0.
    Key {
        /// Offset of the number in bytes.
        offset: u16,
        /// Length of the number: 1, 2 or 4 bytes.
        width: u8,
        /// The mask of the bits that count.
        mask: u32,
    },
    /// The number of the processor that handles the packet.
    Processor,
}

/// The property that marks a control packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Control {
    /// A big-endian number in the payload, masked.
    Bytes {
        /// Offset of the number in bytes.
        offset: u16,
        /// Length of the number: 1, 2 or 4 bytes.
        width: u8,
        /// The mask of the bits that count.
        mask: u32,
        /// The value of these bits.
        value: u32,
    },
    /// The TTL or hop limit of the received packet.
    Hops(u8),
    SourcePort(u16),
    /// A number in the payload as in `Bytes`, of a packet received with a TTL or hop limit of 255.
    Neighbour {
        /// Offset of the number in bytes.
        offset: u16,
        /// Length of the number: 1, 2 or 4 bytes.
        width: u8,
        /// The mask of the bits that count.
        mask: u32,
        /// The value of these bits.
        value: u32,
    },
}

/// Packs kind, width, offset and mask into the word that the program unpacks.
fn word(kind: u8, offset: u16, width: u8, mask: u32) -> u64 {
    u64::from(mask) << 32 | u64::from(offset) << 16 | u64::from(width) << 8 | u64::from(kind)
}

impl Control {
    /// Returns the word for the program, and the value of the field.
    pub(crate) fn words(self) -> (u64, u64) {
        let (control, value) = match self {
            Control::Bytes { offset, width, mask, value } => (word(1, offset, width, mask), value),
            Control::Hops(hops) => (word(2, 0, 0, 0), hops.into()),
            Control::SourcePort(port) => (word(3, 0, 0, 0), port.into()),
            Control::Neighbour { offset, width, mask, value } => (word(4, offset, width, mask), value),
        };
        (control, value.into())
    }
}

impl Chooser {
    pub(crate) fn word(self) -> u64 {
        match self {
            Chooser::Hash => 0,
            Chooser::Random => 1,
            Chooser::Key { offset, width, mask } => word(2, offset, width, mask),
            Chooser::Processor => 3,
        }
    }
}

/// Returns the seat number for the program. The number after the last seat is for control packets and is out of range here.
fn number(seat: usize) -> Result<u32, BpfError> {
    if seat < SEATS { Ok(seat as u32) } else { Err(BpfError::NoSuchSeat { seat, seats: SEATS }) }
}

/// The program, its sockets and its table. The kernel frees them with this value and the last socket of the group.
#[derive(Debug)]
pub struct GroupMap {
    program: OwnedFd,
    sockets: OwnedFd,
    /// The mapped state. The map lives as long as this mapping and the program.
    state: Shared<State>,
}

impl GroupMap {
    /// Entries of the table.
    pub const SLOTS: usize = SLOTS;
    /// Maximum number of sockets for data packets.
    pub const SEATS: usize = SEATS;

    /// Loads the program into the kernel. All slots point to seat 0.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_NET_ADMIN, [`BpfError::Absent`] before Linux 5.14.
    pub fn load(chooser: Chooser, control: Option<Control>) -> Result<GroupMap, BpfError> {
        let program = Program::read("group_map", include_bytes!("group_map.o"))?;
        let sockets = call::create_socket_map(SEATS + 1, "sockets")?;
        let (array, state) = Shared::<State>::create("state")?;
        state.rule.store(chooser.word(), Ordering::Release);
        if let Some(control) = control {
            let (control, value) = control.words();
            state.control_value.store(value, Ordering::Release);
            state.control.store(control, Ordering::Release);
        }
        let program = program.load(&[("state", &array), ("sockets", &sockets)])?;
        Ok(GroupMap { program, sockets, state })
    }

    /// Attaches the program to the SO_REUSEPORT group that a UDP socket belongs to or will create with bind().
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`], with EINVAL for a socket without SO_REUSEPORT.
    pub fn attach(&self, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        call::attach(socket, self.program.as_fd())
    }

    /// Puts a bound socket of the group at a seat and replaces the socket that was there.
    ///
    /// # Errors
    ///
    /// [`BpfError::NoSuchSeat`]. [`BpfError::Call`], with EINVAL for a socket that is not bound or lacks SO_REUSEPORT, EBUSY
    /// for a socket that has a seat already.
    pub fn seat(&self, seat: usize, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        call::put_socket(self.sockets.as_fd(), number(seat)?, socket)
    }

    /// Makes a bound socket of the group the receiver of control packets.
    ///
    /// # Errors
    ///
    /// The errors of [`GroupMap::seat`].
    pub fn seat_control(&self, socket: BorrowedFd<'_>) -> Result<(), BpfError> {
        call::put_socket(self.sockets.as_fd(), SEATS as u32, socket)
    }

    /// Empties a seat. Packets for its slots then go to the next slots with a socket.
    ///
    /// # Errors
    ///
    /// [`BpfError::NoSuchSeat`]; [`BpfError::Call`]. An empty seat is not an error.
    pub fn leave(&self, seat: usize) -> Result<(), BpfError> {
        call::take_socket(self.sockets.as_fd(), number(seat)?)
    }

    /// Sets how a packet selects its slot, from the next packet on.
    pub fn choose(&self, chooser: Chooser) {
        self.state.rule.store(chooser.word(), Ordering::Release);
    }

    /// Assigns a slot to a seat, from the next packet on. A slot number out of range has no effect.
    ///
    /// # Errors
    ///
    /// [`BpfError::NoSuchSeat`]
    pub fn give(&self, slot: usize, seat: usize) -> Result<(), BpfError> {
        let seat = number(seat)?;
        if let Some(slot) = self.state.slot.get(slot) {
            slot.store(seat, Ordering::Release);
        }
        Ok(())
    }

    /// Returns the number of packets for which the slot and the seven slots after it had empty seats, so that the kernel's hash
    /// chose.
    pub fn strays(&self) -> u64 {
        self.state.strays.load(Ordering::Relaxed)
    }
}
