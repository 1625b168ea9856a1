//! The network namespace to examine, and the destination.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use fourtuple_observe::host::namespace::{self, Target};
use fourtuple_record::DoctorSettings;
use fourtuple_syscalls::netns;

use crate::units;

/// The network namespace to examine.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct TargetFlags {
    /// Network namespace of this process [default: own]
    #[arg(long, value_name = "PID", value_parser = units::up_to::<{ i32::MAX as u32 }>, allow_hyphen_values = true)]
    pub(crate) pid: Option<u32>,
    /// Network namespace by name, file or process
    #[arg(long, value_name = "NETNS", value_parser = network)]
    pub(crate) netns: Option<PathBuf>,
    /// Network namespace of a container, by its ID
    ///
    /// At least 6 digits of the ID.
    #[arg(long, value_name = "ID")]
    pub(crate) container: Option<String>,
}

/// Parses `--netns` as ip(8) does: the name of a file in /run/netns, else the number of a process. Another text is a path.
pub(crate) fn network(text: &str) -> Result<PathBuf, String> {
    let named = Path::new("/run/netns").join(text);
    Ok(match text.parse::<u32>() {
        _ if text.contains('/') || text.is_empty() => PathBuf::from(text),
        _ if named.exists() => named,
        Ok(process) => PathBuf::from(format!("/proc/{process}/ns/net")),
        Err(_) if Path::new(text).exists() => PathBuf::from(text),
        // The error of open() names the file that ip(8) would have made.
        Err(_) => named,
    })
}

/// A network namespace.
#[derive(Debug)]
pub(crate) struct Namespace {
    /// The namespace; `None`: the namespace of this process.
    file: Option<OwnedFd>,
    /// Inode of the namespace, as `lsns` prints it.
    pub(crate) inode: u32,
    /// Prefix of a command that runs in the namespace; empty for the namespace of this process.
    prefix: String,
    /// Path of the file of the namespace; empty for the namespace of this process.
    path: String,
}

impl TargetFlags {
    /// Returns the flags of the namespace of this process.
    pub(crate) fn own() -> TargetFlags {
        TargetFlags { pid: None, netns: None, container: None }
    }

    /// Returns the settings of a record with this target.
    pub(crate) fn settings(&self, for_ns: u64) -> DoctorSettings {
        DoctorSettings {
            pid: self.pid,
            netns: self.netns.as_ref().map(|path| path.display().to_string()),
            container: self.container.clone(),
            to: None,
            for_ns,
            thresholds: BTreeMap::new(),
        }
    }

    /// Opens the network namespace.
    pub(crate) fn open(&self) -> anyhow::Result<Namespace> {
        let target = match (self.pid, &self.netns, &self.container) {
            (Some(pid), ..) => Target::Process(pid),
            (_, Some(path), _) => Target::File(path.clone()),
            (.., Some(id)) => {
                Target::Process(namespace::first_process(Path::new("/"), id).context("--container")?)
            }
            (None, None, None) => {
                let own = File::open("/proc/self/ns/net").and_then(|file| file.metadata());
                let inode = own.map_or(0, |metadata| metadata.ino() as u32);
                return Ok(Namespace { file: None, inode, prefix: String::new(), path: String::new() });
            }
        };
        let file = namespace::open(&target, Path::new("/")).with_context(|| flag(&target))?;
        let file = File::from(file);
        let inode = file.metadata().context("the network namespace")?.ino() as u32;
        let prefix = match &target {
            Target::Process(pid) => format!("nsenter --target {pid} --net "),
            Target::File(path) => format!("nsenter --net={} ", path.display()),
        };
        let path = match &target {
            Target::Process(pid) => format!("/proc/{pid}/ns/net"),
            Target::File(path) => path.display().to_string(),
        };
        Ok(Namespace { file: Some(file.into()), inode, prefix, path })
    }
}

/// Returns the flag of a target, for errors.
fn flag(target: &Target) -> String {
    match target {
        Target::Process(pid) => format!("--pid {pid}"),
        Target::File(path) => format!("--netns {}", path.display()),
    }
}

impl Namespace {
    /// Returns the start of a command that runs in this namespace; empty for the namespace of this process.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Returns the file of this namespace.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Returns whether a sysctl can be set in this namespace. A sysctl of the whole host is absent there or read-only.
    pub(crate) fn has_sysctl(&self, name: &str) -> bool {
        let path = Path::new("/proc/sys").join(name.replace('.', "/"));
        let can_be_set = || Ok(fs::metadata(path).is_ok_and(|file| file.permissions().mode() & 0o200 != 0));
        self.within(can_be_set).unwrap_or(true)
    }

    /// Runs `work` in the namespace: on a thread, if it is another one.
    pub(crate) fn within<T: Send>(
        &self,
        work: impl FnOnce() -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        let Some(file) = &self.file else { return work() };
        let done = netns::within(file.as_fd(), work);
        done.map_err(|error| {
            let needs = match error.kind() {
                io::ErrorKind::PermissionDenied => {
                    "; this needs CAP_SYS_ADMIN in the user namespace that owns it"
                }
                _ => "",
            };
            anyhow::Error::new(error).context(format!("cannot enter the network namespace{needs}"))
        })?
    }
}

/// A value of `--to`, as typed and as understood.
#[derive(Clone, Debug)]
pub(crate) struct Destination {
    pub(crate) text: String,
    address: IpAddr,
    port: Option<u16>,
}

impl Destination {
    pub(crate) fn address(&self) -> IpAddr {
        self.address
    }

    pub(crate) fn port(&self) -> Option<u16> {
        self.port
    }

    /// Returns whether connections to this address are examined.
    pub(crate) fn matches(&self, address: SocketAddr) -> bool {
        self.address == address.ip() && self.port.is_none_or(|port| port == address.port())
    }
}

pub(crate) fn destination(text: &str) -> Result<Destination, String> {
    let with_port = |address: SocketAddr| (address.ip(), Some(address.port()));
    let bare = || text.parse::<IpAddr>().ok().map(|address| (address, None));
    let (address, port) =
        text.parse().ok().map(with_port).or_else(bare).ok_or(
            "expected an address with or without a port: 192.0.2.1, 192.0.2.1:443, [2001:db8::1]:443",
        )?;
    Ok(Destination { text: text.to_owned(), address, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_namespace_has_a_name_a_file_or_a_process() {
        for (text, path) in [
            ("/proc/812/ns/net", "/proc/812/ns/net"),
            ("812", "/proc/812/ns/net"),
            ("../netns", "../netns"),
            ("no-such-name", "/run/netns/no-such-name"),
            ("Cargo.toml", "Cargo.toml"),
        ] {
            assert_eq!(network(text).unwrap(), Path::new(path), "{text}");
        }
    }
}
