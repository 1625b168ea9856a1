use serde::{Deserialize, Serialize};

use crate::{Record, Spread};

/// Record of `fourtuple trace accept`.
pub type TraceAcceptRecord = Record<TraceAcceptSettings, TraceAcceptResults>;

/// Which accepts were looked at: those that match everything that is not `null`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceAcceptSettings {
    /// Process that accepts.
    pub process: Option<u32>,
    /// Name of the thread that accepts.
    pub name: Option<String>,
    /// Address of the listener.
    pub listen: Option<String>,
    /// Port of the listener.
    pub port: Option<u16>,
    /// Path of a cgroup (version 2) of who accepts; those below it count as well.
    pub cgroup: Option<String>,
    /// For how long; `null`: until told to stop.
    pub for_ns: Option<u64>,
}

/// What became of connections until accept() had them, on a live system.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceAcceptResults {
    /// Instrument: `tp_btf` (BTF-typed tracepoints).
    pub tier: String,
    /// For how long was traced.
    pub elapsed_ns: u64,
    /// Connections that were accepted.
    pub accepts: u64,
    /// These, per second.
    pub accepts_per_s: f64,
    /// From being established until accept() gave the connection. The maximum and the mean are exact, quantiles to 1.6%.
    pub wait_ns: Option<Spread>,
    /// From the SYN-ACK to its ACK, in whole microseconds, of handshakes whose SYN-ACK was sent once.
    pub handshake_ns: Option<Spread>,
    /// SYNs and final ACKs that were dropped because a queue was full.
    pub overflows: u64,
    /// Calls of accept() that found nothing (EAGAIN).
    pub empty: u64,
    /// Of these, the first call after the thread came back from waiting: it was woken for nothing.
    pub woken_for_nothing: u64,
    /// What was not counted, or not shown, for want of room, or because no hook told.
    pub lost: u64,
    /// Accepts of connections that were in a queue before the trace began, or came with TCP Fast Open.
    pub earlier: u64,
    /// Accepts by time of wait, in ascending order.
    pub histogram: Vec<WaitStep>,
    /// Listening sockets, the one with the most accepts first.
    pub listeners: Vec<TraceListener>,
}

/// Accepts whose connections waited about as long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitStep {
    /// The shortest time that counts here.
    pub from_ns: u64,
    /// Accepts.
    pub count: u64,
}

/// A listening socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceListener {
    /// Address and port.
    pub address: String,
    /// Its cookie, as `ss -e` shows it (there in hexadecimal): members of one SO_REUSEPORT group have each its own.
    pub cookie: u64,
    /// Inode of its network namespace, as `lsns` shows it.
    pub namespace: u32,
    /// Sockets of its SO_REUSEPORT group; 0: it is in none.
    pub group: u32,
    /// It was closed while the trace went on.
    pub closed: bool,
    /// Connections that came into its queue.
    pub queued: u64,
    /// Connections that were accepted.
    pub accepts: u64,
    /// Connections that were accepted by whom the settings leave out.
    pub other_accepts: u64,
    /// See the results' field of this name.
    pub wait_ns: Option<Spread>,
    /// See the results' field of this name; quantiles to 6.3%.
    pub handshake_ns: Option<Spread>,
    /// Handshakes whose SYN-ACK was sent again.
    pub retried_handshakes: u64,
    /// Of its queue.
    pub depth: Depth,
    /// SYNs and final ACKs that were dropped because the queue was full.
    pub overflows: u64,
    /// Of these, final ACKs.
    pub overflow_acks: u64,
    /// Packets that were dropped for other reasons.
    pub other_drops: u64,
    /// Connections that were gone before anybody accepted them.
    pub never_accepted: u64,
    /// Connections whose peer closed first.
    pub closed_by_peer: u64,
    /// Connections that its workers closed before the peer did: the TIME_WAIT is on this side.
    pub closed_first: u64,
    /// Connections that ended with a reset.
    pub reset: u64,
    /// Jain's index of what the workers accepted: 1 is even, 1/n is one who has all; `null`: nobody accepted.
    pub jain: Option<f64>,
    /// Threads that accepted, or tried to, the one with the most accepts first.
    pub workers: Vec<TraceWorker>,
}

/// How deep a queue was, each time with the connection that came.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Depth {
    /// Mean of what connections found, with themselves.
    pub mean: f64,
    /// The deepest.
    pub max: u32,
    /// What listen() asked for, within net.core.somaxconn. One more fits.
    pub backlog: u32,
    /// Connections after which there was no room left.
    pub full: u64,
}

/// A thread that accepts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceWorker {
    /// Process.
    pub process: u32,
    /// Thread.
    pub thread: u32,
    /// Name of the thread.
    pub name: String,
    /// Connections that it accepted.
    pub accepts: u64,
    /// How long they had waited: mean.
    pub mean_ns: u64,
    /// Median, to 6.3%.
    pub p50_ns: u64,
    /// 99th percentile, to 6.3%.
    pub p99_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// Connections that it accepted and that were open on this side at the end.
    pub open: u64,
    /// Times that data came for connections that it accepted and the reader was told: one for each request that is smaller
    /// than a segment and waits for the answer to the one before.
    pub reads: u64,
    /// Calls of accept() that found nothing (EAGAIN).
    pub empty: u64,
    /// Of these, the first call after it came back from waiting (epoll_wait(), poll(), select()).
    pub woken_for_nothing: u64,
    /// Connections of the listener that it closed before the peer did.
    pub closed_first: u64,
}
