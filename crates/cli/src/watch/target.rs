//! The network namespace to examine, and the destination.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::Context;
use clap::Args;
use fourtuple_host::namespace::{self, Target};
use fourtuple_record::{DoctorSettings, Finding};
use fourtuple_syscalls::netns;

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
    /// Lets printed commands act on this namespace, if it is not the namespace of this process: they run in the namespace, unless they name a
    /// process or a sysctl of the whole host. Removes commands that change files of the host, such as /etc/sysctl.d.
    pub(crate) fn adapt(&self, findings: &mut [Finding]) {
        if self.prefix.is_empty() {
            return;
        }
        for advice in findings.iter_mut().flat_map(|finding| [&mut finding.now, &mut finding.proper]) {
            advice.retain(|advice| !advice.is_command || !advice.action.contains("/etc/"));
            for advice in advice.iter_mut().filter(|advice| advice.is_command) {
                self.adapt_command(&mut advice.action);
            }
        }
    }

    fn adapt_command(&self, command: &mut String) {
        const BY_PROCESS: [&str; 4] = ["kill ", "prlimit ", "cat /proc/", "fourtuple fix ports "];
        let is_of_host = command
            .strip_prefix("sysctl -w ")
            .and_then(|rest| rest.split('=').next())
            .is_some_and(|name| !self.has_sysctl(name));
        if is_of_host || BY_PROCESS.iter().any(|start| command.starts_with(start)) {
            return;
        }
        if let Some(flags) = command.strip_prefix("fourtuple trace accept ") {
            *command = format!("fourtuple trace accept --netns {} {flags}", self.path);
            return;
        }
        // The shell of the user would open the file of a redirection in its own namespace.
        if command.contains(" > ") {
            *command = format!("sh -c '{command}'");
        }
        command.insert_str(0, &self.prefix);
    }

    /// Returns whether a sysctl can be set in this namespace. A sysctl of the whole host is absent there or read-only.
    fn has_sysctl(&self, name: &str) -> bool {
        let path = Path::new("/proc/sys").join(name.replace('.', "/"));
        let can_be_set = || Ok(fs::metadata(path).is_ok_and(|file| file.permissions().mode() & 0o200 != 0));
        self.within(can_be_set).unwrap_or(true)
    }

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
            let thread = thread::Builder::new().name("namespace".to_owned()).spawn_scoped(scope, move || {
                enter(file)?;
                work()
            });
            let thread = thread.context("cannot start the thread that examines the network namespace")?;
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
    use fourtuple_record::{Advice, Severity};
    use fourtuple_testing::in_namespace;

    use super::*;

    #[test]
    fn commands_act_on_the_examined_namespace() {
        in_namespace(|| {
            let path = format!("/proc/{}/ns/net", fs::read_link("/proc/thread-self").unwrap().display());
            let flags = TargetFlags { pid: None, netns: Some(path.clone().into()), container: None };
            let namespace = flags.open().unwrap();
            let adapted = |command: &str| {
                let advice = Advice {
                    action: command.to_owned(),
                    is_command: true,
                    effect: String::new(),
                    recomputed: false,
                };
                let mut findings = [Finding {
                    id: "P04".to_owned(),
                    severity: Severity::Notice,
                    subject: String::new(),
                    verdict: String::new(),
                    evidence: Vec::new(),
                    now: vec![advice.clone()],
                    proper: vec![advice],
                }];
                namespace.adapt(&mut findings);
                let [Finding { now, proper, .. }] = findings;
                assert_eq!(now, proper);
                now.into_iter().next().map(|advice| advice.action)
            };
            let inside = |command: &str| Some(format!("nsenter --net={path} {command}"));
            for command in ["ss -tn", "fourtuple trace locks", "sysctl -w net.ipv4.tcp_tw_reuse=1"] {
                assert_eq!(adapted(command), inside(command));
            }
            let trace = "fourtuple trace accept --port 80 --for 10s";
            let traced = format!("fourtuple trace accept --netns {path} --port 80 --for 10s");
            assert_eq!(adapted(trace), Some(traced));
            let clear = "echo > /proc/sys/net/ipv4/ip_local_reserved_ports";
            assert_eq!(adapted(clear), inside(&format!("sh -c '{clear}'")));
            for command in
                ["kill -CONT 7", "fourtuple fix ports --pid 7", "sysctl -w net.ipv4.tcp_mem=\"1 2 3\""]
            {
                assert_eq!(adapted(command).as_deref(), Some(command));
            }
            for command in [
                "fourtuple fix --print sysctl > /etc/sysctl.d/9.conf && sysctl --system",
                "sed -i /a/d /etc/a",
            ] {
                assert_eq!(adapted(command), None);
            }
        });
    }
}
