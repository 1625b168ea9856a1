//! What is in a packet: the flow within its 4-tuple, and its number in that flow.

use std::ops::Range;

use fourtuple::spread::Key;

const FLOW: Range<usize> = 0..4;
const NUMBER: Range<usize> = 4..12;

/// Bytes of the shortest packet that has both.
pub(super) const SHORTEST: u32 = 16;

/// Where the flow is, for those who spread by it.
pub(super) fn key() -> Key {
    Key::whole(FLOW.start as u16, FLOW.len() as u8)
}

/// Writes both; nothing into a packet that is too short.
pub(super) fn write(packet: &mut [u8], flow: u32, number: u64) {
    if let Some(room) = packet.get_mut(FLOW) {
        room.copy_from_slice(&flow.to_be_bytes());
    }
    if let Some(room) = packet.get_mut(NUMBER) {
        room.copy_from_slice(&number.to_be_bytes());
    }
}

/// Flow and number; `None` of what is too short.
pub(super) fn read(packet: &[u8]) -> Option<(u32, u64)> {
    let flow = u32::from_be_bytes(packet.get(FLOW)?.try_into().ok()?);
    Some((flow, u64::from_be_bytes(packet.get(NUMBER)?.try_into().ok()?)))
}

/// Looks at the numbers of what arrives.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// Of each flow, the number that is to come next.
    next: Vec<u64>,
    /// Packets that came behind a later one of their flow.
    pub(super) reordered: u64,
}

impl Order {
    pub(super) fn new(flows: u32) -> Order {
        Order { next: vec![0; flows as usize], reordered: 0 }
    }

    /// Whether it was one of ours.
    pub(super) fn saw(&mut self, packet: &[u8]) -> bool {
        let Some((flow, number)) = read(packet) else { return false };
        let Some(next) = self.next.get_mut(flow as usize) else { return false };
        if number < *next {
            self.reordered += 1;
        } else {
            *next = number + 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_is_the_key() {
        let mut packet = [0xff; SHORTEST as usize];
        write(&mut packet, 7, 1 << 40);
        assert_eq!(read(&packet), Some((7, 1 << 40)));
        assert_eq!(key().of(&packet), Some(7));
        assert_eq!(read(&packet[..11]), None);
    }

    #[test]
    fn order_is_that_of_the_flow() {
        let mut order = Order::new(2);
        let mut packet = [0; 16];
        for (flow, number) in [(0, 0), (1, 5), (0, 2), (0, 1), (1, 6), (0, 3), (1, 4)] {
            write(&mut packet, flow, number);
            assert!(order.saw(&packet));
        }
        assert_eq!(order.reordered, 2);
        write(&mut packet, 2, 0);
        assert!(!order.saw(&packet), "there is no such flow");
    }
}
