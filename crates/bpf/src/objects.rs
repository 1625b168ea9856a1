//! BPF programs, links and maps by their ids: which of them a process holds, and which still exist.

use std::collections::BTreeSet;
use std::fs;
use std::io;

use fourtuple_syscalls::Errno;

use crate::call::{self, ObjectKind};
use crate::error::BpfError;

/// A set of programs, links and maps of the host, by the ids that the kernel assigns. Ids increase, so the id of a freed
/// object does not soon belong to another object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Objects {
    pub programs: BTreeSet<u32>,
    /// Links, which keep programs attached.
    pub links: BTreeSet<u32>,
    pub maps: BTreeSet<u32>,
}

impl Objects {
    /// Returns the objects that a process has descriptors of. Reads /proc/PID/fdinfo, which needs the same user or root.
    ///
    /// # Errors
    ///
    /// ENOENT when there is no such process, EACCES when it belongs to another user.
    pub fn of_process(process: u32) -> io::Result<Objects> {
        let mut objects = Objects::default();
        for entry in fs::read_dir(format!("/proc/{process}/fdinfo"))? {
            match fs::read_to_string(entry?.path()) {
                Ok(text) => objects.add(&text),
                // The descriptor has been closed in the meantime.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(objects)
    }

    /// Returns the objects that still exist in the kernel: held by a process, attached or pinned. The kernel frees an object a
    /// moment after its last reference is gone.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_SYS_ADMIN, [`BpfError::Call`] if bpf(2) fails for another reason.
    pub fn remaining(&self) -> Result<Objects, BpfError> {
        let of_kind = |kind, numbers: &BTreeSet<u32>| {
            let mut there = BTreeSet::new();
            for &number in numbers {
                match call::object_by_number(kind, number) {
                    Ok(_) => {
                        there.insert(number);
                    }
                    Err(error) if Errno::of(&error) == Some(Errno::ENOENT) => {}
                    Err(error) => return Err(BpfError::of(kind.call(), error)),
                }
            }
            Ok(there)
        };
        Ok(Objects {
            programs: of_kind(ObjectKind::Program, &self.programs)?,
            links: of_kind(ObjectKind::Link, &self.links)?,
            maps: of_kind(ObjectKind::Map, &self.maps)?,
        })
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.programs.is_empty() && self.links.is_empty() && self.maps.is_empty()
    }

    /// Adds the object of one descriptor. The fdinfo of a link names its program, too.
    fn add(&mut self, fdinfo: &str) {
        for line in fdinfo.lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            let Ok(number) = value.trim().parse() else { continue };
            match name {
                "prog_id" => self.programs.insert(number),
                "link_id" => self.links.insert(number),
                "map_id" => self.maps.insert(number),
                _ => continue,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fdinfo_lists_the_ids_of_objects() {
        let mut objects = Objects::default();
        objects.add(
            "pos:\t0\nflags:\t02000000\nlink_type:\ttracing\nlink_id:\t7\nprog_tag:\tab\nprog_id:\t41\n",
        );
        objects.add("pos:\t0\nmap_type:\t2\nmap_id:\t12\nfrozen:\t0\n");
        objects.add("pos:\t0\nflags:\t02\nino:\t5\n");
        assert_eq!(objects.programs, [41].into());
        assert_eq!(objects.links, [7].into());
        assert_eq!(objects.maps, [12].into());
    }
}
