use serde::{Deserialize, Serialize};

use crate::Record;

/// The record of `fourtuple fix accept`.
pub type FixAcceptRecord = Record<FixAcceptSettings, FixAcceptResults>;

/// The settings of `fix accept`. One of `listen` and `pid` is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FixAcceptSettings {
    /// Address of the listeners, or `unix:` and the path of a unix socket; `null`: `pid` is set.
    pub listen: Option<String>,
    /// Process whose listeners have selectors, with its descendants; `null`: `listen` is set.
    pub pid: Option<u32>,
    /// The rule of the selector: `least-busy`, `cpu`, `random`, `flow:OFFSET:WIDTH` or `rotate`.
    pub select: String,
    /// Filter for control packets, which one socket of each UDP group gets; `null`: none.
    pub control: Option<String>,
    /// Maximum duration; `null`: until stopped.
    pub for_ns: Option<u64>,
    /// Whether connections were only counted.
    pub dry_run: bool,
}

/// The results of `fix accept`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FixAcceptResults {
    /// Time during which the selectors were attached.
    pub elapsed_ns: u64,
    /// SO_REUSEPORT groups at the end; with `rotate` listeners.
    pub groups: u64,
    /// Connections and datagrams that the selectors sent to a listener.
    pub choices: u64,
    /// Choices per second.
    pub choices_per_s: f64,
    /// TCP connections that entered the queue of a listener; with `rotate` connections that a worker accepted.
    pub connections: u64,
    /// With `rotate`: how often a worker became the last to be woken.
    #[serde(default)]
    pub moves: u64,
    /// Packets for which the kernel's hash chose, because fourtuple had sent no heartbeat for 500 ms.
    pub lapsed: u64,
    /// Packets for which the kernel's hash chose, because the selector found closed listeners only.
    pub strays: u64,
    /// Listeners that joined after the start; with `rotate` workers.
    pub joined: u64,
    /// Listeners that were closed; with `rotate` workers that ended.
    pub closed: u64,
    /// Events that the counting programs missed, because the same program ran on this processor (`recursion_misses`). With `rotate`
    /// these are system calls of any kind, and events for which the ring had no room.
    pub missed: u64,
    /// Listeners and UDP sockets, closed ones included, at most 1,000; with `rotate` a row for each worker of a listener.
    pub listeners: Vec<FixAcceptListener>,
    /// Number of listeners that are not listed.
    pub listeners_left_out: u64,
}

/// A listener, or a UDP socket, of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FixAcceptListener {
    /// `tcp`, `udp` or `unix`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["tcp", "udp", "unix"])))]
    pub transport: String,
    /// Address to which the socket is bound, or the path of a unix socket.
    pub address: String,
    /// Cookie of the socket, which the host never reuses.
    pub cookie: u64,
    /// Process that waits for the connections of the socket.
    pub process: u32,
    /// Name of the process.
    pub command: String,
    /// Connections or datagrams that the selector sent to the socket.
    pub choices: u64,
    /// TCP connections that entered the queue of the socket; with `rotate` connections that the process accepted.
    pub connections: u64,
    /// With `rotate`: how often the process became the last to be woken.
    #[serde(default)]
    pub moves: u64,
    /// Share of the choices at this address, 0 to 1; in a dry run and with `rotate` of the connections; `null` without any.
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::Share>"))]
    pub share: Option<f64>,
    /// Connections that entered the queue after the start and were not closed; `null` with `rotate`, which does not count them.
    pub open: Option<u64>,
    /// Length of the queue at the end: connections, or bytes for UDP; `null`: the socket was closed.
    pub queue: Option<u32>,
}
