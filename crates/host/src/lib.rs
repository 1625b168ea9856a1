//! Reads the fingerprint of a host.
//!
//! The crate changes nothing and opens no socket. It reads files of /proc and /sys below a root path that the caller
//! passes in, so that tests can use a copy.
#![forbid(unsafe_code)]

pub mod cgroup;
pub mod namespace;
pub mod snapshot;

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;

use fourtuple_record::Host;
use fourtuple_syscalls::procfs;

/// Returns the fingerprint of the host below `root`, with the named sysctls of the calling thread's namespace.
/// Sysctls that cannot be read are left out; `capabilities` is empty until a command has probed the kernel.
pub fn read(root: &Path, sysctls: &[&str]) -> Host {
    Host {
        kernel: text(root, "proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".to_owned()),
        cpus: thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32),
        virtualization: virtualization(root),
        sysctls: sysctls.iter().filter_map(|name| Some((name.to_string(), sysctl(root, name)?))).collect(),
        capabilities: BTreeMap::new(),
    }
}

/// Returns the value of a sysctl by its dotted name, columns separated by single spaces.
pub fn sysctl(root: &Path, name: &str) -> Option<String> {
    let value = text(root, &format!("proc/sys/{}", name.replace('.', "/")))?;
    Some(value.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Returns the number of online processors of the host. The CPU affinity and the cgroup of this process do not limit it.
pub fn processors(root: &Path) -> u32 {
    let text = text(root, "proc/stat").unwrap_or_default();
    let is_one = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
    text.lines().filter(is_one).count().max(1) as u32
}

/// Returns `none` on bare metal, otherwise the vendor that the firmware names, or `virtual machine`.
fn virtualization(root: &Path) -> String {
    let virtual_machine = text(root, "proc/cpuinfo").is_some_and(|cpuinfo| {
        cpuinfo
            .lines()
            .filter(|line| line.starts_with("flags"))
            .any(|line| line.split_whitespace().any(|flag| flag == "hypervisor"))
    });
    if !virtual_machine {
        return "none".to_owned();
    }
    ["sys/hypervisor/type", "sys/class/dmi/id/sys_vendor"]
        .iter()
        .find_map(|path| text(root, path).filter(|text| !text.is_empty()))
        .unwrap_or_else(|| "virtual machine".to_owned())
}

fn text(root: &Path, path: &str) -> Option<String> {
    procfs::read_to_string(root.join(path)).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::fs;
    use std::process;

    use super::*;

    struct Root(std::path::PathBuf);

    impl Root {
        fn with(name: &str, files: &[(&str, &str)]) -> Root {
            let root = env::temp_dir().join(format!("fourtuple-host-{name}-{}", process::id()));
            for (path, content) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content).unwrap();
            }
            Root(root)
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn the_fingerprint_matches_the_files() {
        let root = Root::with(
            "vm",
            &[
                ("proc/sys/kernel/osrelease", "6.1.0-56-cloud-amd64\n"),
                ("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n"),
                ("proc/cpuinfo", "processor: 0\nflags : fpu hypervisor\n"),
                ("sys/class/dmi/id/sys_vendor", "QEMU\n"),
            ],
        );
        let host = read(&root.0, &["net.ipv4.ip_local_port_range", "net.ipv4.tcp_tw_reuse"]);
        assert_eq!(host.kernel, "6.1.0-56-cloud-amd64");
        assert_eq!(host.virtualization, "QEMU");
        assert_eq!(host.sysctls.len(), 1, "what is not there is left out");
        assert_eq!(host.sysctls["net.ipv4.ip_local_port_range"], "32768 60999");
    }

    #[test]
    fn bare_metal_and_an_empty_root_are_no_virtual_machine() {
        let metal = Root::with("metal", &[("proc/cpuinfo", "flags : fpu\n")]);
        assert_eq!(read(&metal.0, &[]).virtualization, "none");
        let empty = read(Path::new("/nonexistent"), &["net.core.somaxconn"]);
        assert_eq!((empty.kernel.as_str(), empty.sysctls.len()), ("unknown", 0));
    }
}
