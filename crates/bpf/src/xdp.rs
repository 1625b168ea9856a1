//! The common part of the XDP programs: which packets they match, how they are attached and what they count. The counterpart
//! in C is `udp_packet.h`.

use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use fourtuple_syscalls::Errno;

use crate::call;
use crate::error::BpfError;

/// XDP_FLAGS_SKB_MODE and XDP_FLAGS_DRV_MODE (include/uapi/linux/if_link.h).
const GENERIC: u32 = 1 << 1;
const NATIVE: u32 = 1 << 2;

/// The XDP mode, which is the place where a program sees packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// In the device's driver, before the kernel allocates a socket buffer.
    Native,
    /// In the kernel's receive path, for every device; this saves little work.
    Generic,
}

/// The acceptable [`Mode`]s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ModeRequest {
    /// Native if the driver supports it, otherwise generic. The value reports the actual mode.
    #[default]
    Either,
    Only(Mode),
}

/// Counts of the packets that a program changed or passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Packets that the program changed or redirected to a processor.
    pub changed: u64,
    /// Packets that passed unchanged: packets to other destinations, fragments, and IPv6 packets without a checksum.
    pub passed: u64,
}

/// The layout of struct target in udp_packet.h.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Target {
    families: AtomicU32,
    port: AtomicU32,
    address: [AtomicU32; 4],
}

const ANY_IPV4: u32 = 1;
const ANY_IPV6: u32 = 2;
const ONE_IPV4: u32 = 4;
const ONE_IPV6: u32 = 8;

impl Target {
    /// Selects packets to this address; the unspecified address selects all. A socket bound to `[::]` also receives IPv4 packets.
    pub(crate) fn set(&self, group: SocketAddr) {
        let (families, octets) = match group.ip() {
            IpAddr::V4(address) if address.is_unspecified() => (ANY_IPV4, [0; 16]),
            IpAddr::V6(address) if address.is_unspecified() => (ANY_IPV4 | ANY_IPV6, [0; 16]),
            IpAddr::V4(address) => (ONE_IPV4, first_of(address.octets())),
            IpAddr::V6(address) => match address.to_ipv4_mapped() {
                Some(address) => (ONE_IPV4, first_of(address.octets())),
                None => (ONE_IPV6, address.octets()),
            },
        };
        for (word, bytes) in self.address.iter().zip(octets.as_chunks::<4>().0) {
            word.store(u32::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        self.port.store(u32::from(group.port().to_be()), Ordering::Relaxed);
        self.families.store(families, Ordering::Relaxed);
    }
}

fn first_of(octets: [u8; 4]) -> [u8; 16] {
    let mut all = [0; 16];
    all[..4].copy_from_slice(&octets);
    all
}

/// The values of PROCESSORS and struct counts in udp_packet.h.
pub(crate) const PROCESSORS: usize = 512;

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Counts {
    changed: AtomicU64,
    passed: AtomicU64,
    padding: [u64; 6],
}

const _: () = assert!(mem::size_of::<Target>() == 24 && mem::size_of::<Counts>() == 64);

/// Returns the sum over all processors.
pub(crate) fn counted(counts: &[Counts]) -> Counted {
    let sum = |counter: fn(&Counts) -> &AtomicU64| {
        counts.iter().map(|counts| counter(counts).load(Ordering::Relaxed)).sum()
    };
    Counted { changed: sum(|counts| &counts.changed), passed: sum(|counts| &counts.passed) }
}

/// A program attached to a device until the value is dropped or the process ends in any way.
#[derive(Debug)]
pub(crate) struct Attached {
    link: OwnedFd,
    pub(crate) mode: Mode,
}

impl Attached {
    /// Returns the BPF link, which keeps the program and its maps at the device while a descriptor of the link is open.
    pub(crate) fn link(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }
}

/// Attaches a program to the device with this index in the network namespace of the calling thread.
pub(crate) fn attach(program: BorrowedFd<'_>, device: u32, wish: ModeRequest) -> Result<Attached, BpfError> {
    let attach = |mode| {
        let flags = if mode == Mode::Native { NATIVE } else { GENERIC };
        call::link(program, device, flags).map(|link| Attached { link, mode })
    };
    let result = match wish {
        ModeRequest::Only(mode) => attach(mode),
        ModeRequest::Either => match attach(Mode::Native) {
            // The driver has no XDP. Other errors occur in generic mode too, or the caller must see them.
            Err(error) if Errno::of(&error) == Some(Errno::EOPNOTSUPP) => attach(Mode::Generic),
            result => result,
        },
    };
    result.map_err(|source| {
        const CALL: &str = "bpf(BPF_LINK_CREATE)";
        match Errno::of(&source) {
            Some(Errno::EBUSY | Errno::EEXIST) => BpfError::Busy { call: CALL, source },
            Some(Errno::EOPNOTSUPP) => {
                BpfError::Absent { call: CALL, what: "XDP in the driver of this device", source }
            }
            _ => BpfError::or_absent(CALL, "links for XDP (Linux 5.9)", source),
        }
    })
}
