//! Packets of one 4-tuple are given many source ports, before the kernel sees them.

use std::mem;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::call::{self, MapKind};
use crate::error::BpfError;
use crate::object::Program;
use crate::shared::{AllAtomic, Shared};
use crate::xdp::{self, Attached, Counted, Counts, Mode, PROCESSORS, Target, Wish};

/// The first port that packets are given; this one and those above are nobody's by right (RFC 6335, dynamic ports).
const FIRST: u16 = 49_152;

#[derive(Debug)]
#[repr(C)]
struct State {
    target: Target,
    first: AtomicU32,
    ports: AtomicU32,
    counts: [Counts; PROCESSORS],
}

// SAFETY: all of it is atomics, or room that is never read.
unsafe impl AllAtomic for State {}

// As struct state in source_port.bpf.c.
const _: () = assert!(mem::offset_of!(State, counts) == 32);

/// The program at its device. The receiver sees the ports that it gave, so replies do not reach the sender.
///
/// The sum over a packet stays what it was, for the checksum makes up for the port (RFC 1624): also where the network card
/// has computed it (CHECKSUM_COMPLETE). A packet that has no checksum yet (CHECKSUM_PARTIAL: from a sender on this host whose
/// device leaves it to the next one) is received, and must not be forwarded.
#[derive(Debug)]
pub struct SourcePort {
    state: Shared<State>,
    attached: Attached,
}

impl SourcePort {
    /// The most ports that can be given.
    pub const MOST: u16 = u16::MAX - FIRST + 1;

    /// Loads the program and puts it before the device with the index `device`: packets to `group` come from one of `ports`
    /// ports, 1 to [`SourcePort::MOST`], chosen at random for each.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_NET_ADMIN; [`BpfError::Absent`] before Linux 5.9;
    /// [`BpfError::Busy`].
    pub fn attach(group: SocketAddr, ports: u16, device: u32, wish: Wish) -> Result<SourcePort, BpfError> {
        let program = Program::read("source_port", include_bytes!("source_port.o"))?;
        let size = mem::size_of::<State>();
        let array = call::create_map(MapKind::Array, size, 1, call::MMAPABLE, "state").map_err(|source| {
            BpfError::or_absent("bpf(BPF_MAP_CREATE)", "BPF_F_MMAPABLE (Linux 5.5)", source)
        })?;
        let state = Shared::<State>::map(array.as_fd())
            .map_err(|source| BpfError::of("mmap of a BPF array", source))?;
        state.target.set(group);
        state.first.store(FIRST.into(), Ordering::Relaxed);
        state.ports.store(ports.clamp(1, SourcePort::MOST).into(), Ordering::Relaxed);
        let program = program.load(&[("state", &array)])?;
        let attached = xdp::attach(program.as_fd(), device, wish)?;
        Ok(SourcePort { state, attached })
    }

    /// Where it sees packets.
    pub fn mode(&self) -> Mode {
        self.attached.mode
    }

    /// What it did so far.
    pub fn counted(&self) -> Counted {
        xdp::counted(&self.state.counts)
    }
}
