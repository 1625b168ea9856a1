use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// The record of `fourtuple forward`.
pub type ForwardRecord = Record<ForwardSettings, ForwardResults>;

/// The settings of `forward`, defaults included.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ForwardSettings {
    /// The links, in the order given.
    pub links: Vec<ForwardLink>,
    /// Number of planes (forwarding threads).
    pub planes: u32,
    /// I/O method of the planes: `one-by-one`, `batched`, `offload` or `uring`.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Plane"))]
    pub plane: String,
    /// Whether every plane is pinned to a CPU of its own.
    pub pin: bool,
    /// Maximum duration; `null`: until stopped.
    pub for_ns: Option<u64>,
}

/// A listening address and its next hops.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ForwardLink {
    /// Address and port to listen on, as given; the kernel chooses for port 0.
    pub listen: String,
    /// Default next hop for packets that match no route; `null`: none.
    pub to: Option<String>,
    /// Routes: `10.0.0.0/8=192.0.2.1:4000` by destination, `7=192.0.2.1:4000` by inner key.
    pub routes: Vec<String>,
    /// Location of the inner key in the payload as offset and width: `4:4`.
    pub key: Option<String>,
    /// Selector of the plane that receives a packet: `hash`, `flow:4:4` and others.
    pub spread: String,
    /// Whether replies of the next hops return to the clients.
    pub replies: bool,
    /// Idle timeout of a client.
    pub idle_ns: u64,
    /// Maximum number of clients of a plane.
    pub clients: u32,
    /// Peer of the link's BFD session: `192.0.2.1`, `192.0.2.1%DEVICE` or `192.0.2.1@LOCAL`; `null`: none.
    pub bfd: Option<String>,
    /// Peer (address and port) of the BFD session whose control packets share the data port; `null`: none.
    pub bfd_in_band: Option<String>,
    /// Timers that the BFD session proposes; absent: no session, or an older record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bfd_timers: Option<ForwardBfdTimers>,
}

/// The timers that a BFD session proposes (RFC 5880, section 4.1); the peers negotiate the actual ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ForwardBfdTimers {
    /// Desired Min TX Interval.
    pub interval_ns: u64,
    /// Required Min RX Interval.
    pub receive_interval_ns: u64,
    /// Detect Mult.
    #[cfg_attr(feature = "schema", schemars(range(min = 1)))]
    pub multiplier: u8,
}

/// The results of `forward`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ForwardResults {
    /// Time from the moment when all planes were ready to the end.
    pub elapsed_ns: u64,
    /// Bound address of each link, with the actual port.
    pub listen: Vec<String>,
    /// Counters of each plane, over all links.
    pub planes: Vec<ForwardPlane>,
    /// Jain's fairness index of the planes' received packets, 1/n to 1; `null`: no packet was received.
    pub jain: Option<f64>,
    /// Maximum number of clients of all planes together; `null`: no link returns replies, or the record is older.
    #[serde(default)]
    pub client_limit: Option<u64>,
    /// The BFD sessions, in the order of their links.
    pub bfd: Vec<ForwardBfd>,
    /// Advice, one sentence per entry.
    pub advice: Vec<String>,
}

/// The counters of one plane.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ForwardPlane {
    /// Packets received for forwarding.
    pub received: u64,
    /// Payload bytes received.
    pub received_bytes: u64,
    /// Packets sent to next hops, without `failed_later`.
    pub sent: u64,
    /// Payload bytes of all packets given to the kernel, packets that failed later included.
    pub sent_bytes: u64,
    /// Packets given to the kernel for which an ICMP error arrived later, which are in `dropped`; 0 in older records.
    #[serde(default)]
    pub failed_later: u64,
    /// Packets returned to clients.
    pub returned: u64,
    /// Packets dropped, by reason: `no-route`, `truncated`, `queue-full`, `too-long`, `refused`, `unreachable`,
    /// `link-down` (BFD), `no-client`, `circulating` (from a next hop or an own address), `other`, `overflow` (of the
    /// receive queue), `checksum` (a wrong UDP checksum).
    pub dropped: BTreeMap<String, u64>,
    /// Replies that were not returned to clients, by the same reasons; empty in older records, where `dropped` has them.
    #[serde(default)]
    pub dropped_replies: BTreeMap<String, u64>,
    /// Clients at the end.
    pub clients: u64,
    /// Clients evicted before their idle timeout to free space for new clients; 0 in older records.
    #[serde(default)]
    pub evicted: u64,
    /// Clients removed after one packet without a reply; 0 in older records.
    #[serde(default)]
    pub unanswered: u64,
    /// Messages that UDP_SEGMENT rejected and that were sent packet by packet.
    pub unsegmented: u64,
    /// Receive calls that failed and were repeated; 0 in older records.
    #[serde(default)]
    pub failed_receives: u64,
    /// CPU time of the plane's thread.
    pub cpu_ns: u64,
    /// Share of all received packets, 0 to 1.
    #[cfg_attr(feature = "schema", schemars(with = "crate::schema::Share"))]
    pub share: f64,
}

/// The state and the counters of one BFD session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ForwardBfd {
    /// Address of the peer, with `%` and the device if the session is bound to one; with a port if control packets
    /// share the data port.
    pub peer: String,
    /// Receive path of control packets: `port` (port 3784), `filter` (a kernel filter separates them from the data),
    /// or `planes` (the planes find them behind queued data).
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["port", "filter", "planes"])))]
    pub reception: String,
    /// State before the shutdown: `admin-down`, `down`, `init` or `up`.
    #[cfg_attr(feature = "schema", schemars(extend("enum" = ["admin-down", "down", "init", "up"])))]
    pub state: String,
    /// Diagnostic code (RFC 5880) of the last transition to Down; `none`: there was none.
    pub diagnostic: String,
    /// Transitions to Up.
    pub ups: u64,
    /// Transitions from Up to Down.
    pub downs: u64,
    /// Control packets sent.
    pub sent: u64,
    /// Control packets received and accepted.
    pub received: u64,
    /// Control packets discarded under RFC 5880, section 6.8.6, by reason; the first of several sessions on one port
    /// has the counts of the port. `no-room`: the session could not keep up; `at-socket`: dropped by the kernel at the
    /// socket (fewer than 255 hops, or a full queue); `unsent`: not sent by the kernel.
    pub discarded: BTreeMap<String, u64>,
}
