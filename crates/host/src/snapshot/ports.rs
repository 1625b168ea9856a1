//! The ports that connect() may choose.

use std::path::Path;

use fourtuple_record::snapshot::EphemeralPorts;

use crate::snapshot::reading::text;

pub(super) fn read(root: &Path) -> Result<EphemeralPorts, String> {
    let range = text(root, "proc/sys/net/ipv4/ip_local_port_range")?;
    // A kernel without the list reserves nothing.
    let reserved = text(root, "proc/sys/net/ipv4/ip_local_reserved_ports").unwrap_or_default();
    EphemeralPorts::parse(&range, &reserved)
        .ok_or_else(|| format!("net.ipv4.ip_local_port_range holds {:?}", range.trim()))
}
