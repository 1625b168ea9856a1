//! Passes packets for a group to processors, independently of which processor the device interrupted.

use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use fourtuple_syscalls::Errno;

use crate::call::{self, AllAtomic, MapKind, Shared};
use crate::error::BpfError;
use crate::group_map::Chooser;
use crate::object::Program;
use crate::xdp::{self, Attached, Counted, Counts, Mode, ModeRequest, PROCESSORS, Target};

/// The value of a map entry: how many packets may wait for the processor. Further packets are dropped.
const QUEUE: u64 = 2048;

#[derive(Debug)]
#[repr(C)]
struct State {
    target: Target,
    processors: AtomicU32,
    kind: AtomicU32,
    offset: AtomicU32,
    width: AtomicU32,
    mask: AtomicU32,
    hole: u32,
    cursor: AtomicU64,
    padding: [u64; 1],
    counts: [Counts; PROCESSORS],
}

// SAFETY: all fields are atomics or padding that is never read.
unsafe impl AllAtomic for State {}

// The layout must equal struct state in cpu_map.bpf.c.
const _: () = assert!(mem::offset_of!(State, cursor) == 48 && mem::offset_of!(State, counts) == 64);

const IN_TURN: u32 = 0;
const AT_RANDOM: u32 = 1;
const BY_KEY: u32 = 2;

/// The program at its device, and one kernel thread for each processor that receives packets.
///
/// In native mode the program redirects packets before their checksum is verified. A packet of a sender on this host may have
/// no checksum yet, because its device leaves that to the next device (CHECKSUM_PARTIAL); it then arrives with a wrong checksum.
/// Over veth with tx offload on, all packets are lost this way.
#[derive(Debug)]
pub struct CpuMap {
    state: Shared<State>,
    attached: Attached,
    _map: OwnedFd,
}

impl CpuMap {
    /// Maximum offset of a key within the payload, in bytes.
    pub const FARTHEST_KEY: u16 = 0x3fff;

    /// Loads the program and attaches it to the device with the index `device`. Packets to `group` go to the processors 0 to
    /// `processors` - 1, which `by` chooses; [`Chooser::Hash`] and [`Chooser::Processor`] mean round robin.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_NET_ADMIN; [`BpfError::Absent`] before Linux 5.9;
    /// [`BpfError::Busy`]; [`BpfError::Processors`]; [`BpfError::Call`] for a device whose packets are too long for XDP.
    pub fn attach(
        group: SocketAddr,
        processors: u32,
        by: Chooser,
        device: u32,
        wish: ModeRequest,
    ) -> Result<CpuMap, BpfError> {
        let (program, state, map) = load(group, processors, by)?;
        let attached = xdp::attach(program.as_fd(), device, wish)?;
        Ok(CpuMap { state, attached, _map: map })
    }

    /// Returns the BPF link. The program stays at the device while a descriptor of the link is open, also after this value is
    /// dropped, so that another process can take over.
    pub fn link(&self) -> BorrowedFd<'_> {
        self.attached.link()
    }

    /// Returns the mode in which the program is attached.
    pub fn mode(&self) -> Mode {
        self.attached.mode
    }

    /// Returns the packets counted so far.
    pub fn counted(&self) -> Counted {
        xdp::counted(&self.state.counts)
    }
}

/// Loads the program and returns it with its state and the map of processors.
fn load(
    group: SocketAddr,
    processors: u32,
    by: Chooser,
) -> Result<(OwnedFd, Shared<State>, OwnedFd), BpfError> {
    let program = Program::read("cpu_map", include_bytes!("cpu_map.o"))?;
    let (array, state) = Shared::<State>::create("state")?;
    // The map is larger than the kernel allows, or this machine has fewer processors.
    let refused = |call, source: std::io::Error| match Errno::of(&source) {
        Some(Errno::E2BIG | Errno::ENODEV | Errno::EINVAL) => {
            BpfError::Processors { wanted: processors, call, source }
        }
        _ => BpfError::of(call, source),
    };
    let map = call::create_map(MapKind::Processors, 4, processors as usize, 0, "processors")
        .map_err(|source| refused(call::CREATE_MAP, source))?;
    for processor in 0..processors {
        call::put(map.as_fd(), processor, QUEUE)
            .map_err(|source| refused("bpf(BPF_MAP_UPDATE_ELEM)", source))?;
    }
    state.target.set(group);
    state.processors.store(processors, Ordering::Relaxed);
    let kind = match by {
        Chooser::Random => AT_RANDOM,
        Chooser::Key { offset, width, mask } => {
            state.offset.store(offset.into(), Ordering::Relaxed);
            state.width.store(width.into(), Ordering::Relaxed);
            state.mask.store(mask, Ordering::Relaxed);
            BY_KEY
        }
        Chooser::Hash | Chooser::Processor => IN_TURN,
    };
    state.kind.store(kind, Ordering::Relaxed);
    let program = program.load(&[("state", &array), ("processors", &map)])?;
    Ok((program, state, map))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{self, Net, Packet};

    const REDIRECT: u32 = 4;
    const PASS: u32 = 2;

    #[test]
    fn only_packets_for_the_group_are_redirected() {
        let _alone = packet::alone();
        let test = "only_packets_for_the_group_are_redirected";
        let key = |offset, width| Chooser::Key { offset, width, mask: u32::MAX };
        let choosers =
            [Chooser::Hash, Chooser::Random, key(0, 4), key(1, 2), key(3, 1), key(CpuMap::FARTHEST_KEY, 4)];
        for by in choosers {
            let loaded = packet::loaded(test, load("[::]:7000".parse().unwrap(), 1, by));
            let Some((program, state, _map)) = loaded else { return };
            for (packet, expected) in [
                (Packet::new(Net::V4 { options: 8 }, &[], b"data"), REDIRECT),
                (Packet::new(Net::V6, &[0x8100], b"data"), REDIRECT),
                (Packet::new(Net::V6, &[], b""), REDIRECT),
            ] {
                let (action, bytes) = call::run_on_packet(program.as_fd(), &packet.bytes).unwrap();
                assert_eq!((action, bytes), (expected, packet.bytes), "{by:?}");
            }
            let mut fragment = Packet::new(Net::V4 { options: 0 }, &[], b"data");
            fragment.bytes[20] = 0x20;
            assert_eq!(call::run_on_packet(program.as_fd(), &fragment.bytes).unwrap().0, PASS);
            assert_eq!(xdp::counted(&state.counts), Counted { changed: 3, passed: 1 });
        }
    }

    /// Checks that a packet for a processor without an entry in the CPUMAP passes; a redirect would drop it.
    #[test]
    fn without_the_processor_a_packet_passes() {
        let _alone = packet::alone();
        let Ok((program, state, _map)) = load("[::]:7000".parse().unwrap(), 1, Chooser::Hash) else { return };
        state.processors.store(1000, Ordering::Relaxed);
        state.cursor.store(1, Ordering::Relaxed);
        let packet = Packet::new(Net::V6, &[], b"data");
        assert_eq!(call::run_on_packet(program.as_fd(), &packet.bytes).unwrap().0, PASS);
        assert_eq!(xdp::counted(&state.counts), Counted { changed: 0, passed: 1 });
    }
}
