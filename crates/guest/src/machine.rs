//! Turns a bare kernel into a machine that can run tests.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;

use fourtuple_syscalls::{boot, netns, resource};

/// File system types and their mount points.
const MOUNTS: &[(&str, &str)] = &[
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("cgroup2", "/sys/fs/cgroup"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/tmp"),
    ("tmpfs", "/run"),
];

/// PID 1 starts with 1,024 descriptors (4,096 hard); the labs hold a socket or two per port.
const DESCRIPTORS: u64 = 20_000;

/// Directory of the modules: `00-name.ko`, `01-name.ko`, ... in the order in which they must be loaded.
const MODULES: &str = "/modules";

/// Brings the machine up. Continues after a failure, and returns the failures, one line each.
pub(crate) fn bring_up() -> Vec<String> {
    let mut troubles = Vec::new();
    let mut note = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            troubles.push(format!("{what}: {error}"));
        }
    };
    for (kind, target) in MOUNTS {
        let mounted = fs::create_dir_all(target).and_then(|()| boot::mount(kind, target));
        // With CONFIG_DEVTMPFS_MOUNT the kernel may have mounted devtmpfs already.
        let busy = mounted.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy);
        note(&format!("mount {kind} on {target}"), if busy { Ok(()) } else { mounted });
    }
    note("raise RLIMIT_NOFILE", resource::set_descriptor_limits(DESCRIPTORS, DESCRIPTORS));
    match modules() {
        Ok(paths) => {
            for path in paths {
                let loaded = File::open(&path).and_then(|file| boot::load_module(file.as_fd()));
                note(&format!("load {path}"), loaded);
            }
        }
        Err(error) => note(&format!("list {MODULES}"), Err(error)),
    }
    note("bring lo up", netns::set_loopback_up());
    troubles
}

fn modules() -> io::Result<Vec<String>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(MODULES)? {
        paths.push(entry?.path().to_string_lossy().into_owned());
    }
    paths.sort();
    Ok(paths)
}
