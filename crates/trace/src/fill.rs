//! How full the range of source ports is towards a destination, as the kernel lists its sockets (sock_diag).

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

/// Towards one destination, in one network namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fill {
    /// Ports of the range that connections to it have, TIME_WAIT included, of the source address with the most.
    pub(crate) in_use: u32,
    /// Ports that the kernel may choose from: net.ipv4.ip_local_port_range without the reserved ones.
    pub(crate) range: u32,
}

/// Where to look, and for what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Question {
    /// Inode of the network namespace.
    pub(crate) namespace: u32,
    /// Somebody who may be in it still.
    pub(crate) process: u32,
    /// Whereto.
    pub(crate) destination: SocketAddr,
}

/// Answers in the order of the questions: `None` where nobody is in the namespace any more by whom it could be entered, or
/// this process may not.
pub(crate) fn of(questions: &[Question]) -> Vec<Option<Fill>> {
    let mut answers = vec![None; questions.len()];
    let mut namespaces: HashMap<u32, Vec<usize>> = HashMap::new();
    for (place, question) in questions.iter().enumerate() {
        namespaces.entry(question.namespace).or_default().push(place);
    }
    for (namespace, places) in namespaces {
        let Some(door) = door(namespace, places.iter().map(|&place| questions[place].process)) else {
            continue;
        };
        // A thread of its own, for it does not come back from there.
        let found = thread::scope(|scope| {
            let look = || -> io::Result<Vec<Fill>> {
                netns::enter(door.as_fd())?;
                let ports = Ports::read()?;
                places.iter().map(|&place| ports.towards(questions[place].destination)).collect()
            };
            scope.spawn(look).join()
        });
        if let Ok(Ok(fills)) = found {
            places.iter().zip(fills).for_each(|(&place, fill)| answers[place] = Some(fill));
        }
    }
    answers
}

fn door(namespace: u32, processes: impl Iterator<Item = u32>) -> Option<File> {
    let others = processes.map(|process| format!("/proc/{process}/ns/net"));
    // This thread's own comes first: it takes no right to look there.
    std::iter::once("/proc/thread-self/ns/net".to_owned()).chain(others).find_map(|path| {
        let file = File::open(path).ok()?;
        (file.metadata().ok()?.ino() == u64::from(namespace)).then_some(file)
    })
}

/// What the kernel may choose from in the namespace of the calling thread.
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

    /// Two numbers with a tab between them, and `8080,9148-9150`.
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

    fn towards(&self, destination: SocketAddr) -> io::Result<Fill> {
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
    use super::*;

    #[test]
    fn reserved_ports_are_not_of_the_range() {
        let ports = Ports::parse("32768\t60999\n", "8080,40000-40009,60999\n").unwrap();
        assert_eq!((32_768..=60_999).filter(|&port| ports.has(port)).count(), 28_232 - 11);
        assert!(ports.has(32_768) && !ports.has(40_003) && !ports.has(8080) && !ports.has(60_999));
        assert!(Ports::parse("1024 65535", "\n").unwrap().has(65_535));
        assert!(Ports::parse("1024", "").is_none());
    }

    #[test]
    fn a_namespace_that_nobody_is_in_has_no_answer() {
        let destination = SocketAddr::from(([127, 0, 0, 1], 80));
        assert_eq!(of(&[Question { namespace: 0, process: u32::MAX, destination }]), [None]);
    }
}
