//! Selectors: the rules that choose the socket of a packet.

use std::fmt;
use std::str::FromStr;

use crate::spread::device::DeviceName;
use crate::spread::key::FlowKey;

/// The rule that chooses the socket of a group for each packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Selector {
    /// The kernel's hash of the 4-tuple. Packets with the same 4-tuple reach the same socket.
    Hash,
    /// A random number modulo the number of sockets (classic BPF). The distribution is even, and packets of a flow are reordered.
    Random,
    /// A number in the payload modulo the number of sockets (classic BPF). The distribution is even with many flows, and each flow stays
    /// in order. Packets that are too short go to the first socket.
    Key(FlowKey),
    /// The number of the CPU that handles the packet, modulo the number of sockets (classic BPF).
    Cpu,
    /// A table indexed by one of these rules (eBPF). Rule, weights and members can change under traffic. Needs the feature `bpf`,
    /// CAP_BPF and CAP_NET_ADMIN.
    Map(SlotRule),
    /// An XDP program rewrites the source port of each packet to a random port of a range, and the kernel's hash then distributes the
    /// packets. For receivers that cannot be changed. A receiver sees one peer for each port, and replies do not reach the sender.
    /// Needs the same as [`Selector::Map`].
    XdpSourcePort {
        /// The number of ports, 1 to 16,384. With few ports, some sockets get no packets.
        ports: u16,
        /// The device that receives the packets; `None`: the device that has the group's address.
        device: Option<DeviceName>,
    },
    /// An XDP program redirects packets to CPUs before the network stack handles them, and the packets of each CPU go to a socket as with
    /// [`Selector::Cpu`]. This distributes the work of the network stack too. Needs the same as [`Selector::Map`].
    Cpumap {
        /// The number of CPUs, from CPU 0; `None`: the number of sockets or of CPUs, the smaller of both.
        cpus: Option<u16>,
        /// The rule that chooses the CPU.
        order: CpuOrder,
        /// The device that receives the packets; `None`: the device that has the group's address.
        device: Option<DeviceName>,
    },
}

/// The rule that chooses the slot in the table of [`Selector::Map`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SlotRule {
    /// Like [`Selector::Hash`].
    Hash,
    /// Like [`Selector::Random`].
    #[default]
    Random,
    /// Like [`Selector::Key`].
    Key(FlowKey),
    /// Like [`Selector::Cpu`].
    Cpu,
}

/// The rule that chooses the CPU of a packet with [`Selector::Cpumap`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CpuOrder {
    /// Each CPU in turn.
    #[default]
    Turn,
    /// A random CPU.
    Random,
    /// The number in the payload modulo the number of CPUs. Each flow stays in order.
    Key(FlowKey),
}

/// An error in the text of a selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a way to spread packets: expected {}", Selector::EXPECTED)]
pub struct SelectorParseError {
    text: String,
}

/// The most ports of [`Selector::XdpSourcePort`]: 49152 to 65535.
pub(super) const MOST_PORTS: u16 = 16_384;

/// The largest offset in the payload that the BPF verifier accepts for the program of [`Selector::Cpumap`].
pub(super) const FARTHEST_KEY: u16 = 0x3fff;

impl Selector {
    /// The accepted texts, for error messages.
    pub const EXPECTED: &str = "hash, random, flow:OFFSET:WIDTH or flow:OFFSET:WIDTH:MASK (WIDTH 1, 2 or 4 bytes), cpu, \
         map or map:RULE (RULE hash, random, cpu or flow:...), xdp:PORTS (1 to 16384) or xdp:PORTS@DEVICE, \
         cpumap, cpumap:CPUS, cpumap:CPUS:ORDER (ORDER random or flow:...), each with @DEVICE or without";

    /// Returns the fault in the parameters of the selector, if any.
    pub(super) fn fault(&self) -> Option<&'static str> {
        let bad_key = |key: &FlowKey| !key.is_sound();
        match self {
            Selector::Key(key) | Selector::Map(SlotRule::Key(key)) if bad_key(key) => {
                Some("a key has 1, 2 or 4 bytes, of which some bits count")
            }
            Selector::XdpSourcePort { ports, .. } if !(1..=MOST_PORTS).contains(ports) => {
                Some("1 to 16384 ports can be had")
            }
            Selector::Cpumap { cpus: Some(0), .. } => Some("1 processor at least must be there"),
            Selector::Cpumap { order: CpuOrder::Key(key), .. }
                if bad_key(key) || key.offset > FARTHEST_KEY =>
            {
                Some("a key has 1, 2 or 4 bytes, of which some bits count, within the first 16 KiB")
            }
            _ => None,
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |device: &Option<DeviceName>| device.map_or(String::new(), |device| format!("@{device}"));
        match self {
            Selector::Hash => formatter.pad("hash"),
            Selector::Random => formatter.pad("random"),
            Selector::Cpu => formatter.pad("cpu"),
            Selector::Key(key) => formatter.pad(&format!("flow:{key}")),
            Selector::Map(rule) => formatter.pad(&format!("map:{rule}")),
            Selector::XdpSourcePort { ports, device } => formatter.pad(&format!("xdp:{ports}{}", at(device))),
            Selector::Cpumap { cpus, order, device } => {
                let cpus = cpus.map_or(String::new(), |cpus| format!(":{cpus}"));
                let order = match order {
                    CpuOrder::Turn => String::new(),
                    CpuOrder::Random => ":random".to_owned(),
                    CpuOrder::Key(key) => format!(":flow:{key}"),
                };
                formatter.pad(&format!("cpumap{cpus}{order}{}", at(device)))
            }
        }
    }
}

impl fmt::Display for SlotRule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SlotRule::Hash => formatter.pad("hash"),
            SlotRule::Random => formatter.pad("random"),
            SlotRule::Cpu => formatter.pad("cpu"),
            SlotRule::Key(key) => formatter.pad(&format!("flow:{key}")),
        }
    }
}

impl FromStr for Selector {
    type Err = SelectorParseError;

    fn from_str(text: &str) -> Result<Selector, SelectorParseError> {
        read(text)
            .filter(|spread| spread.fault().is_none())
            .ok_or_else(|| SelectorParseError { text: text.to_owned() })
    }
}

fn read(text: &str) -> Option<Selector> {
    if let Some(rule) = rule(text) {
        return Some(match rule {
            SlotRule::Hash => Selector::Hash,
            SlotRule::Random => Selector::Random,
            SlotRule::Cpu => Selector::Cpu,
            SlotRule::Key(key) => Selector::Key(key),
        });
    }
    if let Some(rest) = text.strip_prefix("map") {
        return Some(Selector::Map(match rest.strip_prefix(':') {
            Some(text) => rule(text)?,
            None => rest.is_empty().then(SlotRule::default)?,
        }));
    }
    let (text, device) = match text.split_once('@') {
        Some((text, device)) => (text, Some(device.parse().ok()?)),
        None => (text, None),
    };
    if let Some(ports) = text.strip_prefix("xdp:") {
        return Some(Selector::XdpSourcePort { ports: ports.parse().ok()?, device });
    }
    let rest = text.strip_prefix("cpumap")?;
    let mut spread = (None, CpuOrder::Turn);
    let mut rest = if rest.is_empty() { "" } else { rest.strip_prefix(':')? };
    if rest.starts_with(|letter: char| letter.is_ascii_digit()) {
        let (cpus, behind) = rest.split_once(':').map_or((rest, ""), |(cpus, behind)| (cpus, behind));
        spread.0 = Some(cpus.parse().ok()?);
        if cpus.len() < rest.len() && behind.is_empty() {
            return None;
        }
        rest = behind;
    } else if rest.is_empty() && text.ends_with(':') {
        return None;
    }
    if !rest.is_empty() {
        spread.1 = match rule(rest)? {
            SlotRule::Random => CpuOrder::Random,
            SlotRule::Key(key) => CpuOrder::Key(key),
            SlotRule::Hash | SlotRule::Cpu => return None,
        };
    }
    Some(Selector::Cpumap { cpus: spread.0, order: spread.1, device })
}

fn rule(text: &str) -> Option<SlotRule> {
    Some(match text {
        "hash" => SlotRule::Hash,
        "random" => SlotRule::Random,
        "cpu" => SlotRule::Cpu,
        _ => SlotRule::Key(FlowKey::read(text.strip_prefix("flow:")?)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_writing_and_parsing() {
        for text in [
            "hash",
            "random",
            "cpu",
            "flow:4:4",
            "flow:0:2:0xff0",
            "map:hash",
            "map:random",
            "map:cpu",
            "map:flow:4:1",
            "map:flow:4:1:0xf",
            "xdp:64",
            "xdp:16384@veth0",
            "cpumap",
            "cpumap@eth0",
            "cpumap:4",
            "cpumap:4:random@eth0",
            "cpumap:flow:0:4",
            "cpumap:2:flow:0:4:0xff@eth0",
        ] {
            assert_eq!(text.parse::<Selector>().unwrap().to_string(), text);
        }
        assert_eq!("map".parse(), Ok(Selector::Map(SlotRule::Random)));
    }

    #[test]
    fn unknown_selectors_are_refused_with_the_known_names() {
        for text in [
            "",
            "flow",
            "flow:4",
            "flow:4:3",
            "flow:4:1:0x1ff",
            "flow:4:4:0",
            "flow:4:4:1:1",
            "flow:-1:4",
            "map:",
            "map:map",
            "maps",
            "map@lo",
            "hash@lo",
            "xdp",
            "xdp:",
            "xdp:0",
            "xdp:16385",
            "xdp:64@",
            "xdp:64@a/b",
            "cpumap:",
            "cpumap:0",
            "cpumap:2:",
            "cpumap:2:hash",
            "cpumap:flow:16384:4",
            "cpumap2",
        ] {
            let error = text.parse::<Selector>().unwrap_err();
            assert!(error.to_string().contains("flow:OFFSET:WIDTH"), "{error}");
        }
    }
}
