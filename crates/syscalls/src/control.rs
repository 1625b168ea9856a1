//! Control messages of recvmsg(2), read from the bytes that the kernel wrote: cmsg(3) without pointers.

use std::iter;

pub(crate) struct ControlMessage<'a> {
    /// The protocol level (cmsg_level).
    pub(crate) level: i32,
    /// The type of the message (cmsg_type).
    pub(crate) kind: i32,
    /// The data (CMSG_DATA), with the length in cmsg_len.
    pub(crate) data: &'a [u8],
}

impl ControlMessage<'_> {
    /// Returns the first four bytes of the data, or `None` if the data is shorter.
    pub(crate) fn word(&self) -> Option<[u8; 4]> {
        self.data.first_chunk().copied()
    }
}

/// Size of struct cmsghdr in bytes: cmsg_len (`__kernel_size_t`), cmsg_level, cmsg_type.
const HEADER: usize = LENGTH + 8;
const LENGTH: usize = size_of::<usize>();

/// Iterates over the messages in `control`, up to the first message with an impossible length.
pub(crate) fn messages(mut control: &[u8]) -> impl Iterator<Item = ControlMessage<'_>> {
    iter::from_fn(move || {
        let (length, rest) = control.split_first_chunk::<LENGTH>()?;
        let (level, rest) = rest.split_first_chunk::<4>()?;
        let (kind, _) = rest.split_first_chunk::<4>()?;
        let length = usize::from_ne_bytes(*length);
        let data = control.get(HEADER..length)?;
        // CMSG_ALIGN. Padding after the last message is optional.
        control = control.get(length.next_multiple_of(LENGTH)..).unwrap_or_default();
        Some(ControlMessage { level: i32::from_ne_bytes(*level), kind: i32::from_ne_bytes(*kind), data })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(length: usize, kind: i32, data: &[u8]) -> Vec<u8> {
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend_from_slice(&1_i32.to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    fn kinds(control: &[u8]) -> Vec<(i32, usize)> {
        messages(control).map(|message| (message.kind, message.data.len())).collect()
    }

    #[test]
    fn messages_are_read_up_to_an_impossible_length() {
        let first = message(HEADER + 4, 7, &[0; 8]);
        let last = message(HEADER + 4, 8, &[0; 4]);
        assert_eq!(kinds(&[first.clone(), last].concat()), [(7, 4), (8, 4)]);
        for length in [0, HEADER - 1, HEADER + 5, usize::MAX] {
            let wrong = message(length, 9, &[0; 4]);
            assert_eq!(kinds(&[first.clone(), wrong].concat()), [(7, 4)], "{length}");
        }
        assert_eq!(kinds(&first[..HEADER - 1]), []);
    }
}
