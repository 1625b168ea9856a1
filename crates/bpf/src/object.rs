//! Reads an object file of this crate: its only program, and the instructions that refer to maps.

use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use fourtuple_syscalls::Errno;
use object::read::elf::{ElfFile64, FileHeader};
use object::{Endianness, Object, ObjectSection, ObjectSymbol, RelocationFlags, RelocationTarget, elf};

use crate::call::{self, CHOOSES_SOCKETS, ProgramKind, SEES_PACKETS};
use crate::error::BpfError;

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

/// The type information of the kernel.
#[derive(Debug)]
pub(crate) struct TypeInfo {
    bytes: Vec<u8>,
    strings: usize,
    /// Position of each type by its number, which starts at 1.
    types: Vec<u32>,
    /// Numbers of the structs and functions, which are a part of all types.
    named: Vec<u32>,
}

const FILE: &str = "/sys/kernel/btf/vmlinux";
const MAGIC: u32 = 0xeb9f;
/// Length of struct btf_type without what follows it.
const TYPE: usize = 12;
/// Length of struct btf_member.
const MEMBER: usize = 12;

/// Kinds of types.
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const FUNCTION: u32 = 12;

impl TypeInfo {
    /// Reads the type information of the running kernel.
    pub(crate) fn read() -> io::Result<TypeInfo> {
        TypeInfo::parse(fs::read(FILE)?).ok_or_else(|| io::Error::from(Errno::EBADMSG))
    }

    fn parse(bytes: Vec<u8>) -> Option<TypeInfo> {
        if word(&bytes, 0)? & 0xffff != MAGIC {
            return None;
        }
        let header = word(&bytes, 4)? as usize;
        let start = header.checked_add(word(&bytes, 8)? as usize)?;
        let end = start.checked_add(word(&bytes, 12)? as usize)?;
        let strings = header.checked_add(word(&bytes, 16)? as usize)?;
        let mut types = vec![0];
        let mut named = Vec::new();
        let mut at = start;
        while at < end {
            let (kind, members) = kind(&bytes, at)?;
            if kind == STRUCT || kind == FUNCTION {
                named.push(types.len() as u32);
            }
            types.push(at as u32);
            at += TYPE
                + match kind {
                    1 | 14 | 17 => 4,
                    3 => 12,
                    STRUCT | UNION | 15 | 19 => members * 12,
                    6 | 13 => members * 8,
                    2 | 7..=12 | 16 | 18 => 0,
                    _ => return None,
                };
        }
        Some(TypeInfo { bytes, strings, types, named })
    }

    pub(crate) fn function(&self, name: &str) -> Option<u32> {
        self.find(FUNCTION, name)
    }

    /// Returns the offset in bytes of a field, by the name of the struct and the names of the fields within each other.
    pub(crate) fn offset(&self, path: &[&str]) -> Option<u32> {
        let (name, fields) = path.split_first()?;
        let mut place = *self.types.get(self.find(STRUCT, name)? as usize)? as usize;
        let mut offset = 0;
        for field in fields {
            let (bits, kind) = self.field(place, field, 4)?;
            offset += bits / 8;
            place = *self.types.get(kind as usize)? as usize;
        }
        Some(offset)
    }

    /// Returns the offset of a field in bits and the number of its type. `depth` limits the nesting of unnamed structs.
    fn field(&self, at: usize, name: &str, depth: u32) -> Option<(u32, u32)> {
        let (kind, members) = kind(&self.bytes, at)?;
        if !matches!(kind, STRUCT | UNION) || depth == 0 {
            return None;
        }
        // A struct with bit fields has the size of each field in the upper 8 bits of the offset.
        let mask = if word(&self.bytes, at + 4)? >> 31 == 1 { 0xff_ffff } else { u32::MAX };
        for member in 0..members {
            let place = at + TYPE + member * MEMBER;
            let (found, kind) = (word(&self.bytes, place)?, word(&self.bytes, place + 4)?);
            let bits = word(&self.bytes, place + 8)? & mask;
            if found == 0 {
                let inner = self.types.get(kind as usize).map(|at| *at as usize);
                if let Some((more, kind)) = inner.and_then(|at| self.field(at, name, depth - 1)) {
                    return Some((bits + more, kind));
                }
            } else if self.is_named(found, name) {
                return Some((bits, kind));
            }
        }
        None
    }

    fn find(&self, wanted: u32, name: &str) -> Option<u32> {
        let is_wanted = |number: &u32| {
            let at = self.types[*number as usize] as usize;
            kind(&self.bytes, at).is_some_and(|(kind, _)| kind == wanted)
                && word(&self.bytes, at).is_some_and(|found| self.is_named(found, name))
        };
        self.named.iter().copied().find(is_wanted)
    }

    fn is_named(&self, string: u32, name: &str) -> bool {
        let text = self.bytes.get(self.strings + string as usize..).unwrap_or_default();
        text.starts_with(name.as_bytes()) && text.get(name.len()) == Some(&0)
    }
}

/// Returns the kind of a type and the number of its members.
fn kind(bytes: &[u8], at: usize) -> Option<(u32, usize)> {
    let info = word(bytes, at + 4)?;
    Some((info >> 24 & 0x1f, (info & 0xffff) as usize))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk::<4>().map(|word| u32::from_ne_bytes(*word))
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

    #[test]
    fn offsets_in_unnamed_and_nested_structs_are_found() {
        let Ok(kernel) = TypeInfo::read() else {
            eprintln!("SKIPPED offsets of the kernel: no {FILE}");
            return;
        };
        // include/net/sock.h: these fields have had their places since Linux 4.
        assert_eq!(kernel.offset(&["sock_common", "skc_daddr"]), Some(0));
        assert_eq!(kernel.offset(&["sock_common", "skc_num"]), Some(14));
        assert_eq!(kernel.offset(&["sock_common", "skc_family"]), Some(16));
        assert!(kernel.offset(&["file", "f_inode"]) > Some(0));
        assert!(kernel.function("bpf_iter_task_file").is_some());
        assert_eq!(kernel.offset(&["file", "no_such_field"]), None);
        assert_eq!(kernel.function("no_such_function"), None);
    }

    #[test]
    fn damaged_type_information_is_refused() {
        assert!(TypeInfo::parse(Vec::new()).is_none());
        assert!(TypeInfo::parse(vec![0; 64]).is_none());
        let mut bytes = Vec::new();
        for word in [MAGIC | 1 << 16, 24, 0, TYPE as u32, TYPE as u32, 1, 0, 31 << 24, 0, 0] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        assert!(TypeInfo::parse(bytes).is_none(), "a kind that does not exist");
    }
}
