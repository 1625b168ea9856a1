use serde::{Deserialize, Serialize};

use crate::snapshot::{Failures, Owner, Part};
use crate::{Distribution, Record, TraceSymptom};

/// The record of `fourtuple trace accept`.
pub type TraceAcceptRecord = Record<TraceAcceptSettings, TraceAcceptResults>;

/// The settings of `trace accept`. Filters are joined by AND; `null` filters nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceAcceptSettings {
    /// ID of the accepting process.
    pub process: Option<u32>,
    /// Name of the process or accepting thread.
    pub name: Option<String>,
    /// Address of the listener.
    pub listen: Option<String>,
    /// Port of the listener.
    pub port: Option<u16>,
    /// Path of the network namespace of the listener.
    pub netns: Option<String>,
    /// Path of the accepting process's cgroup (version 2); includes the cgroups below it.
    pub cgroup: Option<String>,
    /// Maximum duration; `null`: until stopped.
    pub for_ns: Option<u64>,
}

/// The results of `trace accept`: connections between the handshake and accept() on a live system.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceAcceptResults {
    /// Instrument: `tp_btf` (BTF-typed tracepoints).
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["tp_btf"])))]
    pub tier: String,
    /// Duration of the trace.
    pub elapsed_ns: u64,
    /// Connections accepted.
    pub accepts: u64,
    /// Connections accepted per second.
    pub accepts_per_s: f64,
    /// Time from the end of the handshake until accept() returned the connection. Maximum and mean are exact;
    /// quantiles are accurate to 1.6%.
    pub wait_ns: Option<Distribution>,
    /// Time from the SYN-ACK to its ACK, in whole microseconds, of handshakes with a single SYN-ACK.
    pub handshake_ns: Option<Distribution>,
    /// SYNs and final ACKs dropped because a queue was full.
    pub overflows: u64,
    /// accept() calls that failed with EAGAIN.
    pub empty: u64,
    /// Calls among `empty` that were the thread's first after a wait: the wakeup was for nothing.
    pub woken_for_nothing: u64,
    /// Events that were not counted because a table was full or because no hook saw them, and events for which the kernel did
    /// not run a BPF program (`recursion_misses`).
    pub lost: u64,
    /// Notes on lost events, one line each, when they are too few to make the run invalid: at most one event in 100.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Accepted connections that were queued before the trace began, or came with TCP Fast Open.
    pub earlier: u64,
    /// Histogram of the wait, in ascending order.
    pub histogram: Vec<WaitStep>,
    /// Listening sockets, most accepts first.
    pub listeners: Vec<TraceListener>,
    /// Calls on sockets that failed, by process and address, with the errno that the program got; with a filter by listener, calls with
    /// this address only. `hidden`: not counted.
    #[serde(default)]
    pub calls: Part<Failures>,
    /// Symptoms other than failed calls in the network namespace of the trace, as `doctor` counts them. `hidden`: not read.
    #[serde(default)]
    pub symptoms: Part<Vec<TraceSymptom>>,
    /// Listening unix sockets of the network namespace of the trace that had a queue or refused connects, or that the processes of a filter
    /// use, most refused first. `hidden`: a filter by address or port, or the kernel does not list them.
    #[serde(default)]
    pub unix_listeners: Part<Vec<TraceUnixListener>>,
}

/// A listening unix socket. The kernel has no tracepoint at its queue: its lengths are readings, and accepts and waits are not known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceUnixListener {
    /// The path, or `@` and the abstract name.
    pub path: String,
    /// Cookie of the socket, which the host never reuses.
    pub cookie: u64,
    /// Number of readings of the queue.
    pub readings: u64,
    /// Connections in the accept queue at the first reading.
    pub waiting_first: u32,
    /// Connections in the accept queue at the last reading.
    pub waiting_last: u32,
    /// Maximum number of connections in the accept queue at a reading; it may have been longer between two.
    pub waiting_max: u32,
    /// Readings with a full queue: more connections than `backlog`.
    pub full: u64,
    /// Limit of the accept queue: the backlog of listen(), cut to net.core.somaxconn. The kernel queues one connection more.
    pub backlog: u32,
    /// Calls of connect() that failed with EAGAIN because the queue was full; `null`: failed calls are not counted, or a filter
    /// selects processes, which are not the clients. Listeners with the same path have the same number.
    pub refused: Option<u64>,
    /// Processes that hold the listener at the end.
    pub owners: Vec<Owner>,
    /// Processes that hold accepted connections at the end, the largest number first. Listeners with the same path have the same ones.
    pub workers: Vec<Owner>,
}

/// A bucket of the histogram of waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WaitStep {
    /// Lower bound of the bucket.
    pub from_ns: u64,
    /// Accepts in this bucket.
    pub count: u64,
}

/// A listening socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceListener {
    /// Address and port.
    pub address: String,
    /// Socket cookie, which `ss -e` prints in hexadecimal; members of an SO_REUSEPORT group have different cookies.
    pub cookie: u64,
    /// Inode of the network namespace, as `lsns` prints it.
    pub namespace: u32,
    /// Number of sockets in the SO_REUSEPORT group; 0: the socket is in no group.
    pub group: u32,
    /// Whether the socket was closed during the trace.
    pub closed: bool,
    /// Connections added to the accept queue.
    pub queued: u64,
    /// Connections accepted.
    pub accepts: u64,
    /// Connections accepted by threads that the filters exclude.
    pub other_accepts: u64,
    /// Wait in the accept queue, as in the results.
    pub wait_ns: Option<Distribution>,
    /// Handshake time, as in the results; quantiles are accurate to 6.3%.
    pub handshake_ns: Option<Distribution>,
    /// Handshakes whose SYN-ACK was retransmitted.
    pub retried_handshakes: u64,
    /// Depth of the accept queue.
    pub depth: Depth,
    /// SYNs and final ACKs dropped because the queue was full.
    pub overflows: u64,
    /// Final ACKs among the dropped packets.
    pub overflow_acks: u64,
    /// Packets dropped for other reasons, such as a full SYN queue. If `ignored` is `null`: packets that are not losses included.
    pub other_drops: u64,
    /// Packets that the listener did not need: SYNs sent again, RSTs of handshakes, last ACKs before the data that TCP_DEFER_ACCEPT waits for;
    /// `null`: not known, because the listener is in another network namespace than the trace.
    pub ignored: Option<u64>,
    /// Connections that ended in the queue before a thread accepted them.
    pub never_accepted: u64,
    /// Connections that the peer closed first.
    pub closed_by_peer: u64,
    /// Connections that the workers closed before the peer: the TIME_WAIT socket is on this side.
    pub closed_first: u64,
    /// Connections that ended with a reset.
    pub reset: u64,
    /// Jain's fairness index of the workers' accepts: 1 is even, 1/n means one worker accepted all; `null`: no
    /// accepts.
    pub jain: Option<f64>,
    /// Threads that called accept(), most accepts first.
    pub workers: Vec<TraceWorker>,
}

/// The depth of an accept queue, read as each connection joins it; the maximum also when the trace begins.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Depth {
    /// Mean depth, including the connection that joins.
    pub mean: f64,
    /// Maximum depth.
    pub max: u32,
    /// Backlog of listen(), capped at net.core.somaxconn. The kernel queues one connection more.
    pub backlog: u32,
    /// Connections that filled the queue.
    pub full: u64,
}

/// A thread that accepts, or many short processes of one name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TraceWorker {
    /// Process ID. Of many short processes with this name, one of them.
    pub process: u32,
    /// Processes of this name that accepted connections, which have ended if there are several.
    #[serde(default = "crate::trace::one")]
    pub processes: u32,
    /// Thread ID.
    pub thread: u32,
    /// Name of the thread.
    pub name: String,
    /// Connections that the thread accepted.
    pub accepts: u64,
    /// Mean wait of these connections.
    pub mean_ns: u64,
    /// Median wait, accurate to 6.3%.
    pub p50_ns: u64,
    /// 99th percentile of the wait, accurate to 6.3%.
    pub p99_ns: u64,
    /// Maximum wait.
    pub max_ns: u64,
    /// Connections accepted by the thread that were still open on this side at the end.
    pub open: u64,
    /// Data arrivals signalled to readers of the thread's connections: one per request, if requests are smaller than
    /// a segment and wait for the previous response.
    pub reads: u64,
    /// accept() calls that failed with EAGAIN.
    pub empty: u64,
    /// Calls among `empty` that were the first after epoll_wait(), poll() or select() returned.
    pub woken_for_nothing: u64,
    /// Connections of the listener that the thread closed before the peer.
    pub closed_first: u64,
    /// accept() calls that failed with another error than EAGAIN.
    pub failed: u64,
    /// The last of these errors: `EMFILE`; `null`: none.
    pub error: Option<String>,
}
