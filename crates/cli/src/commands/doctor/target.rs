//! The network namespace to examine, and the destination.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::thread;

use anyhow::Context;
use clap::Args;
use fourtuple_record::DoctorSettings;
use fourtuple_syscalls::netns;

use crate::exit::UsageError;
use crate::units;

/// The network namespace to examine.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct TargetFlags {
    /// Examine the network namespace of this process [default: this one]
    #[arg(long, value_name = "N", value_parser = units::up_to::<{ i32::MAX as u32 }>, allow_hyphen_values = true)]
    pub(crate) pid: Option<u32>,
    /// Examine the network namespace of this file: /run/netns/blue
    #[arg(long, value_name = "PATH")]
    pub(crate) netns: Option<PathBuf>,
    /// Examine the network namespace of this container, by at least 6 digits of its ID
    #[arg(long, value_name = "ID")]
    pub(crate) container: Option<String>,
}

/// A network namespace.
#[derive(Debug)]
pub(crate) struct Namespace {
    /// The namespace; `None`: that of this process.
    file: Option<OwnedFd>,
    /// Inode of the namespace, as `lsns` prints it.
    pub(crate) inode: u32,
}

impl TargetFlags {
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

    /// Returns the file of the namespace; `None`: the namespace of this process.
    fn path(&self) -> Option<PathBuf> {
        let of_process = self.pid.map(|pid| PathBuf::from(format!("/proc/{pid}/ns/net")));
        of_process.or_else(|| self.netns.clone())
    }

    /// Makes a command of a finding act on the examined namespace: `sysctl`, `ss` and tracers act on the namespace of their caller.
    /// `fourtuple fix ports` acts on a cgroup and needs no change.
    pub(super) fn address(&self, command: &str) -> String {
        const LOCAL: [&str; 4] = ["sysctl -w ", "ss ", "fourtuple trace ", "fourtuple fix accept "];
        match self.path() {
            Some(path) if LOCAL.iter().any(|start| command.starts_with(start)) => {
                format!("nsenter --net={} {command}", path.display())
            }
            _ => command.to_owned(),
        }
    }

    /// Opens the network namespace.
    pub(crate) fn open(&self) -> anyhow::Result<Namespace> {
        let (flag, path) = match (&self.pid, &self.netns) {
            (Some(pid), _) => (format!("--pid {pid}"), PathBuf::from(format!("/proc/{pid}/ns/net"))),
            (_, Some(path)) => (format!("--netns {}", path.display()), path.clone()),
            _ => {
                let own = File::open("/proc/self/ns/net").and_then(|file| file.metadata());
                let inode = own.map(|metadata| metadata.ino() as u32).unwrap_or(0);
                return Ok(Namespace { file: None, inode });
            }
        };
        let file = File::open(&path).map_err(|error| {
            if error.kind() == std::io::ErrorKind::NotFound {
                anyhow::Error::new(UsageError(format!("{flag}: {} does not exist", path.display())))
            } else {
                anyhow::Error::new(error).context(flag.clone())
            }
        })?;
        let inode = file.metadata().context(flag)?.ino() as u32;
        Ok(Namespace { file: Some(file.into()), inode })
    }
}

impl Namespace {
    /// Runs `work` on a thread in the namespace.
    pub(crate) fn within<T: Send>(
        &self,
        work: impl FnOnce() -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        let file = self.file.as_ref().map(AsFd::as_fd);
        thread::scope(|scope| {
            let enter = move |file: Option<BorrowedFd<'_>>| {
                match file {
                Some(file) => netns::enter(file).context(
                    "cannot enter the network namespace; this needs CAP_SYS_ADMIN in the user namespace that owns it",
                ),
                None => Ok(()),
            }
            };
            let thread =
                thread::Builder::new().name("namespace".to_owned()).spawn_scoped(scope, move || {
                    enter(file)?;
                    work()
                })?;
            thread.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload))
        })
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
