//! Programs, links and maps by their numbers: what a process holds, and whether it is still there.

use std::collections::BTreeSet;
use std::fs;
use std::io;

use crate::call::{self, ObjectKind};
use crate::error::BpfError;

/// Some programs, links and maps of the host, by the numbers that the kernel gives them. It gives the next number each time,
/// so that one which is gone stays gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// Programs.
    pub programs: BTreeSet<u32>,
    /// What keeps programs attached.
    pub links: BTreeSet<u32>,
    /// Maps.
    pub maps: BTreeSet<u32>,
}

impl Objects {
    /// All that a process has descriptors of. Read from /proc/PID/fdinfo, for which it must be one's own, or one be root.
    ///
    /// # Errors
    ///
    /// ENOENT when there is no such process, EACCES when it is somebody else's.
    pub fn of_process(process: u32) -> io::Result<Objects> {
        let mut objects = Objects::default();
        for entry in fs::read_dir(format!("/proc/{process}/fdinfo"))? {
            match fs::read_to_string(entry?.path()) {
                Ok(text) => objects.add(&text),
                // Closed since.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(objects)
    }

    /// Of these those that the kernel still has: held by somebody, attached or pinned. It frees them a moment after their
    /// last holder is gone.
    ///
    /// # Errors
    ///
    /// [`BpfError::NotPermitted`] without CAP_SYS_ADMIN, [`BpfError::Call`] of bpf(2) where nothing explains it.
    pub fn remaining(&self) -> Result<Objects, BpfError> {
        let of_kind = |kind, numbers: &BTreeSet<u32>| {
            let mut there = BTreeSet::new();
            for &number in numbers {
                match call::object_by_number(kind, number) {
                    Ok(_) => {
                        there.insert(number);
                    }
                    Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
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

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.programs.is_empty() && self.links.is_empty() && self.maps.is_empty()
    }

    /// Of one descriptor. That of a link names the program, too.
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
    fn descriptors_tell_their_numbers() {
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
