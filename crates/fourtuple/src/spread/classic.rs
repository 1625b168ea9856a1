//! Selectors as classic BPF, which needs no privilege: SO_ATTACH_REUSEPORT_CBPF. It sees a packet from its payload on, and
//! what is before that by SKF_NET_OFF.

use fourtuple_syscalls::option::Instruction;

use crate::spread::control::{ControlFilter, NEIGHBOUR};
use crate::spread::key::Key;

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
/// Where loads give something other than the packet.
const ANCILLARY: u32 = -0x1000_i32 as u32;
const CPU: u32 = ANCILLARY + 36;
const RANDOM: u32 = ANCILLARY + 56;
/// Where loads give the packet from the IP header on.
const NETWORK: u32 = -0x10_0000_i32 as u32;
/// The protocol number of UDP.
const UDP: u32 = 17;

/// What classic BPF can choose by.
#[derive(Clone, Copy, Debug)]
pub(super) enum By {
    Random,
    Cpu,
    Key(Key),
}

/// The program for a group of `members`; what the filter finds goes to the socket behind the last of these.
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

/// A load beyond the end of the packet ends the program with 0: the first socket.
fn load(key: &Key) -> [Instruction; 2] {
    let code = match key.width {
        1 => LOAD_BYTE,
        2 => LOAD_HALF,
        _ => LOAD_WORD,
    };
    [(code, 0, 0, u32::from(key.offset)), (AND, 0, 0, key.mask)]
}

/// Loads how many hops the packet had left. Which family it is of is in its first 4 bits: a socket of IPv6 gets both.
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

/// Ends with socket `control` for what the filter finds, and goes on behind itself for the rest. The two numbers in the
/// middle of a jump are how many instructions are left out when it is so, and when not.
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
        // The header before it is as long as IPv4 says; of IPv6 the one without extensions.
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
