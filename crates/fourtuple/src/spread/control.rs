//! Filters that identify control packets.

use std::fmt;
use std::str::FromStr;

use fourtuple_syscalls::option::Instruction;

use crate::spread::selector::{self, FlowKey};

/// A filter for the control packets of a group, which the kernel delivers to a separate socket, so that they neither wait behind data
/// nor are dropped with data.
///
/// ```
/// use fourtuple::spread::{ControlFilter, FlowKey};
///
/// let filter: ControlFilter = "bytes:0:1=0xff".parse()?;
/// assert_eq!(filter, ControlFilter::Bytes { key: FlowKey::whole(0, 1), value: 0xff });
/// assert!(filter.finds(&[0xff, 1, 2], None, 40_000) && !filter.finds(b"data", None, 40_000));
///
/// assert!(ControlFilter::Hops(255).finds(b"data", Some(255), 40_000));
/// # Ok::<(), fourtuple::spread::ControlFilterParseError>(())
/// ```
///
/// Example of a group: [`UdpGroup::open_with_control`](crate::spread::UdpGroup::open_with_control).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ControlFilter {
    /// Matches packets with this value at a position in the payload.
    Bytes {
        /// The position, width and mask.
        key: FlowKey,
        /// The value after the mask.
        value: u32,
    },
    /// Matches packets that arrive with this TTL or hop limit. Only a neighbour can send packets that arrive with 255 (GTSM, RFC 5082).
    Hops(u8),
    /// Matches packets with this source port.
    SourcePort(u16),
    /// Matches packets with this value at a position in the payload that arrive with TTL or hop limit 255, which only a neighbour can
    /// send (GTSM, RFC 5082). Data with the same value match only if a neighbour sends them with 255 too.
    Neighbour {
        /// The position, width and mask.
        key: FlowKey,
        /// The value after the mask.
        value: u32,
    },
}

/// The TTL or hop limit that a packet cannot have after a router has forwarded it.
pub(super) const NEIGHBOUR: u8 = 255;

/// An error in the text of a filter.
///
/// ```
/// use fourtuple::spread::ControlFilter;
///
/// let error = "ttl=256".parse::<ControlFilter>().unwrap_err();
/// assert!(error.to_string().ends_with(ControlFilter::EXPECTED));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a way to tell control packets: expected {}", ControlFilter::EXPECTED)]
pub struct ControlFilterParseError {
    text: String,
}

impl ControlFilter {
    /// The accepted texts, for error messages. Example: [`ControlFilterParseError`].
    pub const EXPECTED: &str = "bytes:OFFSET:WIDTH=VALUE or bytes:OFFSET:WIDTH:MASK=VALUE (WIDTH 1, 2 or 4 bytes), \
                                neighbour:OFFSET:WIDTH... (the same with a TTL of 255), ttl=HOPS, or port=SOURCE-PORT";

    /// Returns whether the filter matches a packet, with the same result as in the kernel. `hops` is the TTL or hop limit on arrival;
    /// `None` if the socket does not report it.
    pub fn finds(&self, payload: &[u8], hops: Option<u8>, source_port: u16) -> bool {
        match self {
            ControlFilter::Bytes { key, value } => key.of(payload) == Some(*value),
            ControlFilter::Hops(expected) => hops == Some(*expected),
            ControlFilter::SourcePort(port) => source_port == *port,
            ControlFilter::Neighbour { key, value } => {
                hops == Some(NEIGHBOUR) && key.of(payload) == Some(*value)
            }
        }
    }

    /// Returns whether any packet can match the filter.
    pub(super) fn is_sound(&self) -> bool {
        match self {
            ControlFilter::Bytes { key, value } | ControlFilter::Neighbour { key, value } => {
                key.is_sound() && value & !key.mask == 0
            }
            ControlFilter::Hops(_) => true,
            ControlFilter::SourcePort(port) => *port != 0,
        }
    }
}

impl fmt::Display for ControlFilter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ControlFilter::Bytes { key, value } => formatter.pad(&format!("bytes:{key}={value:#x}")),
            ControlFilter::Hops(hops) => formatter.pad(&format!("ttl={hops}")),
            ControlFilter::SourcePort(port) => formatter.pad(&format!("port={port}")),
            ControlFilter::Neighbour { key, value } => formatter.pad(&format!("neighbour:{key}={value:#x}")),
        }
    }
}

impl FromStr for ControlFilter {
    type Err = ControlFilterParseError;

    fn from_str(text: &str) -> Result<ControlFilter, ControlFilterParseError> {
        let read = || {
            let (what, value) = text.split_once('=')?;
            let filter = match what.split_once(':') {
                Some(("bytes", key)) => {
                    ControlFilter::Bytes { key: FlowKey::read(key)?, value: selector::number(value)? }
                }
                Some(("neighbour", key)) => {
                    ControlFilter::Neighbour { key: FlowKey::read(key)?, value: selector::number(value)? }
                }
                None if what == "ttl" => ControlFilter::Hops(value.parse().ok()?),
                None if what == "port" => ControlFilter::SourcePort(value.parse().ok()?),
                _ => return None,
            };
            filter.is_sound().then_some(filter)
        };
        read().ok_or_else(|| ControlFilterParseError { text: text.to_owned() })
    }
}

// Selectors as classic BPF (SO_ATTACH_REUSEPORT_CBPF), which needs no privilege. A program reads a packet from its payload on, and the
// headers through SKF_NET_OFF.

// include/uapi/linux/bpf_common.h and filter.h
const LOAD_WORD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const LOAD_BYTE: u16 = 0x30;
const LOAD_HALF_FROM_X: u16 = 0x48;
const LOAD_LENGTH: u16 = 0x80;
const AND: u16 = 0x54;
const SHIFT_LEFT: u16 = 0x64;
const SHIFT_RIGHT: u16 = 0x74;
const MODULO: u16 = 0x94;
const TO_X: u16 = 0x07;
const JUMP: u16 = 0x05;
const IF_EQUAL: u16 = 0x15;
const IF_AT_LEAST: u16 = 0x35;
const GIVE: u16 = 0x06;
const GIVE_A: u16 = 0x16;
/// The offset of loads that return ancillary data instead of packet data (SKF_AD_OFF).
const ANCILLARY: u32 = -0x1000_i32 as u32;
const CPU: u32 = ANCILLARY + 36;
const RANDOM: u32 = ANCILLARY + 56;
/// The offset of loads from the IP header on (SKF_NET_OFF).
const NETWORK: u32 = -0x10_0000_i32 as u32;
/// The protocol number of UDP.
const UDP: u32 = 17;
const UDP_HEADER: u16 = 8;
/// The return values of a socket filter: the number of bytes to keep.
const REFUSE: u32 = 0;
const KEEP_ALL: u32 = u32::MAX;

/// The selectors that classic BPF supports.
#[derive(Clone, Copy, Debug)]
pub(super) enum By {
    Random,
    Cpu,
    Key(FlowKey),
}

/// Returns the program for a group of `members` sockets. Packets that match the filter go to the socket with the index `members`.
pub(super) fn program(by: By, members: u32, control: Option<&ControlFilter>) -> Vec<Instruction> {
    let mut program = control.map_or(Vec::new(), |filter| find(filter, members));
    match by {
        By::Random => program.push((LOAD_WORD, 0, 0, RANDOM)),
        By::Cpu => program.push((LOAD_WORD, 0, 0, CPU)),
        By::Key(key) => program.extend(load(&key)),
    }
    program.push((MODULO, 0, 0, members));
    program.push((GIVE_A, 0, 0, 0));
    program
}

/// Returns the socket filter (SO_ATTACH_FILTER) by which a member refuses control packets.
pub(super) fn without_control(filter: &ControlFilter) -> Vec<Instruction> {
    let mut program = find(&behind_udp_header(filter), REFUSE);
    program.push((GIVE, 0, 0, KEEP_ALL));
    program
}

/// Returns the socket filter by which the control socket refuses data packets.
pub(super) fn only_control(filter: &ControlFilter) -> Vec<Instruction> {
    let mut program = find(&behind_udp_header(filter), KEEP_ALL);
    program.push((GIVE, 0, 0, REFUSE));
    program
}

/// Returns the filter with the offsets of a socket filter, which reads a packet from the UDP header on.
fn behind_udp_header(filter: &ControlFilter) -> ControlFilter {
    let behind_header = |key: FlowKey| FlowKey { offset: key.offset.saturating_add(UDP_HEADER), ..key };
    match *filter {
        ControlFilter::Bytes { key, value } => ControlFilter::Bytes { key: behind_header(key), value },
        ControlFilter::Neighbour { key, value } => {
            ControlFilter::Neighbour { key: behind_header(key), value }
        }
        ControlFilter::Hops(_) | ControlFilter::SourcePort(_) => *filter,
    }
}

/// Returns the instructions that load a key. A load beyond the end of the packet ends the program with 0, the first socket.
fn load(key: &FlowKey) -> [Instruction; 2] {
    let code = match key.width {
        1 => LOAD_BYTE,
        2 => LOAD_HALF,
        _ => LOAD_WORD,
    };
    [(code, 0, 0, u32::from(key.offset)), (AND, 0, 0, key.mask)]
}

/// Returns the instructions that load the TTL or hop limit. The first 4 bits are the IP version: an IPv6 socket receives both.
fn hops_left() -> [Instruction; 6] {
    [
        (LOAD_BYTE, 0, 0, NETWORK),
        (SHIFT_RIGHT, 0, 0, 4),
        (IF_EQUAL, 0, 2, 4),
        (LOAD_BYTE, 0, 0, NETWORK + 8),
        (JUMP, 0, 0, 1),
        (LOAD_BYTE, 0, 0, NETWORK + 7),
    ]
}

/// Returns instructions that end the program with `control` for packets that match the filter, and continue otherwise. The two middle
/// numbers of a jump are the instructions to skip if the condition is true, and if it is false.
fn find(filter: &ControlFilter, control: u32) -> Vec<Instruction> {
    match filter {
        ControlFilter::Bytes { key, value } => {
            let [first, second] = load(key);
            vec![
                (LOAD_LENGTH, 0, 0, 0),
                (IF_AT_LEAST, 0, 4, u32::from(key.offset) + u32::from(key.width)),
                first,
                second,
                (IF_EQUAL, 0, 1, *value),
                (GIVE, 0, 0, control),
            ]
        }
        ControlFilter::Hops(hops) => {
            let mut found = hops_left().to_vec();
            found.extend([(IF_EQUAL, 0, 1, u32::from(*hops)), (GIVE, 0, 0, control)]);
            found
        }
        ControlFilter::Neighbour { key, value } => {
            let rest = find(&ControlFilter::Bytes { key: *key, value: *value }, control);
            let mut found = hops_left().to_vec();
            found.push((IF_EQUAL, 0, rest.len() as u8, u32::from(NEIGHBOUR)));
            found.extend(rest);
            found
        }
        // The IPv4 header has its length field; the IPv6 header is assumed to have no extension headers.
        ControlFilter::SourcePort(port) => vec![
            (LOAD_BYTE, 0, 0, NETWORK),
            (SHIFT_RIGHT, 0, 0, 4),
            (IF_EQUAL, 0, 6, 4),
            (LOAD_BYTE, 0, 0, NETWORK),
            (AND, 0, 0, 0x0f),
            (SHIFT_LEFT, 0, 0, 2),
            (TO_X, 0, 0, 0),
            (LOAD_HALF_FROM_X, 0, 0, NETWORK),
            (JUMP, 0, 0, 3),
            (LOAD_BYTE, 0, 0, NETWORK + 6),
            (IF_EQUAL, 0, 3, UDP),
            (LOAD_HALF, 0, 0, NETWORK + 40),
            (IF_EQUAL, 0, 1, u32::from(*port)),
            (GIVE, 0, 0, control),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_writing_and_parsing() {
        for text in ["bytes:0:1=0xff", "bytes:4:4:0xf0=0x10", "neighbour:0:2=0x7", "ttl=255", "port=3784"] {
            assert_eq!(text.parse::<ControlFilter>().unwrap().to_string(), text);
        }
        for text in ["", "ttl", "ttl=256", "port=0", "bytes:0:1=256", "bytes:0:1:0xf=0x10", "bytes:0:3=1"] {
            let error = text.parse::<ControlFilter>().unwrap_err();
            assert!(error.to_string().contains("ttl=HOPS"), "{error}");
        }
        assert!("neighbour:0:1=256".parse::<ControlFilter>().is_err());
    }

    #[test]
    fn packets_match_as_in_the_kernel() {
        let finds = |filter: &str, payload: &[u8], hops, port| {
            filter.parse::<ControlFilter>().unwrap().finds(payload, hops, port)
        };
        assert!(finds("bytes:1:2=0x102", &[0, 1, 2], None, 0));
        assert!(!finds("bytes:1:2=0x102", &[0, 1], None, 0));
        assert!(finds("neighbour:0:1:0xe0=0x20", &[0x3f], Some(255), 0));
        assert!(!finds("neighbour:0:1:0xe0=0x20", &[0x3f], Some(254), 0));
        assert!(!finds("neighbour:0:1:0xe0=0x20", &[0x3f], None, 0));
        assert!(!finds("neighbour:0:1:0xe0=0x20", &[0x40], Some(255), 0));
        assert!(finds("ttl=1", &[], Some(1), 0) && !finds("ttl=1", &[], Some(2), 0));
        assert!(finds("port=7", &[], None, 7) && !finds("port=7", &[], None, 8));
    }
}
