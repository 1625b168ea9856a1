//! The selectors, by name.

use std::fmt;
use std::str::FromStr;

/// A number in the payload that says which flow within the 4-tuple a packet belongs to. Big-endian, as on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Where it begins, in bytes from the start of the payload.
    pub offset: u16,
    /// Its length: 1, 2 or 4 bytes.
    pub width: u8,
    /// Which bits of it count.
    pub mask: u32,
}

impl Key {
    /// All bits of `width` bytes.
    pub fn whole(offset: u16, width: u8) -> Key {
        Key { offset, width, mask: Key::widest(width) }
    }

    fn widest(width: u8) -> u32 {
        match width {
            1 => 0xff,
            2 => 0xffff,
            _ => u32::MAX,
        }
    }

    /// The number in this payload; `None` when the payload ends before it.
    pub fn of(&self, payload: &[u8]) -> Option<u32> {
        let start = usize::from(self.offset);
        let bytes = payload.get(start..start + usize::from(self.width))?;
        Some(bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)) & self.mask)
    }
}

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
}

/// Why a text names no selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a way to spread packets: expected {}", Spread::EXPECTED)]
pub struct SpreadTextError {
    text: String,
}

impl Spread {
    /// What can be asked for, for messages.
    pub const EXPECTED: &str =
        "hash, random, flow:OFFSET:WIDTH or flow:OFFSET:WIDTH:MASK (WIDTH 1, 2 or 4 bytes), or cpu";
}

impl fmt::Display for Spread {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Spread::Hash => formatter.pad("hash"),
            Spread::Random => formatter.pad("random"),
            Spread::Cpu => formatter.pad("cpu"),
            Spread::Key(key) if key.mask == Key::widest(key.width) => {
                formatter.pad(&format!("flow:{}:{}", key.offset, key.width))
            }
            Spread::Key(key) => formatter.pad(&format!("flow:{}:{}:{:#x}", key.offset, key.width, key.mask)),
        }
    }
}

impl FromStr for Spread {
    type Err = SpreadTextError;

    fn from_str(text: &str) -> Result<Spread, SpreadTextError> {
        let refuse = || SpreadTextError { text: text.to_owned() };
        Ok(match text {
            "hash" => Spread::Hash,
            "random" => Spread::Random,
            "cpu" => Spread::Cpu,
            _ => Spread::Key(key(text.strip_prefix("flow:").ok_or_else(refuse)?).ok_or_else(refuse)?),
        })
    }
}

fn key(text: &str) -> Option<Key> {
    let mut words = text.split(':');
    let offset = words.next()?.parse().ok()?;
    let width = words.next()?.parse().ok().filter(|width| [1, 2, 4].contains(width))?;
    let mask = match words.next() {
        None => Key::widest(width),
        Some(mask) => match mask.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16).ok()?,
            None => mask.parse().ok()?,
        },
    };
    (words.next().is_none() && mask != 0 && mask <= Key::widest(width)).then_some(Key { offset, width, mask })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for text in ["hash", "random", "cpu", "flow:4:4", "flow:0:2:0xff0"] {
            assert_eq!(text.parse::<Spread>().unwrap().to_string(), text);
        }
        for text in
            ["", "flow", "flow:4", "flow:4:3", "flow:4:1:0x1ff", "flow:4:4:0", "flow:4:4:1:1", "flow:-1:4"]
        {
            let error = text.parse::<Spread>().unwrap_err();
            assert!(error.to_string().contains("flow:OFFSET:WIDTH"), "{error}");
        }
    }

    #[test]
    fn a_key_is_read_from_the_wire() {
        let key = Key { offset: 2, width: 2, mask: 0xfff };
        assert_eq!(key.of(&[0, 0, 0xab, 0xcd, 0]), Some(0xbcd));
        assert_eq!(key.of(&[0, 0, 0xab]), None);
        assert_eq!(Key::whole(0, 4).of(&[1, 2, 3, 4]), Some(0x0102_0304));
    }
}
