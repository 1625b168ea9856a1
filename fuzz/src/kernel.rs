//! Targets for replies of the kernel: netlink messages, and control messages of recvmsg(2).

use fourtuple_syscalls::datagram::control_fields;
use fourtuple_syscalls::netlink;

/// Parses the bytes as a netlink datagram and as attributes.
pub(crate) fn netlink(bytes: &[u8]) {
    let wanted = [7; 8];
    let first = netlink::read_all(bytes, &wanted);
    let second = netlink::read_all(bytes, &wanted);
    assert_eq!(first.1, second.1);
    let Some(([kind_low, kind_high], value)) = bytes.split_first_chunk::<2>() else { return };
    let kind = u16::from_ne_bytes([*kind_low, *kind_high]);
    netlink::attribute(value, kind);
    // An attribute that was written after another attribute is found.
    let value = &value[..value.len().min(1000)];
    let mut attributes = Vec::new();
    netlink::put_attribute(&mut attributes, kind.wrapping_add(1), b"other");
    netlink::put_attribute(&mut attributes, kind, value);
    assert_eq!(attributes.len() % 4, 0);
    assert_eq!(netlink::attribute(&attributes, kind), Some(value));
}

/// Parses the bytes as control messages of recvmsg(2), once as they are and once padded with zeros.
pub(crate) fn control(bytes: &[u8]) {
    let (_, overflowed, arrived_at, answer_from, _) = control_fields(bytes);
    assert!(answer_from.is_none() || arrived_at.is_some());
    if overflowed.is_none() {
        let mut longer = bytes.to_vec();
        longer.resize(longer.len().next_multiple_of(8), 0);
        control_fields(&longer);
    }
}
