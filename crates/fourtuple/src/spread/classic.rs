//! Selectors as classic BPF, which needs no privilege: SO_ATTACH_REUSEPORT_CBPF. It sees a packet from its payload on.

use fourtuple_syscalls::option::Instruction;

use crate::spread::selector::{Key, Spread};

// include/uapi/linux/bpf_common.h and filter.h
const LOAD_WORD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const LOAD_BYTE: u16 = 0x30;
const AND: u16 = 0x54;
const MODULO: u16 = 0x94;
const GIVE_A: u16 = 0x16;
/// Where loads give something other than the packet.
const ANCILLARY: u32 = -0x1000_i32 as u32;
const CPU: u32 = ANCILLARY + 36;
const RANDOM: u32 = ANCILLARY + 56;

/// The program for a group of `members`; `None` where the kernel's hash is what is wanted.
pub(super) fn program(spread: &Spread, members: u32) -> Option<Vec<Instruction>> {
    let mut program = match spread {
        Spread::Hash => return None,
        Spread::Random => vec![(LOAD_WORD, 0, 0, RANDOM)],
        Spread::Cpu => vec![(LOAD_WORD, 0, 0, CPU)],
        Spread::Key(key) => load(key),
    };
    program.push((MODULO, 0, 0, members));
    program.push((GIVE_A, 0, 0, 0));
    Some(program)
}

/// A load beyond the end of the packet ends the program with 0: the first socket.
fn load(key: &Key) -> Vec<Instruction> {
    let code = match key.width {
        1 => LOAD_BYTE,
        2 => LOAD_HALF,
        _ => LOAD_WORD,
    };
    vec![(code, 0, 0, u32::from(key.offset)), (AND, 0, 0, key.mask)]
}
