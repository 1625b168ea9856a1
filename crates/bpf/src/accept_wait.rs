//! What becomes of TCP connections until accept() has them, on a live system: counts and histograms made in the kernel.

use std::fmt;
use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use aya::maps::{Array, HashMap, MapData};
use aya::{Pod, include_bytes_aligned};

use crate::call;
use crate::error::BpfError;
use crate::filter::{HAS_ADDRESS, HAS_CGROUP, HAS_NAME, HAS_PORT, HAS_PROCESS, flag};
use crate::tracing::{self, COARSE, Programs, Times, address, address_bytes, thread_name, thread_name_bytes};

const NAME: &str = "accept_wait";

/// The most listeners that are told apart.
pub const LISTENERS: usize = 512;
/// The most pairs of listener and thread that are told apart.
pub const WORKERS: usize = 2048;
/// The most connections that are followed at the same time.
pub const CONNECTIONS: usize = 131_072;

/// Which programs in the order of attaching: a connection is not to be queued before all that may become of it is looked at.
const PROGRAMS: [(&str, &str); 4] = [
    ("destroyed", "tcp_destroy_sock"),
    ("call_ended", "sys_exit"),
    ("data_ready", "sk_data_ready"),
    ("set_state", "inet_sock_set_state"),
];

/// Without these there is less to see. kfree_skb tells the socket since Linux 6.11.
const PERHAPS: [(&str, &str); 2] = [("ring_completed", "io_uring_complete"), ("packet_dropped", "kfree_skb")];

/// Which accepts are looked at: all that match everything that is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Process that accepts, as this process's PID namespace numbers it.
    pub process: Option<u32>,
    /// Name of the thread that accepts (comm), of which the kernel keeps 15 bytes.
    pub name: Option<String>,
    /// Address of the listener.
    pub address: Option<IpAddr>,
    /// Port of the listener.
    pub port: Option<u16>,
    /// Id of a cgroup (version 2) of who accepts, which is the inode of its directory; those below it count as well.
    pub cgroup: Option<u64>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Settings {
    cgroup: u64,
    namespace_device: u64,
    namespace_inode: u64,
    flags: u32,
    process: u32,
    name: [u8; 16],
    address: [u8; 16],
    port: u16,
    hole: [u16; 3],
}

/// A listening socket to which a connection came.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Listener {
    socket: u64,
    drops: u64,
    /// Connections that came into its queue.
    pub queued: u64,
    /// Sum of the depths of the queue, each time with the connection that came.
    pub depth_sum: u64,
    /// Connections after which the queue had no room left.
    pub full: u64,
    full_drops: u64,
    other_drops: u64,
    /// Final ACKs of handshakes that were dropped for want of room in the queue.
    pub refused_acks: u64,
    /// Handshakes whose SYN-ACK was sent again: their time is not known.
    pub retried: u64,
    /// Accepts, also by those who are not wanted.
    pub accepted: u64,
    /// Connections that were gone before anybody accepted them.
    pub never_accepted: u64,
    /// Connections that were accepted and no hook told how.
    pub unseen: u64,
    /// Connections whose peer closed first.
    pub closed_by_peer: u64,
    /// Connections that ended with a reset.
    pub reset: u64,
    /// The deepest that the queue was after a connection came.
    pub depth_max: u32,
    /// What listen() asked for, within net.core.somaxconn: one more fits.
    pub backlog: u32,
    /// Inode of its network namespace.
    pub network: u32,
    was_full: u32,
    port: u16,
    /// Sockets of its SO_REUSEPORT group when its first connection was seen; 0: it is in none.
    pub group: u16,
    hole: u32,
    address: [u8; 16],
    /// Sum of the handshakes' times, in nanoseconds.
    pub handshake_ns: u64,
    /// The longest of them.
    pub handshake_max_ns: u64,
    /// Handshakes by time: [`COARSE_BITS`](crate::tracing::COARSE_BITS).
    pub handshakes: [u32; COARSE],
    /// From being established until accept() gave it, of accepts that are wanted.
    pub wait: Times,
}

/// A thread that accepts from a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct WorkerKey {
    /// Cookie of the listener.
    pub listener: u64,
    /// Thread, in this process's PID namespace if it is there.
    pub thread: u32,
    /// Its process.
    pub process: u32,
}

/// What it accepted.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Worker {
    name: [u8; 16],
    /// Connections that it accepted.
    pub accepts: u64,
    /// Sum of the times they had waited, in nanoseconds.
    pub wait_ns: u64,
    /// The longest of them.
    pub wait_max_ns: u64,
    /// Connections that it accepted and that nobody has closed on this side.
    pub open: u64,
    /// Times that data came for its connections, and the reader was told.
    pub reads: u64,
    /// Times that accept() said EAGAIN.
    pub empty: u64,
    /// Of these, the first call after the thread came back from waiting.
    pub woken: u64,
    /// Connections that it closed before the peer did.
    pub closed: u64,
    /// Waits by time: [`COARSE_BITS`](crate::tracing::COARSE_BITS).
    pub waits: [u32; COARSE],
}

/// Sums over all listeners that were wanted.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Totals {
    /// Connections for which the map had no room; nothing else is known of them.
    pub lost_connections: u64,
    /// Connections of listeners that had no room.
    pub lost_listeners: u64,
    /// Events of workers that had no room.
    pub lost_workers: u64,
    /// Connections that no listener said it had.
    pub unmatched: u64,
    /// Accepts of connections that were in the queue before, or came with TCP Fast Open.
    pub earlier: u64,
    /// Connections that were accepted and no hook told how.
    pub unseen: u64,
    /// Accepts by who is not wanted.
    pub other_tasks: u64,
    /// From being established until accept() gave it.
    pub wait: Times,
    /// From the SYN-ACK to its ACK.
    pub handshake: Times,
}

// As in accept_wait.h.
const _: () = assert!(mem::size_of::<Settings>() == 72 && mem::offset_of!(Settings, name) == 32);
const _: () = assert!(mem::size_of::<Listener>() == 168 + 4 * COARSE + mem::size_of::<Times>());
const _: () = assert!(mem::offset_of!(Listener, port) == 128 && mem::offset_of!(Listener, handshakes) == 168);
const _: () = assert!(mem::size_of::<WorkerKey>() == 16);
const _: () = assert!(mem::size_of::<Worker>() == 80 + 4 * COARSE && mem::offset_of!(Worker, closed) == 72);
const _: () = assert!(mem::size_of::<Totals>() == 56 + 2 * mem::size_of::<Times>());

// SAFETY: integers and arrays of them without holes, in the layout of the map's values.
unsafe impl Pod for Settings {}
// SAFETY: as above.
unsafe impl Pod for Listener {}
// SAFETY: as above.
unsafe impl Pod for WorkerKey {}
// SAFETY: as above.
unsafe impl Pod for Worker {}
// SAFETY: as above.
unsafe impl Pod for Totals {}

impl Listener {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(address(self.address), self.port)
    }

    /// Whether it has been closed.
    pub fn is_closed(&self) -> bool {
        self.socket == 0
    }

    /// SYNs that were dropped because the queue was full.
    pub fn refused_syns(&self) -> u64 {
        // A final ACK that is dropped counts twice: tcp_v4_syn_recv_sock() and its caller tcp_v4_rcv().
        not_negative(self.full_drops).saturating_sub(2 * self.refused_acks)
    }

    /// Packets that were dropped for other reasons, such as too many handshakes under way.
    pub fn other_drops(&self) -> u64 {
        not_negative(self.other_drops)
    }
}

/// Two processors that look at the same time may count what is taken back later.
fn not_negative(sum: u64) -> u64 {
    u64::try_from(sum as i64).unwrap_or_default()
}

impl Worker {
    /// Name of the thread when it accepted first.
    pub fn name(&self) -> String {
        thread_name(&self.name)
    }
}

impl Wanted {
    fn settings(&self, namespace: (u64, u64)) -> Settings {
        Settings {
            cgroup: self.cgroup.unwrap_or_default(),
            namespace_device: namespace.0,
            namespace_inode: namespace.1,
            flags: flag(self.process.is_some(), HAS_PROCESS)
                | flag(self.name.is_some(), HAS_NAME)
                | flag(self.address.is_some(), HAS_ADDRESS)
                | flag(self.port.is_some(), HAS_PORT)
                | flag(self.cgroup.is_some(), HAS_CGROUP),
            process: self.process.unwrap_or_default(),
            name: thread_name_bytes(self.name.as_deref().unwrap_or_default()),
            address: self.address.map(address_bytes).unwrap_or_default(),
            port: self.port.unwrap_or_default(),
            hole: [0; 3],
        }
    }
}

/// Programs on accept(), attached. They go with this value, and with the process.
pub struct AcceptWait {
    programs: Programs,
    sums: Array<MapData, Totals>,
    listeners: HashMap<MapData, u64, Listener>,
    workers: HashMap<MapData, WorkerKey, Worker>,
    look: OwnedFd,
    absent: Vec<&'static str>,
}

impl AcceptWait {
    /// How the kernel is asked: BTF-typed tracepoints.
    pub const TIER: &str = "tp_btf";

    /// Loads the programs and attaches them. Connections that are in a queue already are not looked at.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_PERFMON, [`BpfError::Absent`] on a kernel without BTF or without
    /// one of the tracepoints (sk_data_ready: Linux 6.3), [`BpfError::Refused`] when the verifier does not take a program.
    pub fn attach(wanted: &Wanted) -> Result<AcceptWait, BpfError> {
        let mut programs = Programs::load(NAME, include_bytes_aligned!("accept_wait.o"))?;
        programs.set("settings", wanted.settings(tracing::pid_namespace()))?;
        let mut wait = AcceptWait {
            sums: programs.map("sums")?,
            listeners: programs.map("listeners")?,
            workers: programs.map("workers")?,
            look: programs.runnable("look")?,
            programs,
            absent: Vec::new(),
        };
        for (program, tracepoint) in PERHAPS {
            match wait.programs.attach(program, tracepoint) {
                Err(BpfError::Absent { .. } | BpfError::Refused { .. }) => wait.absent.push(tracepoint),
                other => other?,
            }
        }
        for (program, tracepoint) in PROGRAMS {
            wait.programs.attach(program, tracepoint)?;
        }
        Ok(wait)
    }

    /// Tracepoints that this kernel has not got, or has otherwise: `io_uring_complete`, without which accepts through
    /// io_uring are not seen, and `kfree_skb`, without which dropped final ACKs count as two dropped SYNs.
    pub fn absent(&self) -> &[&'static str] {
        &self.absent
    }

    /// Takes the programs off; what they counted stays.
    pub fn detach(&mut self) {
        self.programs.detach();
    }

    /// Looks at the drops of every listener that is still open. Between connections nobody else does.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] of bpf(2), which nothing explains.
    pub fn look(&self) -> Result<(), BpfError> {
        for cookie in self.listeners.keys() {
            let cookie =
                cookie.map_err(|error| tracing::failure(NAME, "bpf(BPF_MAP_GET_NEXT_KEY)", &error))?;
            run(&self.look, cookie)?;
        }
        Ok(())
    }

    /// The sums as they are now.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] of bpf(2), which nothing explains.
    pub fn totals(&self) -> Result<Box<Totals>, BpfError> {
        let totals = self
            .sums
            .get(&0, 0)
            .map_err(|error| tracing::failure(NAME, "bpf(BPF_MAP_LOOKUP_ELEM)", &error))?;
        Ok(Box::new(totals))
    }

    /// All listeners by their cookies, in no order.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] of bpf(2), which nothing explains.
    pub fn listeners(&self) -> Result<Vec<(u64, Listener)>, BpfError> {
        let listeners: Result<Vec<_>, _> = self.listeners.iter().collect();
        listeners.map_err(|error| tracing::failure(NAME, "bpf(BPF_MAP_GET_NEXT_KEY)", &error))
    }

    /// All workers, in no order.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] of bpf(2), which nothing explains.
    pub fn workers(&self) -> Result<Vec<(WorkerKey, Worker)>, BpfError> {
        let workers: Result<Vec<_>, _> = self.workers.iter().collect();
        workers.map_err(|error| tracing::failure(NAME, "bpf(BPF_MAP_GET_NEXT_KEY)", &error))
    }
}

fn run(program: &OwnedFd, cookie: u64) -> Result<(), BpfError> {
    match call::run(program.as_fd(), cookie) {
        // A signal is pending, which is how this ends anyway.
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        other => other.map_err(|error| BpfError::of("bpf(BPF_PROG_TEST_RUN)", error)),
    }
}

impl fmt::Debug for AcceptWait {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AcceptWait").finish_non_exhaustive()
    }
}
