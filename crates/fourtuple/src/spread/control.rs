//! Which packets are control.

use std::fmt;
use std::str::FromStr;

use crate::spread::key::{self, Key};

/// Which packets of a group are control packets, that go to a socket of their own: so that they do not wait, and are not
/// dropped, behind data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ControlFilter {
    /// A number in the payload has this value.
    Bytes {
        /// Which number.
        key: Key,
        /// What it is, with the mask on.
        value: u32,
    },
    /// Packets arrive with this time to live, or hop limit: 255 is what only a neighbour can send (GTSM, RFC 5082).
    Hops(u8),
    /// Packets come from this port.
    SourcePort(u16),
    /// A number in the payload has this value, and the packet arrives with 255 hops to live, as only a neighbour can send it
    /// (GTSM, RFC 5082): data that happen to begin alike do not, but for those of a neighbour that sends data so.
    Neighbour {
        /// Which number.
        key: Key,
        /// What it is, with the mask on.
        value: u32,
    },
}

/// What a packet cannot have that has passed a router.
pub(super) const NEIGHBOUR: u8 = 255;

/// Why a text names no filter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a way to tell control packets: expected {}", ControlFilter::EXPECTED)]
pub struct ControlTextError {
    text: String,
}

impl ControlFilter {
    /// What can be asked for, for messages.
    pub const EXPECTED: &str = "bytes:OFFSET:WIDTH=VALUE or bytes:OFFSET:WIDTH:MASK=VALUE (WIDTH 1, 2 or 4 bytes), \
                                neighbour:OFFSET:WIDTH... (the same with a TTL of 255), ttl=HOPS, or port=SOURCE-PORT";

    /// Whether a packet is one of these: what the kernel finds, for those who receive control and data together. Hops are
    /// those that it had left, `None` where the socket does not tell.
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

    /// Whether any packet can be one of these.
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
    type Err = ControlTextError;

    fn from_str(text: &str) -> Result<ControlFilter, ControlTextError> {
        let read = || {
            let (what, value) = text.split_once('=')?;
            let filter = match what.split_once(':') {
                Some(("bytes", key)) => {
                    ControlFilter::Bytes { key: Key::read(key)?, value: key::number(value)? }
                }
                Some(("neighbour", key)) => {
                    ControlFilter::Neighbour { key: Key::read(key)?, value: key::number(value)? }
                }
                None if what == "ttl" => ControlFilter::Hops(value.parse().ok()?),
                None if what == "port" => ControlFilter::SourcePort(value.parse().ok()?),
                _ => return None,
            };
            filter.is_sound().then_some(filter)
        };
        read().ok_or_else(|| ControlTextError { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
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
    fn a_packet_is_found_by_what_the_kernel_goes_by() {
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
