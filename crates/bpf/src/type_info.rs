//! Finds functions and the offsets of fields in the type information of the running kernel (BTF), for programs that are loaded too often
//! to parse all of it. Documentation/bpf/btf.rst describes the format.

use std::fs;
use std::io;

use fourtuple_syscalls::Errno;

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
