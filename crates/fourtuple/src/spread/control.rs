//! Filters that identify control packets.

use std::fmt;
use std::str::FromStr;

use crate::spread::key::{self, FlowKey};

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
                    ControlFilter::Bytes { key: FlowKey::read(key)?, value: key::number(value)? }
                }
                Some(("neighbour", key)) => {
                    ControlFilter::Neighbour { key: FlowKey::read(key)?, value: key::number(value)? }
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
