//! Traces TCP connections from the handshake to accept() on a live system, with counts and histograms made in the kernel.

use std::fmt;
use std::io;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use aya::maps::{Array, HashMap, MapData};
use aya::{Pod, include_bytes_aligned};

use crate::call;
use crate::error::BpfError;
use crate::filter::{HAS_ADDRESS, HAS_CGROUP, HAS_NAME, HAS_NETWORK, HAS_PORT, HAS_PROCESS, flag};
use crate::tracing::{
    self, COARSE, Passes, Programs, Times, address, address_bytes, thread_name, thread_name_bytes,
};

const NAME: &str = "accept_wait";

/// Maximum number of listeners with separate counts.
pub const LISTENERS: usize = 512;
/// Maximum number of pairs of listener and thread with separate counts.
pub const WORKERS: usize = 2048;
/// Maximum number of connections that are traced at the same time.
pub const CONNECTIONS: usize = 131_072;

/// Programs in the order of attaching: hooks for later states of a connection are attached before the hook that queues it.
const PROGRAMS: [(&str, &str); 4] = [
    ("destroyed", "tcp_destroy_sock"),
    ("call_ended", "sys_exit"),
    ("data_ready", "sk_data_ready"),
    ("set_state", "inet_sock_set_state"),
];

/// Optional programs, without which less is seen. kfree_skb reports the socket since Linux 6.11.
const PERHAPS: [(&str, &str); 2] = [("ring_completed", "io_uring_complete"), ("packet_dropped", "kfree_skb")];

/// A filter of accepts. An accept must match every field that is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcceptFilter {
    /// Id of the accepting process in this process's PID namespace.
    pub process: Option<u32>,
    /// Name of the process or thread that accepts (comm), of which the kernel keeps 15 bytes.
    pub name: Option<String>,
    pub address: Option<IpAddr>,
    pub port: Option<u16>,
    /// Id of the cgroup (version 2) of the accepting tasks: the inode of its directory. Cgroups below it count as well.
    pub cgroup: Option<u64>,
    /// Inode of the network namespace of the listener.
    pub network: Option<u32>,
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
    hole: u16,
    network: u32,
}

/// A listening socket that was there when the trace began, or that received a connection.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Listener {
    socket: u64,
    drops: u64,
    /// Connections that entered its accept queue.
    pub queued: u64,
    /// Sum of the queue lengths, each measured after a connection entered and including it.
    pub depth_sum: u64,
    /// Connections after which the queue was full.
    pub full: u64,
    full_drops: u64,
    other_drops: u64,
    /// Final ACKs of handshakes that were dropped because the queue was full.
    pub refused_acks: u64,
    /// Handshakes whose SYN-ACK was retransmitted, so that their time is not known.
    pub retried: u64,
    /// Accepts, also by tasks that the filter excludes.
    pub accepted: u64,
    /// Connections that were closed before accept(2).
    pub never_accepted: u64,
    /// Connections that were accepted without a report of any hook.
    pub unseen: u64,
    /// Connections whose peer closed first.
    pub closed_by_peer: u64,
    /// Connections that ended with a reset.
    pub reset: u64,
    /// Connections that this side closed in their first second, with nothing read from them.
    pub turned_away: u64,
    /// The highest length of the accept queue after a new connection.
    pub depth_max: u32,
    /// The backlog of listen(), limited by net.core.somaxconn. The queue holds one connection more.
    pub backlog: u32,
    /// Inode of the listener's network namespace.
    pub network: u32,
    was_full: u32,
    port: u16,
    /// Number of sockets in its SO_REUSEPORT group at its first connection; 0 without a group.
    pub group: u16,
    hole: u32,
    address: [u8; 16],
    /// Sum of the handshakes' times, in nanoseconds.
    pub handshake_ns: u64,
    /// The longest of these times.
    pub handshake_max_ns: u64,
    /// Handshakes by time: [`COARSE_BITS`](crate::tracing::COARSE_BITS).
    pub handshakes: [u32; COARSE],
    /// Times between the end of the handshake and the return of accept(), for accepts that the filter selects.
    pub wait: Times,
}

/// A thread that accepts from a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct WorkerKey {
    pub listener: u64,
    /// Thread id in this process's PID namespace if the thread is in it, otherwise in the initial one.
    pub thread: u32,
    /// Process id of the thread.
    pub process: u32,
}

/// The accepts of one thread from one listener.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Worker {
    name: [u8; 16],
    /// Connections that the thread accepted.
    pub accepts: u64,
    /// Sum of the times that these connections waited in the accept queue, in nanoseconds.
    pub wait_ns: u64,
    /// The longest of these times.
    pub wait_max_ns: u64,
    /// Connections that the process has accepted and not closed.
    pub open: u64,
    /// Number of times that data arrived for its connections and the kernel called sk_data_ready.
    pub reads: u64,
    /// Number of accept() calls that returned EAGAIN.
    pub empty: u64,
    /// Spurious wakeups: the EAGAIN came at the first call after the thread returned from waiting.
    pub woken: u64,
    /// Connections that the process closed before the peer did.
    pub closed: u64,
    /// Number of accept() calls that returned another error than EAGAIN.
    pub failed: u64,
    /// The last of these errors.
    pub error: u32,
    hole: u32,
    /// Waits by time: [`COARSE_BITS`](crate::tracing::COARSE_BITS).
    pub waits: [u32; COARSE],
}

/// Sums over all listeners that the filter selects.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Totals {
    /// Connections that were not counted because the map was full.
    pub lost_connections: u64,
    /// Connections that were not counted because the map of listeners was full.
    pub lost_listeners: u64,
    /// Events that were not counted because the map of workers was full.
    pub lost_workers: u64,
    /// Established connections for which no listener was seen.
    pub unmatched: u64,
    /// Accepts of connections that were queued before the trace began or used TCP Fast Open.
    pub earlier: u64,
    /// Connections that were accepted without a report of any hook.
    pub unseen: u64,
    /// Accepts by tasks that the filter excludes.
    pub other_tasks: u64,
    /// Listeners that were there before the trace.
    pub seeded: u64,
    /// Listeners of MPTCP in the selected namespaces, whose queues [`AcceptWait::seed_namespace`] finds.
    pub mptcp: u64,
    /// Times between the end of the handshake and the return of accept().
    pub wait: Times,
    /// Times between the SYN-ACK and its ACK.
    pub handshake: Times,
}

// The layouts must equal the layouts in accept_wait.h.
const _: () = assert!(mem::size_of::<Settings>() == 72 && mem::offset_of!(Settings, name) == 32);
const _: () = assert!(mem::size_of::<Listener>() == 176 + 4 * COARSE + mem::size_of::<Times>());
const _: () = assert!(mem::offset_of!(Listener, port) == 136 && mem::offset_of!(Listener, handshakes) == 176);
const _: () = assert!(mem::size_of::<WorkerKey>() == 16);
const _: () = assert!(mem::size_of::<Worker>() == 96 + 4 * COARSE && mem::offset_of!(Worker, closed) == 72);
const _: () = assert!(mem::size_of::<Totals>() == 72 + 2 * mem::size_of::<Times>());

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
    /// Returns the address that the listener is bound to.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(address(self.address), self.port)
    }

    /// Returns whether the listener has been closed.
    pub fn is_closed(&self) -> bool {
        self.socket == 0
    }

    /// Returns the number of SYNs that were dropped because the queue was full.
    pub fn refused_syns(&self) -> u64 {
        // A final ACK that is dropped counts twice: tcp_v4_syn_recv_sock() and its caller tcp_v4_rcv().
        not_negative(self.full_drops).saturating_sub(2 * self.refused_acks)
    }

    /// Returns the number of packets that were dropped for other reasons, such as too many handshakes in progress.
    pub fn other_drops(&self) -> u64 {
        not_negative(self.other_drops)
    }
}

/// Returns 0 for a sum below 0: two processors that read at the same time may count drops that are subtracted later.
fn not_negative(sum: u64) -> u64 {
    u64::try_from(sum as i64).unwrap_or_default()
}

impl Worker {
    /// Returns the name of the thread at its first accept.
    pub fn name(&self) -> String {
        thread_name(&self.name)
    }

    /// Returns the sums of the counts of two workers, with the name of the first.
    #[must_use]
    pub fn plus(&self, other: &Worker) -> Worker {
        let mut sum = *self;
        for (own, other) in [
            (&mut sum.accepts, other.accepts),
            (&mut sum.wait_ns, other.wait_ns),
            (&mut sum.open, other.open),
            (&mut sum.reads, other.reads),
            (&mut sum.empty, other.empty),
            (&mut sum.woken, other.woken),
            (&mut sum.closed, other.closed),
            (&mut sum.failed, other.failed),
        ] {
            *own += other;
        }
        for (own, other) in sum.waits.iter_mut().zip(other.waits) {
            *own = own.saturating_add(other);
        }
        sum.wait_max_ns = sum.wait_max_ns.max(other.wait_max_ns);
        if other.failed > 0 {
            sum.error = other.error;
        }
        sum
    }
}

impl AcceptFilter {
    fn settings(&self, namespace: (u64, u64)) -> Settings {
        Settings {
            cgroup: self.cgroup.unwrap_or_default(),
            namespace_device: namespace.0,
            namespace_inode: namespace.1,
            flags: flag(self.process.is_some(), HAS_PROCESS)
                | flag(self.name.is_some(), HAS_NAME)
                | flag(self.address.is_some(), HAS_ADDRESS)
                | flag(self.port.is_some(), HAS_PORT)
                | flag(self.cgroup.is_some(), HAS_CGROUP)
                | flag(self.network.is_some(), HAS_NETWORK),
            process: self.process.unwrap_or_default(),
            name: thread_name_bytes(self.name.as_deref().unwrap_or_default()),
            address: self.address.map(address_bytes).unwrap_or_default(),
            port: self.port.unwrap_or_default(),
            hole: 0,
            network: self.network.unwrap_or_default(),
        }
    }
}

/// The attached programs for accept(). They are detached when this value is dropped or the process ends.
pub struct AcceptWait {
    programs: Programs,
    sums: Array<MapData, Totals>,
    listeners: HashMap<MapData, u64, Listener>,
    workers: HashMap<MapData, WorkerKey, Worker>,
    look: OwnedFd,
    /// The iterator over the TCP sockets of a namespace.
    of_namespace: Option<Passes>,
    absent: Vec<&'static str>,
}

impl AcceptWait {
    /// The instrument: BTF-typed tracepoints.
    pub const TIER: &str = "tp_btf";

    /// Loads the programs, attaches them, and looks for the listeners that are there. Connections that are already in a queue are not counted.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_BPF and CAP_PERFMON, [`BpfError::Absent`] on a kernel without BTF or without
    /// one of the tracepoints (sk_data_ready: Linux 6.3), [`BpfError::Refused`] if the verifier rejects a program.
    pub fn attach(wanted: &AcceptFilter) -> Result<AcceptWait, BpfError> {
        let mut programs = Programs::load(NAME, include_bytes_aligned!("accept_wait.o"))?;
        programs.set("settings", wanted.settings(tracing::pid_namespace()))?;
        let mut wait = AcceptWait {
            sums: programs.map("sums")?,
            listeners: programs.map("listeners")?,
            workers: programs.map("workers")?,
            look: programs.runnable("look")?,
            programs,
            of_namespace: None,
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
        // After the hooks, so that no listener is missed in between.
        match wait.programs.iterator("seed", "task_file").and_then(|passes| passes.run()) {
            Err(BpfError::Absent { .. } | BpfError::Refused { .. }) => wait.absent.push("iter/task_file"),
            other => other?,
        }
        Ok(wait)
    }

    /// Looks for the listeners of MPTCP in the network namespace of the calling thread. Their queues belong to sockets that no process has a
    /// descriptor of.
    ///
    /// # Errors
    ///
    /// The errors of [`AcceptWait::attach`]. Without the iterator, `iter/tcp` is [`AcceptWait::absent`].
    pub fn seed_namespace(&mut self) -> Result<(), BpfError> {
        let passes = match self.of_namespace.take() {
            Some(passes) => Ok(passes),
            None => self.programs.iterator("seed_namespace", "tcp"),
        };
        match passes {
            Ok(passes) => self.of_namespace.insert(passes).run(),
            Err(BpfError::Absent { .. } | BpfError::Refused { .. }) => {
                if !self.absent.contains(&"iter/tcp") {
                    self.absent.push("iter/tcp");
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the tracepoints that this kernel lacks or has with other arguments. Without `io_uring_complete`, accepts through
    /// io_uring are not seen; without `kfree_skb`, a dropped final ACK counts as two dropped SYNs. Without `iter/task_file`, a listener whose queue was full
    /// before the trace is not seen; without `iter/tcp`, such a listener of MPTCP.
    pub fn absent(&self) -> &[&'static str] {
        &self.absent
    }

    /// Detaches the programs; their counts stay readable.
    pub fn detach(&mut self) {
        self.programs.detach();
    }

    /// Reads the drops of every open listener, which are otherwise read only with each connection.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn look(&self) -> Result<(), BpfError> {
        for cookie in self.listeners.keys() {
            let cookie =
                cookie.map_err(|error| tracing::failure(NAME, "bpf(BPF_MAP_GET_NEXT_KEY)", &error))?;
            run(&self.look, cookie)?;
        }
        Ok(())
    }

    /// Returns the current sums.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn totals(&self) -> Result<Box<Totals>, BpfError> {
        tracing::value(NAME, &self.sums).map(Box::new)
    }

    /// Returns the number of events that a program missed because it was already running on that processor.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn missed(&self) -> Result<u64, BpfError> {
        self.programs.missed()
    }

    /// Returns all listeners by their cookies, in no particular order.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn listeners(&self) -> Result<Vec<(u64, Listener)>, BpfError> {
        tracing::entries(NAME, &self.listeners)
    }

    /// Returns all workers, in no particular order.
    ///
    /// # Errors
    ///
    /// [`BpfError::Call`] if bpf(2) fails.
    pub fn workers(&self) -> Result<Vec<(WorkerKey, Worker)>, BpfError> {
        tracing::entries(NAME, &self.workers)
    }
}

fn run(program: &OwnedFd, cookie: u64) -> Result<(), BpfError> {
    match call::run(program.as_fd(), cookie) {
        // A signal is pending, which ends the trace anyway.
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
        other => other.map_err(|error| BpfError::of("bpf(BPF_PROG_TEST_RUN)", error)),
    }
}

impl fmt::Debug for AcceptWait {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AcceptWait").finish_non_exhaustive()
    }
}
