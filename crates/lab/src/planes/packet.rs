//! The payload of a packet: the flow within its 4-tuple, and the sequence number in that flow.

use std::ops::Range;

use fourtuple::spread::FlowKey;

const FLOW: Range<usize> = 0..4;
const NUMBER: Range<usize> = 4..12;

/// Length of the shortest packet with both numbers, in bytes.
pub(super) const MIN_BYTES: u32 = 16;

/// Returns the position of the flow in the payload, for selectors by key.
pub(super) fn key() -> FlowKey {
    FlowKey::whole(FLOW.start as u16, FLOW.len() as u8)
}

/// Writes both numbers; leaves a packet that is too short unchanged.
pub(super) fn write(packet: &mut [u8], flow: u32, number: u64) {
    if let Some(room) = packet.get_mut(FLOW) {
        room.copy_from_slice(&flow.to_be_bytes());
    }
    if let Some(room) = packet.get_mut(NUMBER) {
        room.copy_from_slice(&number.to_be_bytes());
    }
}

/// Returns flow and sequence number; `None` if the packet is too short.
pub(super) fn read(packet: &[u8]) -> Option<(u32, u64)> {
    let flow = u32::from_be_bytes(packet.get(FLOW)?.try_into().ok()?);
    Some((flow, u64::from_be_bytes(packet.get(NUMBER)?.try_into().ok()?)))
}

/// Checks the sequence numbers of arriving packets.
#[derive(Debug, Default)]
pub(super) struct Order {
    /// The next expected sequence number of each flow.
    next: Vec<u64>,
    /// Packets that arrived after a later packet of their flow.
    pub(super) reordered: u64,
}

impl Order {
    pub(super) fn new(flows: u32) -> Order {
        Order { next: vec![0; flows as usize], reordered: 0 }
    }

    /// Records a packet; returns whether the generator sent it.
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
    fn flow_and_number_survive_writing_and_reading() {
        let mut packet = [0xff; MIN_BYTES as usize];
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
