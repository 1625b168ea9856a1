//! Values of the filter flags and of `--tier`, which the trace commands share.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Args;
use fourtuple_observe::host::cgroup;
use fourtuple_observe::trace::{Protocol, Tier};

use crate::exit::UsageError;
use crate::watch::{TargetFlags, network};

/// The network namespace of a trace.
#[derive(Debug, Args)]
pub(super) struct NetworkFlags {
    /// Trace this network namespace only, by name, file or process: blue, /run/netns/blue, 812
    #[arg(long, value_name = "NAME|PATH|PID", value_parser = network)]
    netns: Option<PathBuf>,
}

impl NetworkFlags {
    /// Returns the path of the namespace for a record.
    pub(super) fn path(&self) -> Option<String> {
        self.netns.as_ref().map(|path| path.display().to_string())
    }

    /// Runs a trace with the inode of the namespace, `None` without the flag. The trace is in the namespace, so that it reads the
    /// namespace's counters and sysctls.
    pub(super) fn within<T: Send>(
        &self,
        trace: impl FnOnce(Option<u32>) -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        let Some(path) = self.netns.clone() else { return trace(None) };
        let namespace = TargetFlags { pid: None, netns: Some(path), container: None }.open()?;
        namespace.within(|| trace(Some(namespace.inode)))
    }
}

/// Parses `--comm`.
pub(super) fn name(text: &str) -> Result<String, String> {
    match text.len() {
        1..=15 => Ok(text.to_owned()),
        _ => {
            Err(format!("{text:?} is not the name of a thread: expected 1 to 15 bytes, as in /proc/PID/comm"))
        }
    }
}

/// Parses an IP address.
pub(super) fn address(text: &str) -> Result<IpAddr, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not an address: expected one such as 192.0.2.1 or 2001:db8::1"))
}

/// Parses `--protocol`.
pub(super) fn protocol(text: &str) -> Result<Protocol, String> {
    [Protocol::Tcp, Protocol::Udp]
        .into_iter()
        .find(|protocol| protocol.name() == text)
        .ok_or_else(|| format!("{text:?} is not a protocol: expected tcp or udp"))
}

/// A value of `--tier`; `None` is `auto`.
#[derive(Clone, Copy, Debug)]
pub(super) struct TierChoice(pub(super) Option<Tier>);

/// Parses `--tier`.
pub(super) fn tier(text: &str) -> Result<TierChoice, String> {
    if text == "auto" {
        return Ok(TierChoice(None));
    }
    let known = Tier::ALL.into_iter().find(|tier| tier.name() == text);
    known.map(|tier| TierChoice(Some(tier))).ok_or_else(|| {
        format!("{text:?} is not a tier: expected auto, {}", Tier::ALL.map(Tier::name).join(", "))
    })
}

/// Checks that the process of `--pid` exists and is not a thread.
pub(super) fn process(number: u32) -> anyhow::Result<u32> {
    let refuse = |why: &str| UsageError(format!("invalid value '{number}' for '--pid': {why}"));
    let Ok(status) = fs::read_to_string(format!("/proc/{number}/status")) else {
        // Without procfs the process cannot be checked.
        let is_known = Path::new("/proc/self/status").exists();
        return if is_known { Err(refuse("there is no such process").into()) } else { Ok(number) };
    };
    // /proc/TID exists for a thread as well, although a listing of /proc omits it.
    let mut lines = status.lines();
    let process: Option<u32> = lines.find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
    match process {
        Some(process) if process != number => {
            Err(refuse(&format!("it is a thread of process {process}")).into())
        }
        _ => Ok(number),
    }
}

/// Returns the id of a cgroup: the inode of its directory.
pub(super) fn cgroup_id(path: &Path) -> Result<u64, UsageError> {
    let directory = cgroup::directory(path)
        .map_err(|why| UsageError(format!("invalid value '{}' for '--cgroup': {why}", path.display())))?;
    Ok(directory.ino())
}
