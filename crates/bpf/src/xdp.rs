//! What programs that see packets before the kernel have in common: whose packets they look for, how they are attached, what
//! they count. Its counterpart is `udp_packet.h`.

use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::call;
use crate::error::BpfError;

/// XDP_FLAGS_SKB_MODE, XDP_FLAGS_DRV_MODE (include/uapi/linux/if_link.h)
const GENERIC: u32 = 1 << 1;
const NATIVE: u32 = 1 << 2;

/// Where a program sees packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// In the device's driver, before the kernel has made anything of them.
    Native,
    /// In the kernel, for every device; what it spares is then little.
    Generic,
}

/// Which [`Mode`] will do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Wish {
    /// Native where the driver can, else generic. Which of them it became is told.
    #[default]
    Either,
    /// This one or none.
    Only(Mode),
}

/// What a program did with the packets of its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Packets that it changed, or gave to a processor.
    pub changed: u64,
    /// Packets that it let pass as they were: of others, fragments, what has no checksum where there must be one.
    pub passed: u64,
}

/// As struct target of udp_packet.h.
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
    /// Packets to this address; the unspecified one is all. A socket bound to `[::]` gets those of IPv4 too.
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

/// As PROCESSORS and struct counts of udp_packet.h.
pub(crate) const PROCESSORS: usize = 512;

#[derive(Debug)]
#[repr(C)]
pub(crate) struct Counts {
    changed: AtomicU64,
    passed: AtomicU64,
    room: [u64; 6],
}

const _: () = assert!(mem::size_of::<Target>() == 24 && mem::size_of::<Counts>() == 64);

/// Of all processors.
pub(crate) fn counted(counts: &[Counts]) -> Counted {
    let sum = |counter: fn(&Counts) -> &AtomicU64| {
        counts.iter().map(|counts| counter(counts).load(Ordering::Relaxed)).sum()
    };
    Counted { changed: sum(|counts| &counts.changed), passed: sum(|counts| &counts.passed) }
}

/// A program at a device, until it is dropped or the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct Attached {
    link: OwnedFd,
    pub(crate) mode: Mode,
}

impl Attached {
    /// What keeps the program at the device, with all that it uses, as long as a descriptor of it is open.
    pub(crate) fn link(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }
}

/// Puts a program before the device with this index, in the namespace of the calling thread.
pub(crate) fn attach(program: BorrowedFd<'_>, device: u32, wish: Wish) -> Result<Attached, BpfError> {
    let attach = |mode| {
        let flags = if mode == Mode::Native { NATIVE } else { GENERIC };
        call::link(program, device, flags).map(|link| Attached { link, mode })
    };
    let result = match wish {
        Wish::Only(mode) => attach(mode),
        Wish::Either => match attach(Mode::Native) {
            // The driver has no XDP. Whatever else is wrong would be wrong in the other mode too, or is not ours to hide.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => attach(Mode::Generic),
            result => result,
        },
    };
    result.map_err(|source| {
        const CALL: &str = "bpf(BPF_LINK_CREATE)";
        match source.raw_os_error() {
            Some(libc::EBUSY | libc::EEXIST) => BpfError::Busy { call: CALL, source },
            Some(libc::EOPNOTSUPP) => {
                BpfError::Absent { call: CALL, what: "XDP in the driver of this device", source }
            }
            _ => BpfError::or_absent(CALL, "links for XDP (Linux 5.9)", source),
        }
    })
}
