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
}

/// Why a text names no filter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a way to tell control packets: expected {}", ControlFilter::EXPECTED)]
pub struct ControlTextError {
    text: String,
}

impl ControlFilter {
    /// What can be asked for, for messages.
    pub const EXPECTED: &str = "bytes:OFFSET:WIDTH=VALUE or bytes:OFFSET:WIDTH:MASK=VALUE (WIDTH 1, 2 or 4 bytes), \
                                ttl=HOPS, or port=SOURCE-PORT";

    /// Whether any packet can be one of these.
    pub(super) fn is_sound(&self) -> bool {
        match self {
            ControlFilter::Bytes { key, value } => key.is_sound() && value & !key.mask == 0,
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
        }
    }
}

impl FromStr for ControlFilter {
    type Err = ControlTextError;

    fn from_str(text: &str) -> Result<ControlFilter, ControlTextError> {
        let read = || {
            let (what, value) = text.split_once('=')?;
            let filter = match what.strip_prefix("bytes:") {
                Some(key) => ControlFilter::Bytes { key: Key::read(key)?, value: key::number(value)? },
                None if what == "ttl" => ControlFilter::Hops(value.parse().ok()?),
                None if what == "port" => ControlFilter::SourcePort(value.parse().ok()?),
                None => return None,
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
        for text in ["bytes:0:1=0xff", "bytes:4:4:0xf0=0x10", "ttl=255", "port=3784"] {
            assert_eq!(text.parse::<ControlFilter>().unwrap().to_string(), text);
        }
        for text in ["", "ttl", "ttl=256", "port=0", "bytes:0:1=256", "bytes:0:1:0xf=0x10", "bytes:0:3=1"] {
            let error = text.parse::<ControlFilter>().unwrap_err();
            assert!(error.to_string().contains("ttl=HOPS"), "{error}");
        }
    }
}
