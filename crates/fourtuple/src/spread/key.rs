//! Flow keys: numbers in the payload.

use std::fmt;

/// The position of a big-endian number in the payload that identifies a flow within the 4-tuple.
///
/// ```
/// use fourtuple::spread::FlowKey;
///
/// let packet = [0, 0, 0x0a, 0xbc];
/// assert_eq!(FlowKey::whole(2, 2).of(&packet), Some(0x0abc));
/// assert_eq!(FlowKey { offset: 2, width: 2, mask: 0xff }.of(&packet), Some(0xbc));
/// assert_eq!(FlowKey::whole(2, 4).of(&packet), None); // too short
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_structs, reason = "callers fill in all fields")]
pub struct FlowKey {
    /// The offset in bytes from the start of the payload.
    pub offset: u16,
    /// The length: 1, 2 or 4 bytes.
    pub width: u8,
    /// The mask of significant bits.
    pub mask: u32,
}

impl FlowKey {
    /// Returns a key with all bits of `width` bytes.
    pub fn whole(offset: u16, width: u8) -> FlowKey {
        FlowKey { offset, width, mask: FlowKey::widest(width) }
    }

    pub(super) fn widest(width: u8) -> u32 {
        match width {
            1 => 0xff,
            2 => 0xffff,
            _ => u32::MAX,
        }
    }

    /// Returns the number in this payload; `None` when the payload is too short.
    pub fn of(&self, payload: &[u8]) -> Option<u32> {
        let start = usize::from(self.offset);
        let bytes = payload.get(start..start + usize::from(self.width))?;
        Some(bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)) & self.mask)
    }

    /// Parses `OFFSET:WIDTH` or `OFFSET:WIDTH:MASK`.
    pub(super) fn read(text: &str) -> Option<FlowKey> {
        let mut words = text.split(':');
        let offset = words.next()?.parse().ok()?;
        let width = words.next()?.parse().ok().filter(|width| [1, 2, 4].contains(width))?;
        let mask = match words.next() {
            None => FlowKey::widest(width),
            Some(mask) => number(mask)?,
        };
        let key = FlowKey { offset, width, mask };
        (words.next().is_none() && key.is_sound()).then_some(key)
    }

    /// Returns whether width and mask are valid.
    pub(super) fn is_sound(&self) -> bool {
        [1, 2, 4].contains(&self.width) && self.mask != 0 && self.mask <= FlowKey::widest(self.width)
    }
}

impl fmt::Display for FlowKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.offset, self.width)?;
        if self.mask != FlowKey::widest(self.width) {
            write!(formatter, ":{:#x}", self.mask)?;
        }
        Ok(())
    }
}

/// Parses a decimal number, or a hexadecimal number with `0x`.
pub(super) fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(digits) => u32::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_from_the_wire() {
        let key = FlowKey { offset: 2, width: 2, mask: 0xfff };
        assert_eq!(key.of(&[0, 0, 0xab, 0xcd, 0]), Some(0xbcd));
        assert_eq!(key.of(&[0, 0, 0xab]), None);
        assert_eq!(FlowKey::whole(0, 4).of(&[1, 2, 3, 4]), Some(0x0102_0304));
    }
}
