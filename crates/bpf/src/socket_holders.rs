//! Lists the descriptors of sockets of all processes with a BPF iterator over their files (Linux 5.11).

use std::fs::{self, File};
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use aya::include_bytes_aligned;
use fourtuple_syscalls::Errno;

use crate::call;
use crate::error::BpfError;
use crate::object::Program;
use crate::tracing::address;
use crate::type_info::TypeInfo;

const NAME: &str = "socket_holders";
/// Length of struct holder in socket_holders.h.
const RECORD: usize = 32;
/// Inode of the initial PID namespace (PROC_PID_INIT_INO).
const INITIAL: u64 = 0xeffffffc;

/// A descriptor of an IPv4 or IPv6 socket.
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
    /// Local address and port.
    pub local: SocketAddr,
}

/// An iterator over the descriptors of sockets, which can be read any number of times.
#[derive(Debug)]
pub struct SocketHolders {
    link: OwnedFd,
    buffer: Vec<u8>,
}

impl SocketHolders {
    /// Loads the iterator. Needs CAP_BPF and CAP_PERFMON in the initial user namespace.
    ///
    /// # Errors
    ///
    /// [`BpfError::Absent`]: the kernel lacks the iterator, or this process is in a PID namespace, in which the process IDs of the
    /// iterator mean nothing; other errors are errors of bpf(2).
    pub fn load() -> Result<SocketHolders, BpfError> {
        let absent = |call, what, source| BpfError::Absent { call, what, source };
        let namespace = fs::metadata("/proc/self/ns/pid").map(|namespace| namespace.ino());
        if namespace.as_ref().ok() != Some(&INITIAL) {
            let source = namespace.err().unwrap_or_else(|| io::Error::from(Errno::EOPNOTSUPP));
            return Err(absent("stat(/proc/self/ns/pid)", "the initial PID namespace", source));
        }
        let kernel = TypeInfo::read().map_err(|error| {
            absent("read(/sys/kernel/btf/vmlinux)", "type information (CONFIG_DEBUG_INFO_BTF)", error)
        })?;
        let object = include_bytes_aligned!("socket_holders.o");
        let program = Program::read_iterator(NAME, "iter/task_file", object, &kernel)?.load(&[])?;
        let link = call::link_iterator(program.as_fd())
            .map_err(|error| BpfError::of("bpf(BPF_LINK_CREATE)", error))?;
        Ok(SocketHolders { link, buffer: vec![0; 32 << 10] })
    }

    /// Calls `found` for each descriptor of an IPv4 or IPv6 socket in the calling thread's network namespace, in the order of the
    /// processes. Threads that share their descriptors count as one process.
    ///
    /// # Errors
    ///
    /// [`BpfError`]. After an error `found` may have been called for some of the descriptors.
    pub fn each(&mut self, mut found: impl FnMut(&Holder)) -> Result<(), BpfError> {
        let pass = call::iterate(self.link.as_fd());
        let mut pass = File::from(pass.map_err(|error| BpfError::of("bpf(BPF_ITER_CREATE)", error))?);
        let mut filled = 0;
        loop {
            match pass.read(&mut self.buffer[filled..]) {
                Ok(0) => return Ok(()),
                Ok(length) => filled += length,
                // EAGAIN: the kernel has looked at many objects without output and lets other tasks run (bpf_seq_read).
                Err(error) if matches!(Errno::of(&error), Some(Errno::EINTR | Errno::EAGAIN)) => continue,
                Err(error) => return Err(BpfError::of("read() of a BPF iterator", error)),
            }
            let (records, rest) = self.buffer[..filled].as_chunks::<RECORD>();
            records.iter().for_each(|record| found(&holder(record)));
            let (whole, rest) = (filled - rest.len(), rest.len());
            self.buffer.copy_within(whole..filled, 0);
            filled = rest;
        }
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
