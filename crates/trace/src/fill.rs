//! Counts the source ports in use towards a destination, from the kernel's list of sockets (sock_diag).

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::thread;

use fourtuple_syscalls::netns;
use fourtuple_syscalls::sock_diag::{self, Filter};
use fourtuple_syscalls::socket::Transport;

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
    /// The destination.
    pub(crate) destination: SocketAddr,
}

/// The result for a list of questions.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    /// One entry per question, in the same order. `None`: the process has left the namespace, this process may not enter
    /// the namespace, or the kernel does not list its sockets.
    pub(crate) fills: Vec<Option<Fill>>,
    /// Error of sock_diag, if the kernel does not list its sockets.
    pub(crate) error: Option<io::Error>,
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
        // A separate thread, because it stays in the namespace.
        let found = thread::scope(|scope| {
            let look = || -> io::Result<Vec<io::Result<Fill>>> {
                netns::enter(file.as_fd())?;
                let ports = Ports::read()?;
                Ok(indices.iter().map(|&index| ports.in_use(questions[index].destination)).collect())
            };
            thread::Builder::new().spawn_scoped(scope, look).map(thread::ScopedJoinHandle::join)
        });
        let Ok(Ok(Ok(fills))) = found else { continue };
        for (&index, fill) in indices.iter().zip(fills) {
            match fill {
                Ok(fill) => answers.fills[index] = Some(fill),
                Err(error) => answers.error = Some(error),
            }
        }
    }
    answers
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

/// Ports that the kernel may choose in the namespace of the calling thread.
struct Ports {
    range: RangeInclusive<u16>,
    reserved: Vec<RangeInclusive<u16>>,
}

impl Ports {
    fn read() -> io::Result<Ports> {
        let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
        let reserved = fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports")?;
        Ports::parse(&range, &reserved).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    /// Parses the two sysctls: `range` has two numbers separated by a tab, `reserved` a list such as `8080,9148-9150`.
    fn parse(range: &str, reserved: &str) -> Option<Ports> {
        let (low, high) = range.trim().split_once(char::is_whitespace)?;
        let range = low.parse().ok()?..=high.trim().parse().ok()?;
        let parts = reserved.trim().split(',').filter(|part| !part.is_empty());
        let reserved = parts
            .map(|part| {
                let (low, high) = part.split_once('-').unwrap_or((part, part));
                Some(low.parse().ok()?..=high.parse().ok()?)
            })
            .collect::<Option<Vec<_>>>()?;
        Some(Ports { range, reserved })
    }

    fn has(&self, port: u16) -> bool {
        self.range.contains(&port) && !self.reserved.iter().any(|reserved| reserved.contains(&port))
    }

    /// Counts the ports that connections to `destination` use.
    fn in_use(&self, destination: SocketAddr) -> io::Result<Fill> {
        let mut used: HashMap<IpAddr, HashSet<u16>> = HashMap::new();
        let filter = Filter { transport: Transport::Tcp, source: None, source_port: None, destination };
        sock_diag::each(&filter, |entry| {
            if self.has(entry.local.port()) {
                used.entry(entry.local.ip()).or_default().insert(entry.local.port());
            }
        })?;
        Ok(Fill {
            in_use: used.values().map(HashSet::len).max().unwrap_or(0) as u32,
            range: self.range.clone().filter(|&port| self.has(port)).count() as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process;

    use fourtuple_syscalls::errno_name;
    use fourtuple_syscalls::seccomp::{self, Facility};

    use super::*;

    #[test]
    fn reserved_ports_are_not_counted_in_the_range() {
        let ports = Ports::parse("32768\t60999\n", "8080,40000-40009,60999\n").unwrap();
        assert_eq!((32_768..=60_999).filter(|&port| ports.has(port)).count(), 28_232 - 11);
        assert!(ports.has(32_768) && !ports.has(40_003) && !ports.has(8080) && !ports.has(60_999));
        assert!(Ports::parse("1024 65535", "\n").unwrap().has(65_535));
        assert!(Ports::parse("1024", "").is_none());
    }

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
        let answers = thread::spawn(look).join().unwrap();
        assert_eq!(answers.fills, [None]);
        assert_eq!(errno_name(&answers.error.unwrap()), "EPROTONOSUPPORT");
    }
}
