//! Reads an object file of this crate: its only program, and the instructions that refer to maps.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use fourtuple_syscalls::Errno;
use object::read::elf::{ElfFile64, FileHeader};
use object::{Endianness, Object, ObjectSection, ObjectSymbol, RelocationFlags, RelocationTarget, elf};

use crate::call::{self, CHOOSES_SOCKETS, ProgramKind, SEES_PACKETS};
use crate::error::BpfError;
use crate::type_info::TypeInfo;

/// The programs of this crate call no GPL-only helper.
const LICENSE: &CStr = c"Dual MIT/GPL";
const CALL: &str = "bpf(BPF_PROG_LOAD)";
/// Start of the name of an iterator's section and of its function in the kernel; the name of the iterator follows.
const ITERATOR: [&str; 2] = ["iter/", "bpf_iter_"];
/// Start of a symbol that stands for the offset of a field in the running kernel: `offset_of__STRUCT__FIELD`.
const OFFSET: &str = "offset_of__";
type Section = (&'static str, ProgramKind, &'static str);
/// ELF section of the program (one per object), the kind of program, and the feature that the kernel lacks if it
/// refuses the program without a verifier log.
const SECTIONS: [Section; 2] = [
    ("sk_reuseport/migrate", CHOOSES_SOCKETS, "BPF_SK_REUSEPORT_SELECT_OR_MIGRATE (Linux 5.14)"),
    ("xdp", SEES_PACKETS, "BPF_PROG_TYPE_XDP with BPF_XDP as its place (Linux 5.9)"),
];
/// Opcode that loads 64 bits from this instruction and the next one (BPF_LD | BPF_IMM | BPF_DW).
const LOAD_64: u8 = 0x18;
/// Source register of such a load of a map (BPF_PSEUDO_MAP_FD): the kernel replaces the descriptor by the map's
/// address.
const PSEUDO_MAP_FD: u8 = 1;

/// A program's instructions, and the positions that refer to maps.
#[derive(Debug)]
pub(crate) struct Program {
    name: &'static str,
    kind: ProgramKind,
    /// The feature that [`BpfError::Absent`] names if the kernel does not support this program type.
    absent: &'static str,
    code: Vec<[u8; 8]>,
    /// Index of each instruction that refers to a map, and the name of the map.
    wants: Vec<(usize, String)>,
}

// Instructions are in the byte order of the machine.
const _: () =
    assert!(cfg!(target_endian = "little"), "the objects in the tree are for little-endian machines");

impl Program {
    /// Reads the program called `name` out of an object.
    pub(crate) fn read(name: &'static str, object: &[u8]) -> Result<Program, BpfError> {
        Self::parse(name, object, &SECTIONS).map_err(|what| BpfError::Object { program: name, what })
    }

    /// Reads an iterator out of an object: the program called `name` in the section `section`. Fills in the offsets of fields.
    pub(crate) fn read_iterator(
        name: &'static str,
        section: &'static str,
        object: &[u8],
        kernel: &TypeInfo,
    ) -> Result<Program, BpfError> {
        let absent = |what| BpfError::Absent { call: CALL, what, source: io::Error::from(Errno::ENOENT) };
        let function = section.replacen(ITERATOR[0], ITERATOR[1], 1);
        let function = kernel.function(&function).ok_or_else(|| absent(section))?;
        let sections = [(section, ProgramKind::iterator(function), section)];
        let parsed = Self::parse(name, object, &sections);
        let mut program = parsed.map_err(|what| BpfError::Object { program: name, what })?;
        for (at, symbol) in std::mem::take(&mut program.wants) {
            let Some(path) = symbol.strip_prefix(OFFSET) else {
                program.wants.push((at, symbol));
                continue;
            };
            let path: Vec<&str> = path.split("__").collect();
            let offset = kernel.offset(&path).ok_or_else(|| absent("a field that the program reads"))?;
            program.code[at][4..].copy_from_slice(&offset.to_le_bytes());
        }
        Ok(program)
    }

    fn parse(name: &'static str, object: &[u8], sections: &[Section]) -> Result<Program, String> {
        let file = ElfFile64::<Endianness>::parse(object).map_err(|error| error.to_string())?;
        let endian = file.endian();
        if file.elf_header().e_machine(endian) != elf::EM_BPF {
            return Err("not for BPF".to_owned());
        }
        let known = sections.iter().find_map(|known| Some((known, file.section_by_name(known.0)?)));
        let names = || sections.iter().map(|known| known.0).collect::<Vec<_>>().join(" or ");
        let ((place, kind, absent), section) = known.ok_or_else(|| format!("no section {}", names()))?;
        let bytes = section.data().map_err(|error| error.to_string())?;
        let (code, rest) = bytes.as_chunks::<8>();
        if !rest.is_empty() || code.is_empty() {
            return Err(format!("{} bytes of code", bytes.len()));
        }
        let starts = file.symbols().any(|symbol| {
            symbol.name() == Ok(name)
                && symbol.address() == 0
                && symbol.section_index() == Some(section.index())
        });
        if !starts {
            return Err(format!("{place} does not begin with {name}"));
        }
        let mut wants = Vec::new();
        for (offset, relocation) in section.relocations() {
            let RelocationFlags::Elf { r_type: elf::R_BPF_64_64 } = relocation.flags() else {
                return Err(format!("a relocation of an unknown kind at {offset}"));
            };
            let RelocationTarget::Symbol(index) = relocation.target() else {
                return Err(format!("a relocation without a symbol at {offset}"));
            };
            let symbol = file.symbol_by_index(index).map_err(|error| error.to_string())?;
            let at = offset as usize / 8;
            if offset % 8 != 0 || code.get(at).is_none_or(|instruction| instruction[0] != LOAD_64) {
                return Err(format!("a relocation of something else than a load at {offset}"));
            }
            wants.push((at, symbol.name().map_err(|error| error.to_string())?.to_owned()));
        }
        Ok(Program { name, kind: *kind, absent, code: code.to_vec(), wants })
    }

    /// Returns the instructions with the descriptors of the maps filled in.
    fn linked(&self, maps: &[(&str, BorrowedFd<'_>)]) -> Result<Vec<[u8; 8]>, BpfError> {
        let mut code = self.code.clone();
        for (at, name) in &self.wants {
            let Some((_, map)) = maps.iter().find(|(known, _)| known == name) else {
                let what = format!("needs the map {name}, which was not created");
                return Err(BpfError::Object { program: self.name, what });
            };
            let instruction = &mut code[*at];
            instruction[1] = instruction[1] & 0x0f | PSEUDO_MAP_FD << 4;
            instruction[4..].copy_from_slice(&map.as_raw_fd().to_le_bytes());
        }
        Ok(code)
    }

    /// Loads the program into the kernel.
    pub(crate) fn load(&self, maps: &[(&str, &OwnedFd)]) -> Result<OwnedFd, BpfError> {
        let maps: Vec<_> = maps.iter().map(|(name, map)| (*name, map.as_fd())).collect();
        let code = self.linked(&maps)?;
        match call::load(self.kind, self.name, LICENSE, &code, &mut []) {
            Ok(program) => Ok(program),
            Err(error) if matches!(Errno::of(&error), Some(Errno::EPERM | Errno::ENOSYS)) => {
                Err(BpfError::of(CALL, error))
            }
            Err(error) => self.load_aloud(&code, error),
        }
    }

    /// Loads the program again with a verifier log, because only the log tells whether EINVAL or EACCES is from the verifier.
    fn load_aloud(&self, code: &[[u8; 8]], error: io::Error) -> Result<OwnedFd, BpfError> {
        let mut log = vec![0; 64 << 10];
        if let Ok(program) = call::load(self.kind, self.name, LICENSE, code, &mut log) {
            return Ok(program);
        }
        let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
        if end == 0 {
            return Err(BpfError::or_absent(CALL, self.absent, error));
        }
        let log = String::from_utf8_lossy(&log[end.saturating_sub(600)..end]).trim().to_owned();
        Err(BpfError::Refused { program: self.name, source: error, log })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST_BUSY: &[u8] = include_bytes!("least_busy.o");

    #[test]
    fn maps_are_put_where_their_names_are_used() {
        let program = Program::read("least_busy", LEAST_BUSY).unwrap();
        let mut names: Vec<_> = program.wants.iter().map(|(_, name)| name.as_str()).collect();
        names.sort();
        assert_eq!(names, ["listeners", "state"]);
        let file = std::fs::File::open("/dev/null").unwrap();
        let code = program.linked(&[("state", file.as_fd()), ("listeners", file.as_fd())]).unwrap();
        for (at, _) in &program.wants {
            assert_eq!(code[*at][1] >> 4, PSEUDO_MAP_FD);
            assert_eq!(code[*at][1] & 0x0f, program.code[*at][1] & 0x0f);
            assert_eq!(code[*at][4..], file.as_raw_fd().to_le_bytes());
        }
        let changed = code.iter().zip(&program.code).filter(|(new, old)| new != old).count();
        assert_eq!(changed, 2);
    }

    #[test]
    fn an_unresolved_map_is_named_in_the_error() {
        let program = Program::read("least_busy", LEAST_BUSY).unwrap();
        let error = program.linked(&[]).unwrap_err().to_string();
        assert!(error.contains("needs the map"), "{error}");
    }

    #[test]
    fn foreign_or_truncated_objects_are_refused() {
        assert!(Program::read("least_busy", b"").is_err());
        assert!(Program::read("least_busy", &LEAST_BUSY[..200]).is_err());
        let error = Program::read("hand_over", LEAST_BUSY).unwrap_err().to_string();
        assert!(error.contains("does not begin with hand_over"), "{error}");
        let executable = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let error = Program::read("least_busy", &executable).unwrap_err().to_string();
        assert!(error.contains("not for BPF"), "{error}");
    }
}
