//! Programs of 32 bits. Their system calls have other numbers (compat system calls), which the programs at system calls leave out.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use fourtuple_bpf::filter::TaskFilter;
use fourtuple_record::Remark;
use fourtuple_record::snapshot::Owner;
use fourtuple_syscalls::procfs;

use crate::trace::scope::{is_selected, name};

/// Maximum number of processes that are listed.
const MAX_LISTED: usize = 20;

/// The beginning of an ELF file of class ELFCLASS32 (elf(5)). Programs of the x32 ABI have this class too.
const ELF_32_BIT: &[u8; 5] = b"\x7fELF\x01";

/// Returns the processes with a program of 32 bits that a filter selects, the lowest number first. Processes that have ended are missing.
pub(crate) fn processes(wanted: &TaskFilter) -> Vec<Owner> {
    processes_in(Path::new("/"), wanted)
}

fn processes_in(root: &Path, wanted: &TaskFilter) -> Vec<Owner> {
    let mut found: Vec<Owner> = match wanted.process {
        Some(process) => of_32_bits(root, process, wanted).into_iter().collect(),
        None => procfs::processes(root).filter_map(|process| of_32_bits(root, process, wanted)).collect(),
    };
    found.sort_by_key(|owner| owner.pid);
    found.truncate(MAX_LISTED);
    found
}

/// Returns a process if its program has 32 bits and the filter selects it.
fn of_32_bits(root: &Path, pid: u32, wanted: &TaskFilter) -> Option<Owner> {
    let process = root.join("proc").join(pid.to_string());
    let mut head = [0; ELF_32_BIT.len()];
    File::open(process.join("exe")).ok()?.read_exact(&mut head).ok()?;
    let is_wanted = head == *ELF_32_BIT
        && is_selected(root, pid, wanted)
        && wanted.network.is_none_or(|network| {
            fs::metadata(process.join("ns/net")).is_ok_and(|file| file.ino() as u32 == network)
        });
    is_wanted.then(|| Owner { pid, name: name(&process), sockets: 0 })
}

/// Returns the remark that the calls of these processes are missing.
pub(crate) fn remark(processes: &[Owner]) -> Option<Remark> {
    let names: Vec<String> = processes.iter().map(|owner| format!("{}[{}]", owner.name, owner.pid)).collect();
    let message = format!("system calls of programs of 32 bits are not seen: {}", names.join(", "));
    (!names.is_empty()).then(|| Remark::new("calls-unseen", message))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A directory with a /proc, which is removed at the end.
    struct Root(PathBuf);

    impl Root {
        fn new() -> Root {
            let path = std::env::temp_dir().join(format!("fourtuple-compat-{}", std::process::id()));
            let root = Root(path);
            root.write(
                "self/mountinfo",
                &format!("1 1 0:1 / {}/cgroup rw - cgroup2 none rw", root.0.display()),
            );
            root
        }

        fn write(&self, name: &str, text: &str) {
            let path = self.0.join("proc").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn process(&self, pid: u32, class: char, name: &str) {
            self.write(&format!("{pid}/exe"), &format!("\x7fELF{class}\u{1}"));
            for file in ["comm", &format!("task/{pid}/comm")] {
                self.write(&format!("{pid}/{file}"), &format!("{name}\n"));
            }
            self.write(&format!("{pid}/ns/net"), "");
            self.write(&format!("{pid}/cgroup"), "0::/web/game\n");
        }

        fn found(&self, wanted: &TaskFilter) -> Vec<u32> {
            processes_in(&self.0, wanted).iter().map(|owner| owner.pid).collect()
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn programs_of_32_bits_that_a_filter_selects_are_found() {
        let root = Root::new();
        root.process(12, '\u{1}', "game");
        root.process(7, '\u{1}', "steam");
        root.process(9, '\u{2}', "game");
        root.write("3/exe", "");
        let all = TaskFilter::default();
        let by_name = |name: &str| TaskFilter { name: Some(name.to_owned()), ..all.clone() };
        let by_process = |process| TaskFilter { process: Some(process), ..all.clone() };
        assert_eq!(root.found(&all), [7, 12]);
        assert_eq!((root.found(&by_name("game")), root.found(&by_name("sh"))), (vec![12], vec![]));
        assert_eq!((root.found(&by_process(12)), root.found(&by_process(9))), (vec![12], vec![]));
        let inode = |path: &str| fs::metadata(root.0.join(path)).unwrap().ino();
        let by_network = |network| TaskFilter { network: Some(network), ..all.clone() };
        assert_eq!(root.found(&by_network(inode("proc/7/ns/net") as u32)), [7]);
        for directory in ["cgroup/web/game", "cgroup/other"] {
            fs::create_dir_all(root.0.join(directory)).unwrap();
        }
        let in_cgroup = |path| root.found(&TaskFilter { cgroup: Some(inode(path)), ..all.clone() });
        assert_eq!((in_cgroup("cgroup/web"), in_cgroup("cgroup/other")), (vec![7, 12], vec![]));
        let said = remark(&processes_in(&root.0, &all)).unwrap().message;
        assert_eq!(said, "system calls of programs of 32 bits are not seen: steam[7], game[12]");
        assert_eq!(remark(&[]), None);
    }
}
