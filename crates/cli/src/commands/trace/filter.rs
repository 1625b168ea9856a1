//! Values of the flags by which all of `trace` narrows what it looks at, and with which instrument.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use fourtuple_trace::{Protocol, Tier};

use crate::exit::UsageError;

pub(super) fn name(text: &str) -> Result<String, String> {
    match text.len() {
        1..=15 => Ok(text.to_owned()),
        _ => {
            Err(format!("{text:?} is not the name of a thread: expected 1 to 15 bytes, as in /proc/PID/comm"))
        }
    }
}

pub(super) fn address(text: &str) -> Result<IpAddr, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not an address: expected one such as 192.0.2.1 or 2001:db8::1"))
}

pub(super) fn protocol(text: &str) -> Result<Protocol, String> {
    [Protocol::Tcp, Protocol::Udp]
        .into_iter()
        .find(|protocol| protocol.name() == text)
        .ok_or_else(|| format!("{text:?} is not a protocol: expected tcp or udp"))
}

/// Absent: the first that this kernel can do.
#[derive(Clone, Copy, Debug)]
pub(super) struct AskedTier(pub(super) Option<Tier>);

pub(super) fn tier(text: &str) -> Result<AskedTier, String> {
    if text == "auto" {
        return Ok(AskedTier(None));
    }
    let known = Tier::ALL.into_iter().find(|tier| tier.name() == text);
    known.map(|tier| AskedTier(Some(tier))).ok_or_else(|| {
        format!("{text:?} is not a tier: expected auto, {}", Tier::ALL.map(Tier::name).join(", "))
    })
}

/// The id of a cgroup is the inode of its directory.
pub(super) fn cgroup_id(path: &Path) -> Result<u64, UsageError> {
    let refuse = |why: &str| {
        UsageError(format!(
            "invalid value '{}' for '--cgroup': {why}; expected a directory of a cgroup2 file system, such as \
             /sys/fs/cgroup/system.slice",
            path.display()
        ))
    };
    let directory = fs::metadata(path).map_err(|error| refuse(&error.to_string()))?;
    // Version 1 has none of these.
    if !path.join("cgroup.controllers").exists() {
        return Err(refuse("no cgroup of version 2"));
    }
    Ok(directory.ino())
}
