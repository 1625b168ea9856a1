//! Packets for a group are given to processors, whichever one the device interrupted.

use std::mem;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::call::{self, MapKind};
use crate::error::BpfError;
use crate::group_map::Chooser;
use crate::object::Program;
use crate::shared::{AllAtomic, Shared};
use crate::xdp::{self, Attached, Counted, Counts, Mode, PROCESSORS, Target, Wish};

/// What an entry of the map says: how many packets may wait for the processor. More are dropped.
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
    room: [u64; 1],
    counts: [Counts; PROCESSORS],
}

// SAFETY: all of it is atomics, or room that is never read.
unsafe impl AllAtomic for State {}

// As struct state in cpu_map.bpf.c.
const _: () = assert!(mem::offset_of!(State, cursor) == 48 && mem::offset_of!(State, counts) == 64);

const IN_TURN: u32 = 0;
const AT_RANDOM: u32 = 1;
const BY_KEY: u32 = 2;

/// The program at its device, and a thread of the kernel for each processor that it gives packets to.
///
/// Native, it takes packets away before their checksum is looked at, and those that have none yet, of a sender on this host
/// whose device leaves it to the next one (CHECKSUM_PARTIAL), come out with a wrong one: over veth with tx offload on all is
/// lost.
#[derive(Debug)]
pub struct CpuMap {
    state: Shared<State>,
    attached: Attached,
    _map: OwnedFd,
}

impl CpuMap {
    /// How far into the payload a key may begin, in bytes.
    pub const FARTHEST_KEY: u16 = 0x3fff;

    /// Loads the program and puts it before the device with the index `device`: packets to `group` go to the processors 0 to
    /// `processors` - 1, in turn or as `by` says, of which [`Chooser::Hash`] and [`Chooser::Processor`] mean in turn.
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
        wish: Wish,
    ) -> Result<CpuMap, BpfError> {
        let (program, state, map) = load(group, processors, by)?;
        let attached = xdp::attach(program.as_fd(), device, wish)?;
        Ok(CpuMap { state, attached, _map: map })
    }

    /// What keeps it at the device, also when this value is gone, as long as a descriptor of it is open: for a process that is
    /// to take over.
    pub fn link(&self) -> BorrowedFd<'_> {
        self.attached.link()
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

/// The program, its state, and the map of processors.
fn load(
    group: SocketAddr,
    processors: u32,
    by: Chooser,
) -> Result<(OwnedFd, Shared<State>, OwnedFd), BpfError> {
    const CREATE: &str = "bpf(BPF_MAP_CREATE)";
    let program = Program::read("cpu_map", include_bytes!("cpu_map.o"))?;
    let size = mem::size_of::<State>();
    let array = call::create_map(MapKind::Array, size, 1, call::MMAPABLE, "state")
        .map_err(|source| BpfError::or_absent(CREATE, "BPF_F_MMAPABLE (Linux 5.5)", source))?;
    // More than a machine can have, or than this one has.
    let refused = |call, source: std::io::Error| match source.raw_os_error() {
        Some(libc::E2BIG | libc::ENODEV | libc::EINVAL) => {
            BpfError::Processors { wanted: processors, call, source }
        }
        _ => BpfError::of(call, source),
    };
    let map = call::create_map(MapKind::Processors, 4, processors as usize, 0, "processors")
        .map_err(|source| refused(CREATE, source))?;
    for processor in 0..processors {
        call::put(map.as_fd(), processor, QUEUE)
            .map_err(|source| refused("bpf(BPF_MAP_UPDATE_ELEM)", source))?;
    }
    let state =
        Shared::<State>::map(array.as_fd()).map_err(|source| BpfError::of("mmap of a BPF array", source))?;
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
    fn packets_for_the_group_go_to_processors_and_others_pass() {
        let _alone = packet::alone();
        let test = "packets_for_the_group_go_to_processors_and_others_pass";
        let key = |offset, width| Chooser::Key { offset, width, mask: u32::MAX };
        let choosers =
            [Chooser::Hash, Chooser::Random, key(0, 4), key(1, 2), key(3, 1), key(CpuMap::FARTHEST_KEY, 4)];
        for by in choosers {
            let (program, state, _map) = match load("[::]:7000".parse().unwrap(), 1, by) {
                Ok(loaded) => loaded,
                Err(error @ (BpfError::NotPermitted { .. } | BpfError::Absent { .. })) => {
                    return fourtuple_testing::skip(test, "bpf", &error.to_string());
                }
                Err(error) => panic!("{error}"),
            };
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

    /// What an empty CPUMAP would do to packets if the program did not ask.
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
