//! Filters of tracing programs: which tasks they count, and the flags for the fields that are set. The same numbers are in `counting.h`.

use std::mem;

use aya::Pod;

use crate::tracing::thread_name_bytes;

pub(crate) const HAS_PROCESS: u32 = 1;
pub(crate) const HAS_NAME: u32 = 2;
pub(crate) const HAS_ADDRESS: u32 = 4;
pub(crate) const HAS_PORT: u32 = 8;
pub(crate) const HAS_CGROUP: u32 = 16;
pub(crate) const HAS_NETWORK: u32 = 32;

/// Returns the flag if its field is set, otherwise 0.
pub(crate) fn flag(is_set: bool, flag: u32) -> u32 {
    if is_set { flag } else { 0 }
}

/// A filter of tasks. A task must match every field that is set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskFilter {
    /// Process id in this process's PID namespace.
    pub process: Option<u32>,
    /// Name of the process or thread (comm), of which the kernel keeps 15 bytes.
    pub name: Option<String>,
    /// Id of a cgroup (version 2), which is the inode of its directory. Cgroups below it count as well.
    pub cgroup: Option<u64>,
    /// Inode of the network namespace of the socket that is used, or of the task if there is none.
    pub network: Option<u32>,
}

/// A [`TaskFilter`] as the programs read it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Settings {
    pub(crate) cgroup: u64,
    pub(crate) namespace_device: u64,
    pub(crate) namespace_inode: u64,
    pub(crate) flags: u32,
    pub(crate) process: u32,
    pub(crate) name: [u8; 16],
    pub(crate) network: u32,
    pub(crate) hole: u32,
}

// The layout must equal the layouts in failed_calls.bpf.c and flame.bpf.c.
const _: () = assert!(mem::size_of::<Settings>() == 56 && mem::offset_of!(Settings, network) == 48);

// SAFETY: integers and arrays of them without holes, in the layout of the map's values.
unsafe impl Pod for Settings {}

impl TaskFilter {
    /// Returns the settings; `pid_namespace` is the device and inode of the PID namespace that numbers `process`.
    pub(crate) fn settings(&self, pid_namespace: (u64, u64)) -> Settings {
        Settings {
            cgroup: self.cgroup.unwrap_or_default(),
            namespace_device: pid_namespace.0,
            namespace_inode: pid_namespace.1,
            flags: flag(self.process.is_some(), HAS_PROCESS)
                | flag(self.name.is_some(), HAS_NAME)
                | flag(self.cgroup.is_some(), HAS_CGROUP)
                | flag(self.network.is_some(), HAS_NETWORK),
            process: self.process.unwrap_or_default(),
            name: thread_name_bytes(self.name.as_deref().unwrap_or_default()),
            network: self.network.unwrap_or_default(),
            hole: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_set_field_has_its_flag() {
        let flags = |filter: TaskFilter| filter.settings((0, 0)).flags;
        assert_eq!(flags(TaskFilter::default()), 0);
        assert_eq!(flags(TaskFilter { process: Some(0), ..TaskFilter::default() }), HAS_PROCESS);
        assert_eq!(flags(TaskFilter { name: Some(String::new()), ..TaskFilter::default() }), HAS_NAME);
        assert_eq!(flags(TaskFilter { cgroup: Some(0), ..TaskFilter::default() }), HAS_CGROUP);
        assert_eq!(flags(TaskFilter { network: Some(0), ..TaskFilter::default() }), HAS_NETWORK);
    }
}
