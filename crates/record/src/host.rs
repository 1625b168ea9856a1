use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The fingerprint of the machine and kernel that a record comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Host {
    /// Kernel release as `uname -r` prints it.
    pub kernel: String,
    /// Number of CPUs that this process may run on.
    pub cpus: u32,
    /// Virtualization of the machine, as far as the kernel shows it; `none`: bare metal; empty: unknown.
    pub virtualization: String,
    /// Sysctls that the command read, by dotted name.
    pub sysctls: BTreeMap<String, String>,
    /// Capabilities of the kernel, found by probing: `ip_local_port_range` -> `linear`.
    pub capabilities: BTreeMap<String, String>,
}
