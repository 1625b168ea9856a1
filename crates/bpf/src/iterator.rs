//! BPF iterators: programs that the kernel calls for each object of a kind, and that write records to the reader. They are
//! `socket_holders`, over the files of all processes (Linux 5.11), and `plain_time_wait`, over TCP sockets (Linux 5.9).

use std::fs::{self, File};
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use aya::include_bytes_aligned;
use fourtuple_syscalls::Errno;

use crate::call;
use crate::error::BpfError;
use crate::object::{Program, TypeInfo};
use crate::tracing::address;

/// An iterator, which can be read any number of times.
#[derive(Debug)]
pub(crate) struct Iterator {
    link: OwnedFd,
    buffer: Vec<u8>,
}

impl Iterator {
    /// Loads the program called `name` in the section `section` of an object.
    pub(crate) fn load(
        name: &'static str,
        section: &'static str,
        object: &[u8],
    ) -> Result<Iterator, BpfError> {
        let kernel = TypeInfo::read().map_err(|source| BpfError::Absent {
            call: "read(/sys/kernel/btf/vmlinux)",
            what: "type information (CONFIG_DEBUG_INFO_BTF)",
            source,
        })?;
        let program = Program::read_iterator(name, section, object, &kernel)?.load(&[])?;
        let link = call::link_iterator(program.as_fd())
            .map_err(|error| BpfError::of("bpf(BPF_LINK_CREATE)", error))?;
        Ok(Iterator { link, buffer: vec![0; 32 << 10] })
    }

    /// Calls `found` for each record of a new pass, in the calling thread's namespaces. After an error `found` may have been called for
    /// some of them.
    pub(crate) fn each<const RECORD: usize>(
        &mut self,
        mut found: impl FnMut(&[u8; RECORD]),
    ) -> Result<(), BpfError> {
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
            records.iter().for_each(&mut found);
            let (whole, rest) = (filled - rest.len(), rest.len());
            self.buffer.copy_within(whole..filled, 0);
            filled = rest;
        }
    }
}

/// Length of struct holder in socket_holders.h.
const RECORD: usize = 32;
/// Inode of the initial PID namespace (PROC_PID_INIT_INO).
const INITIAL: u64 = 0xeffffffc;

/// A descriptor of an IPv4 or IPv6 socket, or of a listening or connected unix socket, which has the address `[::]:0` here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketHolder {
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
        Iterator::load("socket_holders", "iter/task_file", include_bytes_aligned!("socket_holders.o"))
            .map(SocketHolders)
    }

    /// Calls `found` for each descriptor of an IPv4 or IPv6 socket and of a listening or connected unix socket in the calling thread's
    /// network namespace, in the order of the processes. Threads that share their descriptors count as one process.
    ///
    /// # Errors
    ///
    /// [`BpfError`]. After an error `found` may have been called for some of the descriptors.
    pub fn each(&mut self, mut found: impl FnMut(&SocketHolder)) -> Result<(), BpfError> {
        self.0.each(|record| found(&holder(record)))
    }
}

fn holder(record: &[u8; RECORD]) -> SocketHolder {
    let number = |at: usize| u32::from_ne_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]]);
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&record[16..]);
    let ip: IpAddr = address(bytes);
    SocketHolder {
        inode: number(0),
        process: number(4),
        local: SocketAddr::new(ip, u16::from_ne_bytes([record[8], record[9]])),
        protocol: record[10],
        state: record[11],
    }
}

/// An iterator over the TIME_WAIT sockets of connections without TCP timestamps, which can be read any number of times.
#[derive(Debug)]
pub struct PlainTimeWait(Iterator);

impl PlainTimeWait {
    /// Loads the iterator. Needs CAP_BPF and CAP_PERFMON in the initial user namespace.
    ///
    /// # Errors
    ///
    /// [`BpfError::Absent`]: the kernel lacks the iterator; other errors are errors of bpf(2).
    pub fn load() -> Result<PlainTimeWait, BpfError> {
        let object = include_bytes_aligned!("plain_time_wait.o");
        Iterator::load("plain_time_wait", "iter/tcp", object).map(PlainTimeWait)
    }

    /// Calls `found` with the local address and the peer of each such socket in the calling thread's network namespace.
    ///
    /// # Errors
    ///
    /// [`BpfError`]. After an error `found` may have been called for some of the sockets.
    pub fn each(&mut self, mut found: impl FnMut(SocketAddr, SocketAddr)) -> Result<(), BpfError> {
        self.0.each(|record: &[u8; 40]| {
            let ip = |at: usize| {
                let mut bytes = [0; 16];
                bytes.copy_from_slice(&record[at..at + 16]);
                address(bytes)
            };
            let local = u16::from_ne_bytes([record[32], record[33]]);
            let remote = u16::from_be_bytes([record[34], record[35]]);
            found(SocketAddr::new(ip(0), local), SocketAddr::new(ip(16), remote));
        })
    }
}
