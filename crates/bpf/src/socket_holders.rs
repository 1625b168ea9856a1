//! Lists the descriptors of sockets of all processes with a BPF iterator over their files (Linux 5.11).

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;

use aya::include_bytes_aligned;
use fourtuple_syscalls::Errno;

use crate::error::BpfError;
use crate::iterator::Iterator;
use crate::tracing::address;

const NAME: &str = "socket_holders";
/// Length of struct holder in socket_holders.h.
const RECORD: usize = 32;
/// Inode of the initial PID namespace (PROC_PID_INIT_INO).
const INITIAL: u64 = 0xeffffffc;

/// A descriptor of an IPv4 or IPv6 socket, or of a listening or connected unix socket, which has the address `[::]:0` here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Process ID.
    pub process: u32,
    /// Inode of the socket: `socket:[INODE]` in /proc/PID/fd.
    pub inode: u32,
    /// Protocol of a socket without a peer (IPPROTO_TCP, IPPROTO_UDP), otherwise 0.
    pub protocol: u8,
    /// TCP state (include/net/tcp_states.h); UDP uses ESTABLISHED and CLOSE.
    pub state: u8,
    pub local: SocketAddr,
}

/// An iterator over the descriptors of sockets, which can be read any number of times.
#[derive(Debug)]
pub struct SocketHolders(Iterator);

impl SocketHolders {
    /// Loads the iterator. Needs CAP_BPF and CAP_PERFMON in the initial user namespace.
    ///
    /// # Errors
    ///
    /// [`BpfError::Absent`]: the kernel lacks the iterator, or this process is in a PID namespace, in which the process IDs of the
    /// iterator mean nothing; other errors are errors of bpf(2).
    pub fn load() -> Result<SocketHolders, BpfError> {
        let namespace = fs::metadata("/proc/self/ns/pid").map(|namespace| namespace.ino());
        if namespace.as_ref().ok() != Some(&INITIAL) {
            let source = namespace.err().unwrap_or_else(|| io::Error::from(Errno::EOPNOTSUPP));
            return Err(BpfError::Absent {
                call: "stat(/proc/self/ns/pid)",
                what: "the initial PID namespace",
                source,
            });
        }
        Iterator::load(NAME, "iter/task_file", include_bytes_aligned!("socket_holders.o")).map(SocketHolders)
    }

    /// Calls `found` for each descriptor of an IPv4 or IPv6 socket and of a listening or connected unix socket in the calling thread's network namespace, in the order of the
    /// processes. Threads that share their descriptors count as one process.
    ///
    /// # Errors
    ///
    /// [`BpfError`]. After an error `found` may have been called for some of the descriptors.
    pub fn each(&mut self, mut found: impl FnMut(&Holder)) -> Result<(), BpfError> {
        self.0.each(|record| found(&holder(record)))
    }
}

fn holder(record: &[u8; RECORD]) -> Holder {
    let number = |at: usize| u32::from_ne_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]]);
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&record[16..]);
    let ip: IpAddr = address(bytes);
    Holder {
        inode: number(0),
        process: number(4),
        local: SocketAddr::new(ip, u16::from_ne_bytes([record[8], record[9]])),
        protocol: record[10],
        state: record[11],
    }
}
