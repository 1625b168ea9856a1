//! Counts the source ports in use towards a destination, from the kernel's list of sockets (sock_diag).

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use fourtuple_record::snapshot::EphemeralPorts;
use fourtuple_syscalls::netns;
use fourtuple_syscalls::procfs;
use fourtuple_syscalls::sock_diag::{self, Filter};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{Errno, errno_name};

/// Ports in use towards one destination, in one network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fill {
    /// Ports of the range that connections to the destination use, TIME_WAIT included, from the source address that uses
    /// the most.
    pub(crate) in_use: u32,
    /// Ports that the kernel may choose: net.ipv4.ip_local_port_range without net.ipv4.ip_local_reserved_ports.
    pub(crate) range: u32,
}

/// A destination, and the network namespace in which to count.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    /// Inode of the network namespace.
    pub(crate) namespace: u32,
    /// A process that was in the namespace.
    pub(crate) process: u32,
    pub(crate) destination: SocketAddr,
}

/// The result for a list of questions.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    /// One entry per question, in the same order. `None`: the process has left the namespace, this process may not enter
    /// the namespace, or the kernel does not list its sockets.
    pub(crate) fills: Vec<Option<Fill>>,
    /// Why the ports of a namespace were not counted, if the kernel does not list its sockets or no thread could be started.
    pub(crate) error: Option<String>,
}

/// Counts the ports in use for each question. Enters each namespace once.
pub(crate) fn count(questions: &[Question]) -> Answers {
    let mut answers = Answers { fills: vec![None; questions.len()], error: None };
    let mut namespaces: HashMap<u32, Vec<usize>> = HashMap::new();
    for (index, question) in questions.iter().enumerate() {
        namespaces.entry(question.namespace).or_default().push(index);
    }
    for (namespace, indices) in namespaces {
        let Some(file) = open_namespace(namespace, indices.iter().map(|&index| questions[index].process))
        else {
            continue;
        };
        let found = netns::within(file.as_fd(), || -> io::Result<Vec<io::Result<Fill>>> {
            let ports = read_ports()?;
            Ok(indices.iter().map(|&index| in_use(&ports, questions[index].destination)).collect())
        });
        let fills = match found {
            Ok(Ok(fills)) => fills,
            // setns(2) and reads of /proc have no EAGAIN.
            Err(error) if Errno::of(&error) == Some(Errno::EAGAIN) => {
                answers.error = Some(format!("no thread could be started: {}", errno_name(&error)));
                continue;
            }
            Ok(Err(error)) | Err(error) => {
                answers.error = Some(format!("a network namespace cannot be read: {}", errno_name(&error)));
                continue;
            }
        };
        for (&index, fill) in indices.iter().zip(fills) {
            match fill {
                Ok(fill) => answers.fills[index] = Some(fill),
                Err(error) => answers.error = Some(not_listed(&error)),
            }
        }
    }
    answers
}

fn not_listed(error: &io::Error) -> String {
    let module = match Errno::of(error) {
        Some(Errno::ENOENT) => "; is the module tcp_diag loaded?",
        _ => "",
    };
    format!("the kernel does not list its sockets (sock_diag: {}){module}", errno_name(error))
}

/// Opens the network namespace with this inode, through one of the processes.
fn open_namespace(namespace: u32, processes: impl Iterator<Item = u32>) -> Option<File> {
    let others = processes.map(|process| format!("/proc/{process}/ns/net"));
    // The namespace of this thread comes first: opening it needs no privilege.
    std::iter::once("/proc/thread-self/ns/net".to_owned()).chain(others).find_map(|path| {
        let file = File::open(path).ok()?;
        (file.metadata().ok()?.ino() == u64::from(namespace)).then_some(file)
    })
}

/// Reads the ports that the kernel may choose in the namespace of the calling thread.
fn read_ports() -> io::Result<EphemeralPorts> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
    let reserved = procfs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports")?;
    EphemeralPorts::parse(&range, &reserved).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Counts the ports that connections to `destination` use.
fn in_use(ports: &EphemeralPorts, destination: SocketAddr) -> io::Result<Fill> {
    let mut used: HashMap<IpAddr, HashSet<u16>> = HashMap::new();
    let filter = Filter { transport: Transport::Tcp, source: None, source_port: None, destination };
    sock_diag::each(&filter, |entry| {
        if ports.contains(entry.local.port()) {
            used.entry(entry.local.ip()).or_default().insert(entry.local.port());
        }
    })?;
    let in_use = used.values().map(HashSet::len).max().unwrap_or(0) as u32;
    Ok(Fill { in_use, range: ports.usable() })
}

#[cfg(test)]
mod tests {
    use std::process;

    use fourtuple_syscalls::seccomp::{self, Facility};

    use super::*;

    #[test]
    fn a_namespace_without_processes_has_no_answer() {
        let destination = SocketAddr::from(([127, 0, 0, 1], 80));
        let answers = count(&[Question { namespace: 0, process: u32::MAX, destination }]);
        assert_eq!(answers.fills, [None]);
        assert!(answers.error.is_none());
    }

    #[test]
    fn an_error_of_sock_diag_is_kept() {
        let look = || {
            let own = File::open("/proc/thread-self/ns/net").unwrap().metadata().unwrap().ino();
            let destination = SocketAddr::from(([127, 0, 0, 1], 80));
            let question = Question { namespace: own as u32, process: process::id(), destination };
            let seen = count(&[question]);
            assert!(seen.fills[0].is_some() && seen.error.is_none());
            seccomp::refuse(Facility::SocketDiag).unwrap();
            count(&[question])
        };
        // A separate thread, because a seccomp filter cannot be removed.
        let answers = std::thread::spawn(look).join().unwrap();
        assert_eq!(answers.fills, [None]);
        let reason = answers.error.unwrap();
        assert!(reason.contains("(sock_diag: EPROTONOSUPPORT)"), "{reason}");
    }
}
