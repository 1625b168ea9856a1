//! The part for connect() of UDP, which has its own programs (`connect_search_udp.h`) and shares the maps with TCP.

use std::mem;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;

use aya::Pod;
use aya::maps::{Array, MapData};

use crate::connect_search::{ConnectFilter, ConnectSearch, Packets, TupleKey};
use crate::error::BpfError;

/// The hook of a program: a tracepoint, or the root of the cgroups.
#[derive(Clone, Copy)]
enum Hook {
    Tracepoint(&'static str),
    Cgroup,
}

/// Programs in the order of attaching, with the address family that needs the program; `None` for both families.
const UDP: [(&str, Hook, Option<Family>); 4] = [
    ("udp_route_lookup_ipv6", Hook::Tracepoint("fib6_table_lookup"), Some(Family::Ipv6)),
    ("udp_route_lookup", Hook::Tracepoint("fib_table_lookup"), Some(Family::Ipv4)),
    // An IPv6 socket connects to IPv4 addresses as well, by their v4-mapped names.
    ("udp_connects_ipv6", Hook::Cgroup, None),
    ("udp_connects_ipv4", Hook::Cgroup, Some(Family::Ipv4)),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    Ipv4,
    Ipv6,
}

/// The tier of UDP in records.
pub const UDP_TIER: &str = "cgroup+tp_btf";

/// A task and its last connect().
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Caller {
    task: u64,
    /// Start of the current search; 0 outside a search.
    socket: u64,
    key: TupleKey,
    tuple: u32,
    namespace: u32,
    started_ns: u64,
    switches: u64,
}

// The layouts must equal the layouts in connect_search.bpf.c.
const _: () = assert!(mem::size_of::<Caller>() == 64 && mem::offset_of!(Caller, tuple) == 40);

// SAFETY: integers and arrays of them without holes, in the layout of the map's values.
unsafe impl Pod for Caller {}

/// Returns the index in the table of tuples of each search without an end.
pub(super) fn unended(callers: &Array<MapData, Caller>) -> Vec<u32> {
    callers.iter().flatten().filter(|caller| caller.socket != 0).map(|caller| caller.tuple).collect()
}

impl ConnectSearch {
    /// Loads and attaches the programs for UDP ([`UDP_TIER`]). `root` is the root of the cgroup2 file system, so that the programs
    /// see the tasks of all cgroups. The programs allow every call and change nothing.
    ///
    /// # Errors
    ///
    /// The errors of [`ConnectSearch::attach`]. Cgroup programs also need CAP_NET_ADMIN.
    pub fn attach_udp(wanted: &ConnectFilter, root: BorrowedFd<'_>) -> Result<ConnectSearch, BpfError> {
        let family = wanted.address.map(|address| match address.to_canonical() {
            IpAddr::V4(_) => Family::Ipv4,
            IpAddr::V6(_) => Family::Ipv6,
        });
        let mut search = ConnectSearch::load(wanted)?;
        search.packets = Packets::Never;
        search.callers = Some(search.programs.map("callers")?);
        for (program, hook, only) in UDP {
            if only.is_some() && family.is_some() && only != family {
                continue;
            }
            match hook {
                Hook::Tracepoint(tracepoint) => search.programs.attach(program, tracepoint)?,
                Hook::Cgroup => search.programs.attach_cgroup(program, root)?,
            }
        }
        Ok(search)
    }
}
