//! The selectors, by name.

use std::fmt;
use std::str::FromStr;

use crate::spread::device::Device;
use crate::spread::key::Key;

/// What chooses the socket of a group that gets a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Spread {
    /// The kernel's hash of the 4-tuple: one 4-tuple, one socket.
    Hash,
    /// A random number, modulo the number of sockets (classic BPF): even, and packets of a flow overtake each other.
    Random,
    /// The flow within the 4-tuple, modulo the number of sockets (classic BPF): even where there are many flows, and a flow
    /// stays in order. Packets that are too short go to the first socket.
    Key(Key),
    /// The processor that handles the packet, modulo the number of sockets (classic BPF).
    Cpu,
    /// A table, by one of these rules (eBPF): rule, weights and members may be changed under traffic. Takes the feature `bpf`,
    /// CAP_BPF and CAP_NET_ADMIN.
    Map(Rule),
    /// Packets are given one of so many source ports at random before the kernel sees them (XDP), and then the hash spreads
    /// them: for receivers that nobody may change. They see as many peers, to which replies do not get through. Takes what
    /// [`Spread::Map`] takes.
    XdpSourcePort {
        /// How many ports, 1 to 16,384: with few, some sockets get none.
        ports: u16,
        /// Where the packets come; `None` is the device that has the group's address.
        device: Option<Device>,
    },
    /// Packets are given to processors before the kernel has done its work on them (XDP), and each processor's go to a socket
    /// as with [`Spread::Cpu`]: the kernel's work is spread too. Takes what [`Spread::Map`] takes.
    Cpumap {
        /// How many processors, from 0 on; `None` is as many as there are sockets, or processors if these are fewer.
        cpus: Option<u16>,
        /// Which of them.
        order: Order,
        /// Where the packets come; `None` is the device that has the group's address.
        device: Option<Device>,
    },
}

/// What chooses the slot of [`Spread::Map`]'s table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rule {
    /// As [`Spread::Hash`].
    Hash,
    /// As [`Spread::Random`].
    #[default]
    Random,
    /// As [`Spread::Key`].
    Key(Key),
    /// As [`Spread::Cpu`].
    Cpu,
}

/// To which processor [`Spread::Cpumap`] gives a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Order {
    /// To each in turn.
    #[default]
    Turn,
    /// To any.
    Random,
    /// To the one that has its flow, which stays in order.
    Key(Key),
}

/// Why a text names no selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a way to spread packets: expected {}", Spread::EXPECTED)]
pub struct SpreadTextError {
    text: String,
}

/// The most ports of [`Spread::XdpSourcePort`]: 49152 to 65535.
pub(super) const MOST_PORTS: u16 = 16_384;

/// How far into the payload the verifier lets the program of [`Spread::Cpumap`] look.
pub(super) const FARTHEST_KEY: u16 = 0x3fff;

impl Spread {
    /// What can be asked for, for messages.
    pub const EXPECTED: &str = "hash, random, flow:OFFSET:WIDTH or flow:OFFSET:WIDTH:MASK (WIDTH 1, 2 or 4 bytes), cpu, \
         map or map:RULE (RULE hash, random, cpu or flow:...), xdp:PORTS (1 to 16384) or xdp:PORTS@DEVICE, \
         cpumap, cpumap:CPUS, cpumap:CPUS:ORDER (ORDER random or flow:...), each with @DEVICE or without";

    /// What is wrong with its numbers, whoever made it.
    pub(super) fn fault(&self) -> Option<&'static str> {
        let bad_key = |key: &Key| !key.is_sound();
        match self {
            Spread::Key(key) | Spread::Map(Rule::Key(key)) if bad_key(key) => {
                Some("a key has 1, 2 or 4 bytes, of which some bits count")
            }
            Spread::XdpSourcePort { ports, .. } if !(1..=MOST_PORTS).contains(ports) => {
                Some("1 to 16384 ports can be had")
            }
            Spread::Cpumap { cpus: Some(0), .. } => Some("1 processor at least must be there"),
            Spread::Cpumap { order: Order::Key(key), .. } if bad_key(key) || key.offset > FARTHEST_KEY => {
                Some("a key has 1, 2 or 4 bytes, of which some bits count, within the first 16 KiB")
            }
            _ => None,
        }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |device: &Option<Device>| device.map_or(String::new(), |device| format!("@{device}"));
        match self {
            Spread::Hash => formatter.pad("hash"),
            Spread::Random => formatter.pad("random"),
            Spread::Cpu => formatter.pad("cpu"),
            Spread::Key(key) => formatter.pad(&format!("flow:{key}")),
            Spread::Map(rule) => formatter.pad(&format!("map:{rule}")),
            Spread::XdpSourcePort { ports, device } => formatter.pad(&format!("xdp:{ports}{}", at(device))),
            Spread::Cpumap { cpus, order, device } => {
                let cpus = cpus.map_or(String::new(), |cpus| format!(":{cpus}"));
                let order = match order {
                    Order::Turn => String::new(),
                    Order::Random => ":random".to_owned(),
                    Order::Key(key) => format!(":flow:{key}"),
                };
                formatter.pad(&format!("cpumap{cpus}{order}{}", at(device)))
            }
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Rule::Hash => formatter.pad("hash"),
            Rule::Random => formatter.pad("random"),
            Rule::Cpu => formatter.pad("cpu"),
            Rule::Key(key) => formatter.pad(&format!("flow:{key}")),
        }
    }
}

impl FromStr for Spread {
    type Err = SpreadTextError;

    fn from_str(text: &str) -> Result<Spread, SpreadTextError> {
        read(text)
            .filter(|spread| spread.fault().is_none())
            .ok_or_else(|| SpreadTextError { text: text.to_owned() })
    }
}

fn read(text: &str) -> Option<Spread> {
    if let Some(rule) = rule(text) {
        return Some(match rule {
            Rule::Hash => Spread::Hash,
            Rule::Random => Spread::Random,
            Rule::Cpu => Spread::Cpu,
            Rule::Key(key) => Spread::Key(key),
        });
    }
    if let Some(rest) = text.strip_prefix("map") {
        return Some(Spread::Map(match rest.strip_prefix(':') {
            Some(text) => rule(text)?,
            None => rest.is_empty().then(Rule::default)?,
        }));
    }
    let (text, device) = match text.split_once('@') {
        Some((text, device)) => (text, Some(device.parse().ok()?)),
        None => (text, None),
    };
    if let Some(ports) = text.strip_prefix("xdp:") {
        return Some(Spread::XdpSourcePort { ports: ports.parse().ok()?, device });
    }
    let rest = text.strip_prefix("cpumap")?;
    let mut spread = (None, Order::Turn);
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
            Rule::Random => Order::Random,
            Rule::Key(key) => Order::Key(key),
            Rule::Hash | Rule::Cpu => return None,
        };
    }
    Some(Spread::Cpumap { cpus: spread.0, order: spread.1, device })
}

fn rule(text: &str) -> Option<Rule> {
    Some(match text {
        "hash" => Rule::Hash,
        "random" => Rule::Random,
        "cpu" => Rule::Cpu,
        _ => Rule::Key(Key::read(text.strip_prefix("flow:")?)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
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
            assert_eq!(text.parse::<Spread>().unwrap().to_string(), text);
        }
        assert_eq!("map".parse(), Ok(Spread::Map(Rule::Random)));
    }

    #[test]
    fn what_is_none_is_refused_with_what_there_is() {
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
            let error = text.parse::<Spread>().unwrap_err();
            assert!(error.to_string().contains("flow:OFFSET:WIDTH"), "{error}");
        }
    }
}
