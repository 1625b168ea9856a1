//! The settings of `lab planes` and of one of its cells.

use std::time::Duration;

use fourtuple_forward::PlaneKind;

use crate::LabError;
use crate::planes::packet;

/// The network between the generator, the planes and the sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkKind {
    /// Pairs of veth devices between three network namespaces.
    Veth,
    /// The loopback device of one namespace.
    Loopback,
}

impl NetworkKind {
    /// The two kinds of network.
    pub const ALL: [NetworkKind; 2] = [NetworkKind::Veth, NetworkKind::Loopback];

    /// Returns the name in records.
    pub fn name(self) -> &'static str {
        match self {
            NetworkKind::Veth => "veth",
            NetworkKind::Loopback => "loopback",
        }
    }
}

/// The selector of the plane that receives a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpreadBy {
    /// The kernel's hash of the 4-tuple.
    Hash,
    /// A random number.
    Random,
    /// The flow within the 4-tuple.
    Flow,
    /// The processor that handles the packet.
    Cpu,
}

impl SpreadBy {
    /// All selectors.
    pub const ALL: [SpreadBy; 4] = [SpreadBy::Hash, SpreadBy::Random, SpreadBy::Flow, SpreadBy::Cpu];

    /// Returns the name in records.
    pub fn name(self) -> &'static str {
        match self {
            SpreadBy::Hash => "hash",
            SpreadBy::Random => "random",
            SpreadBy::Flow => "flow",
            SpreadBy::Cpu => "cpu",
        }
    }
}

/// The settings of `lab planes`. If all lists are empty, the lab runs a fixed set of cells. Otherwise it runs every combination of the
/// lists, with these values for an empty list: all plane kinds; 1, 2 and 4 planes; 64 bytes; spread by flow; one 4-tuple; no work.
#[derive(Clone, Debug)]
pub struct Planes {
    /// Kinds of planes.
    pub kinds: Vec<PlaneKind>,
    /// Numbers of planes: 1 to 64.
    pub planes: Vec<u32>,
    /// Payload lengths in bytes: 16 to 9000.
    pub bytes: Vec<u32>,
    /// Selectors of the plane.
    pub spreads: Vec<SpreadBy>,
    /// Numbers of 4-tuples: 1 to 256.
    pub flows: Vec<u32>,
    /// Processor time that a plane spends on each packet besides moving it: up to 1 ms.
    pub work: Vec<Duration>,
    /// Packets of one run: 1,000 to 100 million.
    pub packets: u64,
    /// Runs of every cell: 1 to 100.
    pub repeats: u32,
    /// The network to run over.
    pub over: NetworkKind,
    /// Seed of the resampling that gives the confidence intervals.
    pub seed: u64,
}

/// The settings of one cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spec {
    pub(super) kind: PlaneKind,
    pub(super) planes: u32,
    pub(super) bytes: u32,
    pub(super) spread: SpreadBy,
    pub(super) flows: u32,
    pub(super) work: Duration,
}

/// IPv4 and UDP headers.
const HEADERS: u32 = 28;

impl Spec {
    /// Returns the smaller of the MTUs 1500 and 3000 that the packet fits into, or else the length of the packet.
    pub(super) fn mtu(&self) -> u32 {
        let needed = self.bytes + HEADERS;
        [1500, 3000].into_iter().find(|mtu| needed <= *mtu).unwrap_or(needed)
    }

    pub(super) fn title(&self) -> String {
        let Spec { kind, planes, bytes, spread, flows, work } = self;
        let tuples = if *flows == 1 { "one 4-tuple".to_owned() } else { format!("{flows} 4-tuples") };
        format!("{kind} x{planes}, {bytes} B, {}, {tuples}, work {work:?}", spread.name())
    }
}

impl Planes {
    /// Checks the ranges of the settings, without a system call.
    ///
    /// # Errors
    ///
    /// [`LabError::Setting`]
    pub fn check(&self) -> Result<(), LabError> {
        let within = |setting, values: &[u32], low, high| match values
            .iter()
            .find(|value| !(low..=high).contains(*value))
        {
            Some(value) => Err(LabError::setting(setting, value, format!("accepted are {low} to {high}"))),
            None => Ok(()),
        };
        within("planes", &self.planes, 1, 64)?;
        within("bytes", &self.bytes, packet::MIN_BYTES, 9000)?;
        within("flows", &self.flows, 1, 256)?;
        within("repeats", &[self.repeats], 1, 100)?;
        if let Some(long) = self.work.iter().find(|work| **work > Duration::from_millis(1)) {
            return Err(LabError::setting("work", format!("{long:?}"), "accepted is up to 1ms"));
        }
        if !(1_000..=100_000_000).contains(&self.packets) {
            return Err(LabError::setting("packets", self.packets, "accepted are 1000 to 100000000"));
        }
        Ok(())
    }
}
