use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Record;

/// Record of `fourtuple forward`.
pub type ForwardRecord = Record<ForwardSettings, ForwardResults>;

/// What `forward` was asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardSettings {
    /// The links, in their order.
    pub links: Vec<ForwardLink>,
    /// Threads that forward.
    pub planes: u32,
    /// How they move packets: `one-by-one`, `batched` or `offload`.
    pub plane: String,
    /// Every plane on a processor of its own.
    pub pin: bool,
    /// For how long; `null`: until told to stop.
    pub for_ns: Option<u64>,
}

/// An address to listen at, and where its packets go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardLink {
    /// Address and port, as asked: port 0 is any.
    pub listen: String,
    /// The next hop of what no route is for; `null`: none.
    pub to: Option<String>,
    /// `10.0.0.0/8=192.0.2.1:4000` by destination, `7=192.0.2.1:4000` by inner key.
    pub routes: Vec<String>,
    /// Where the inner key is: `4:4` (offset, width).
    pub key: Option<String>,
    /// Which plane gets a packet: `hash`, `flow:4:4` and so on.
    pub spread: String,
    /// Replies go back to clients.
    pub replies: bool,
    /// After how long a client without packets is forgotten.
    pub idle_ns: u64,
    /// The most clients of a plane.
    pub clients: u32,
    /// The peer of the link's BFD session, `192.0.2.1` or `192.0.2.1@LOCAL`; `null`: none.
    pub bfd: Option<String>,
    /// The same of a session whose packets are among the data: the peer's address and port; `null`: none.
    pub bfd_in_band: Option<String>,
}

/// What was forwarded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ForwardResults {
    /// From the moment when all planes were ready to the end.
    pub elapsed_ns: u64,
    /// Where it could be reached, link by link: the real ports.
    pub listen: Vec<String>,
    /// Each plane, over all links.
    pub planes: Vec<ForwardPlane>,
    /// Jain's index over what the planes received, 1/n to 1; `null`: nothing.
    pub jain: Option<f64>,
    /// The BFD sessions, in the order of their links.
    pub bfd: Vec<ForwardBfd>,
    /// Lines for people.
    pub advice: Vec<String>,
}

/// What one plane did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ForwardPlane {
    /// Packets that came to be sent on.
    pub received: u64,
    /// Bytes of their payloads.
    pub received_bytes: u64,
    /// Packets sent on.
    pub sent: u64,
    /// Bytes of their payloads.
    pub sent_bytes: u64,
    /// Packets sent back to clients.
    pub returned: u64,
    /// Packets that were not sent on, by reason: `no-route`, `truncated`, `queue-full`, `too-long`, `refused`, `unreachable`,
    /// `link-down` (as BFD says), `no-client`, `other`, `overflow` (of the receive queue).
    pub dropped: BTreeMap<String, u64>,
    /// Clients that it had at the end.
    pub clients: u64,
    /// Messages that UDP_SEGMENT would not take, and that went one by one.
    pub unsegmented: u64,
    /// Processor time of its thread.
    pub cpu_ns: u64,
    /// Its part of all that was received, 0 to 1.
    pub share: f64,
}

/// What one BFD session saw.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardBfd {
    /// The peer's address; with its port where control packets are among the data.
    pub peer: String,
    /// How its packets come: at the `port` 3784; among the data, from which a `filter` in the kernel takes them out; or
    /// `planes` do, behind data that wait.
    pub reception: String,
    /// Before it was ended: `admin-down`, `down`, `init` or `up`.
    pub state: String,
    /// Why it went down last, `none` when it never did: the name of RFC 5880's diagnostic code.
    pub diagnostic: String,
    /// How often it went up.
    pub ups: u64,
    /// How often it went down from up.
    pub downs: u64,
    /// Control packets sent.
    pub sent: u64,
    /// Control packets received and taken.
    pub received: u64,
    /// Control packets that RFC 5880 6.8.6 discards, by reason, those of a port that several sessions share at the first of
    /// them; `no-room` are those that a session had no time for, `unsent` those that the kernel did not send.
    pub discarded: BTreeMap<String, u64>,
}
