//! Counts system calls on sockets that fail, by call, errno, process and address.

use std::fmt;
use std::mem;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use aya::maps::{Array, HashMap, MapData};
use aya::{Pod, include_bytes_aligned};

use crate::error::BpfError;
use crate::filter::TaskFilter;
use crate::tracing::{self, Programs, address, thread_name};

const NAME: &str = "failed_calls";

/// Maximum number of combinations of call, errno, process and address with separate counts.
pub const FAILURES: usize = 4096;

/// Length of a path of a Unix socket.
const PATH: usize = 108;
/// Families of addresses (include/linux/socket.h).
const UNIX: u8 = 1;
const INET: u8 = 2;
const INET6: u8 = 10;

/// Calls of a process that failed in the same way.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Failure {
    /// Process id in this process's PID namespace if the process is in it, otherwise in the initial one.
    pub process: u32,
    /// Network namespace of the socket: inode of `/proc/PID/ns/net`.
    pub namespace: u32,
    pub errno: u16,
    port: u16,
    call: u8,
    protocol: u8,
    family: u8,
    state: u8,
    zone: u32,
    address: [u8; PATH],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Count {
    calls: u64,
    name: [u8; 16],
    range: u32,
    mixed: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Totals {
    lost: u64,
}

// The layouts must equal the layouts in failed_calls.bpf.c.
const _: () = assert!(mem::size_of::<Count>() == 32);
const _: () = assert!(mem::size_of::<Failure>() == 128 && mem::offset_of!(Failure, address) == 20);

// SAFETY: integers and arrays of them without holes, in the layout of the map's values.
unsafe impl Pod for Failure {}
// SAFETY: as above.
unsafe impl Pod for Count {}
// SAFETY: as above.
unsafe impl Pod for Totals {}

/// The progress of a connect() of TCP that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Progress {
    /// The call failed before it sent a SYN, or is another call.
    BeforeSyn,
    /// The attempt had sent a SYN, or had searched for a port.
    AfterSyn,
    /// The program read the errno from a socket that is still in SYN_SENT: the kernel goes on until the program closes it.
    InSynSent,
}

impl Failure {
    /// Returns the call: `socket`, `bind`, `listen`, `connect`, `accept`, `send` or `recv`.
    pub fn call(&self) -> &'static str {
        match self.call {
            1 => "socket",
            2 => "bind",
            3 => "listen",
            4 => "connect",
            5 => "accept",
            6 => "send",
            _ => "recv",
        }
    }

    /// Returns the protocol: `tcp`, `udp`, `unix` or `other`.
    pub fn protocol(&self) -> &'static str {
        match self.protocol {
            1 => "tcp",
            2 => "udp",
            3 => "unix",
            _ => "other",
        }
    }

    /// Returns the progress of a connect() of TCP.
    pub fn progress(&self) -> Progress {
        match self.state {
            0 => Progress::BeforeSyn,
            1 => Progress::AfterSyn,
            _ => Progress::InSynSent,
        }
    }

    /// Returns the IP address and port; `None` for calls without one.
    pub fn address(&self) -> Option<SocketAddr> {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&self.address[..16]);
        match (self.family, address(bytes)) {
            (INET | INET6, IpAddr::V6(ip)) => Some(SocketAddrV6::new(ip, self.port, 0, self.zone).into()),
            (INET | INET6, ip) => Some(SocketAddr::new(ip, self.port)),
            _ => None,
        }
    }

    /// Returns the path of a Unix socket, an abstract name with `@`.
    pub fn path(&self) -> Option<String> {
        let is_abstract = self.address[0] == 0 && self.address[1] != 0;
        let bytes = if is_abstract { &self.address[1..] } else { &self.address[..] };
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        let name = String::from_utf8_lossy(&bytes[..end]);
        let mark = if is_abstract { "@" } else { "" };
        (self.family == UNIX && end > 0).then(|| format!("{mark}{}", name.escape_debug()))
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = formatter.debug_struct("Failure");
        text.field("call", &self.call()).field("errno", &self.errno).field("process", &self.process);
        text.field("address", &self.address()).field("path", &self.path());
        text.field("progress", &self.progress()).finish_non_exhaustive()
    }
}

/// The number of calls that failed in the same way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The calls.
    pub failure: Failure,
    /// Name of the process.
    pub name: String,
    pub calls: u64,
    /// The ports of IP_LOCAL_PORT_RANGE, both inclusive, that all sockets of these calls of connect() had; a bound of 0 is the bound of
    /// net.ipv4.ip_local_port_range.
    pub range: Option<(u16, u16)>,
}

/// The attached programs. They are detached when this value is dropped or the process ends.
pub struct FailedCalls {
    programs: Programs,
    failures: HashMap<MapData, Failure, Count>,
    sums: Array<MapData, Totals>,
}

impl FailedCalls {
    /// Loads the programs and attaches them. Operations of io_uring count if this kernel's tracepoint io_uring_complete has them as argument
    /// (Linux 6.18; 6.12 has not). System calls of 32-bit programs do not count.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_PERFMON, [`BpfError::Absent`] on a kernel without BTF or without
    /// the tracepoint raw_syscalls:sys_exit, [`BpfError::Refused`] if the verifier rejects a program.
    pub fn attach(wanted: &TaskFilter) -> Result<FailedCalls, BpfError> {
        let mut programs = Programs::load(NAME, include_bytes_aligned!("failed_calls.o"))?;
        programs.set("settings", wanted.settings(tracing::pid_namespace()))?;
        let (failures, sums) = (programs.map("failures")?, programs.map("sums")?);
        let mut calls = FailedCalls { programs, failures, sums };
        calls.programs.attach("attempt_began", "inet_sock_set_state")?;
        calls.programs.attach("call_failed", "sys_exit")?;
        // A kernel without io_uring, or of which the tracepoint has other arguments (before 6.13).
        match calls.programs.attach("ring_failed", "io_uring_complete") {
            Err(BpfError::Absent { .. } | BpfError::Refused { .. }) => {}
            other => other?,
        }
        Ok(calls)
    }

    /// Returns all failures so far, in no particular order.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn failures(&self) -> Result<Vec<Failed>, BpfError> {
        let failed = |entry: Result<(Failure, Count), _>| {
            let (failure, count) =
                entry.map_err(|error| tracing::failure(NAME, "bpf(BPF_MAP_GET_NEXT_KEY)", &error))?;
            let range = (count.range as u16, (count.range >> 16) as u16);
            let range = Some(range).filter(|range| *range != (0, 0) && count.mixed == 0);
            Ok(Failed { failure, name: thread_name(&count.name), calls: count.calls, range })
        };
        self.failures.iter().map(failed).collect()
    }

    /// Returns the number of failed calls that were not counted because the table was full.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn lost(&self) -> Result<u64, BpfError> {
        let totals = self.sums.get(&0, 0);
        Ok(totals.map_err(|error| tracing::failure(NAME, "bpf(BPF_MAP_LOOKUP_ELEM)", &error))?.lost)
    }

    /// Detaches the programs; their counts stay readable.
    pub fn detach(&mut self) {
        self.programs.detach();
    }
}

impl fmt::Debug for FailedCalls {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("FailedCalls").finish_non_exhaustive()
    }
}
