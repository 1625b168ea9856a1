use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Fingerprint of the machine and kernel that a record comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Kernel release as `uname -r` prints it.
    pub kernel: String,
    /// Processors this process may run on.
    pub cpus: u32,
    /// `none`, or what the machine runs under, as far as the kernel shows it.
    pub virtualization: String,
    /// The sysctls that the command read, by their dotted name.
    pub sysctls: BTreeMap<String, String>,
    /// What the kernel was found able to do, by trying: `ip_local_port_range` -> `linear`.
    pub capabilities: BTreeMap<String, String>,
}
