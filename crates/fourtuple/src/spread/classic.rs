//! Selectors as classic BPF (SO_ATTACH_REUSEPORT_CBPF), which needs no privilege. A program reads a packet from its payload on, and the
//! headers through SKF_NET_OFF.

use fourtuple_syscalls::option::Instruction;

use crate::spread::control::{ControlFilter, NEIGHBOUR};
use crate::spread::key::FlowKey;

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
