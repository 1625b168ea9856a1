//! Reads the fingerprint of a host.
//!
//! The module changes nothing, and opens no socket but the one at which it asks a running guard. It reads files of /proc and /sys below a root path that the caller
//! passes in, so that tests can use a copy.

pub mod cgroup;
pub mod guard;
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
        name: text(root, "proc/sys/kernel/hostname").unwrap_or_default(),
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

/// Returns the number of online processors of the host. The CPU affinity and the cgroup of this process limit it only if neither /proc nor
/// /sys shows them.
pub fn processors(root: &Path) -> u32 {
    let stat = text(root, "proc/stat").unwrap_or_default();
    let is_one = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
    match stat.lines().filter(is_one).count() {
        0 => {
            online(root).unwrap_or_else(|| thread::available_parallelism().map_or(1, |own| own.get() as u32))
        }
        found => found as u32,
    }
}

/// Returns the number of processors in a list like `0-3,5`.
fn online(root: &Path) -> Option<u32> {
    let list = text(root, "sys/devices/system/cpu/online")?;
    let block = |block: &str| {
        let (first, last) = block.split_once('-').unwrap_or((block, block));
        Some(last.parse::<u32>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    list.split(',').map(block).sum()
}

/// Returns `none` on bare metal, otherwise the vendor that the firmware names, or `virtual machine`; an empty text if the kernel does not show it:
/// only x86 has a flag for it, and /proc may be absent.
fn virtualization(root: &Path) -> String {
    let cpuinfo = text(root, "proc/cpuinfo").unwrap_or_default();
    let flags: Vec<&str> = cpuinfo.lines().filter(|line| line.starts_with("flags")).collect();
    let has_flag = flags.iter().any(|line| line.split_whitespace().any(|flag| flag == "hypervisor"));
    let named = |path: &&str| text(root, path).filter(|text| !text.is_empty());
    match (flags.is_empty(), has_flag) {
        (false, false) => "none".to_owned(),
        (false, true) => ["sys/hypervisor/type", "sys/class/dmi/id/sys_vendor"]
            .iter()
            .find_map(named)
            .unwrap_or_else(|| "virtual machine".to_owned()),
        // Real machines name a vendor as well.
        (true, _) => named(&"sys/hypervisor/type").unwrap_or_default(),
    }
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
    fn what_the_kernel_does_not_show_is_unknown() {
        let metal = Root::with(
            "metal",
            &[("proc/cpuinfo", "flags : fpu\n"), ("sys/devices/system/cpu/online", "0-3,5,8-9\n")],
        );
        assert_eq!(read(&metal.0, &[]).virtualization, "none");
        assert_eq!(processors(&metal.0), 7);
        let arm = Root::with("arm", &[("proc/cpuinfo", "Features : fp asimd\n")]);
        assert_eq!(read(&arm.0, &[]).virtualization, "", "no flag says it");
        let empty = read(Path::new("/nonexistent"), &["net.core.somaxconn"]);
        assert_eq!(
            (empty.kernel.as_str(), empty.virtualization.as_str(), empty.sysctls.len()),
            ("unknown", "", 0)
        );
    }
}
