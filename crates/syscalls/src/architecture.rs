//! The architecture that this program is built for, as ELF files and seccomp filters name it.

/// Number of the machine in ELF files (elf(5)) of 64 bits and little-endian byte order; `None` on an architecture that this crate does
/// not know.
pub const ELF_MACHINE: Option<u16> = if cfg!(not(all(target_pointer_width = "64", target_endian = "little")))
{
    None
} else if cfg!(target_arch = "x86_64") {
    Some(62)
} else if cfg!(target_arch = "aarch64") {
    Some(183)
} else if cfg!(target_arch = "riscv64") {
    Some(243)
} else {
    None
};

/// The value of `arch` in struct seccomp_data (AUDIT_ARCH_*): the machine with the flags __AUDIT_ARCH_64BIT and __AUDIT_ARCH_LE.
pub(crate) const AUDIT: Option<u32> = match ELF_MACHINE {
    Some(machine) => Some(0xc000_0000 | machine as u32),
    None => None,
};

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn this_program_has_the_machine_of_its_elf_file() {
        let file = fs::read("/proc/self/exe").unwrap();
        assert_eq!(ELF_MACHINE, Some(u16::from_le_bytes([file[18], file[19]])));
    }
}
