//! The network namespaces of a cgroup's processes: their port ranges and their routes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fourtuple_bpf::fix_ports::NamespacePorts;
use fourtuple_observe::host::sysctl;
use fourtuple_record::snapshot::EphemeralPorts;
use fourtuple_syscalls::{Errno, netns, resource, route, sock_diag};
use ipnet::IpNet;

/// Maximum number of addresses of a prefix that are examined.
const EXAMINED: usize = 4_096;

/// Maximum number of released namespaces whose ports are kept for the record: as many as there can be tuples.
const MAX_RELEASED: usize = 8_192;

#[derive(Debug)]
pub(crate) struct Namespace {
    file: OwnedFd,
    changes: Option<route::Changes>,
    pub(crate) ports: NamespacePorts,
}

/// The namespaces that are known, by cookie (SO_NETNS_COOKIE).
#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    known: BTreeMap<u64, Namespace>,
    /// Cookies by the inodes of the open files.
    seen: BTreeMap<u64, u64>,
    /// Ports of namespaces that have been released.
    released: BTreeMap<u64, NamespacePorts>,
}

impl Namespaces {
    /// Adds the namespaces of the processes in a cgroup and of this thread. Returns the cookies of the new ones. A namespace that
    /// cannot be entered is left out.
    pub(crate) fn discover(&mut self, cgroup: &Path) -> Vec<u64> {
        let processes = processes(cgroup).unwrap_or_default();
        let paths = processes.iter().map(|process| format!("/proc/{process}/ns/net"));
        let mut fresh = Vec::new();
        for path in ["/proc/thread-self/ns/net".to_owned()].into_iter().chain(paths) {
            // Only the file of a namespace that is new stays open: there may be more processes than descriptors.
            if inode(&path).is_none_or(|inode| self.seen.contains_key(&inode)) {
                continue;
            }
            let Ok(file) = File::open(path) else { continue };
            let Ok(inode) = file.metadata().map(|metadata| metadata.ino()) else { continue };
            if self.seen.contains_key(&inode) {
                continue;
            }
            let file = OwnedFd::from(file);
            let read = netns::within(file.as_fd(), || -> io::Result<_> {
                let cookie = netns::identity()?;
                Ok((cookie, route::Changes::watch().ok(), read_ports()?))
            });
            if let Ok((cookie, changes, ports)) = read.flatten() {
                // The open file keeps the namespace, and with it the inode.
                self.seen.insert(inode, cookie);
                self.known.insert(cookie, Namespace { file, changes, ports });
                fresh.push(cookie);
            }
        }
        fresh
    }

    /// Releases namespaces without a process in the cgroup, because an open file would keep them and their devices. Returns their
    /// cookies.
    pub(crate) fn release(&mut self, cgroup: &Path) -> Vec<u64> {
        let mut without: BTreeSet<u64> = self.seen.keys().copied().collect();
        let mut find = |path: &str| {
            inode(path).inspect(|inode| _ = without.remove(inode));
            without.is_empty()
        };
        // Most often there is one namespace, and the first process is in it.
        if !find("/proc/thread-self/ns/net") {
            // Without a descriptor for the list of processes nothing is released.
            let Ok(processes) = processes(cgroup) else { return Vec::new() };
            let _ = processes.iter().any(|process| find(&format!("/proc/{process}/ns/net")));
        }
        self.seen.retain(|inode, _| !without.contains(inode));
        let cookies: BTreeSet<u64> = self.seen.values().copied().collect();
        let gone: Vec<u64> = self.known.keys().copied().filter(|cookie| !cookies.contains(cookie)).collect();
        for cookie in &gone {
            self.released.extend(self.known.remove(cookie).map(|namespace| (*cookie, namespace.ports)));
            if self.released.len() > MAX_RELEASED {
                // Cookies ascend: the oldest namespace is forgotten.
                self.released.pop_first();
            }
        }
        gone
    }

    /// Returns the ports of all namespaces, released ones included.
    pub(crate) fn ports(&self) -> impl Iterator<Item = (u64, &NamespacePorts)> {
        let known = self.known.iter().map(|(cookie, namespace)| (*cookie, &namespace.ports));
        known.chain(self.released.iter().map(|(cookie, ports)| (*cookie, ports)))
    }

    pub(crate) fn contains(&self, cookie: u64) -> bool {
        self.known.contains_key(&cookie)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &Namespace)> {
        self.known.iter().map(|(cookie, namespace)| (*cookie, namespace))
    }

    /// Returns the source address of each destination in a namespace, `None` for a destination without one, and the processor time of
    /// the answers. An error, of all or of one, may be transient: no descriptor or no thread is left.
    pub(crate) fn sources(
        &self,
        cookie: u64,
        destinations: &[IpAddr],
    ) -> io::Result<(Vec<io::Result<Option<IpAddr>>>, Duration)> {
        let namespace = self.known.get(&cookie).ok_or(io::ErrorKind::NotFound)?;
        netns::within(namespace.file.as_fd(), || {
            let sources = destinations.iter().map(|destination| route::find_source(*destination)).collect();
            (sources, resource::thread_cpu_time())
        })
    }

    /// Returns the destinations of the connections that exist in a namespace.
    pub(crate) fn connected(&self, cookie: u64) -> Vec<IpAddr> {
        let Some(namespace) = self.known.get(&cookie) else { return Vec::new() };
        let found = netns::within(namespace.file.as_fd(), || -> io::Result<_> {
            let mut connected = Connected::default();
            sock_diag::each_connection(|socket| {
                connected.add(socket.local.port(), socket.remote.ip(), &namespace.ports);
            })?;
            Ok(connected.destinations())
        });
        // Without sock_diag each destination becomes known by its first connect.
        found.flatten().unwrap_or_default()
    }

    /// Returns the cookies of the namespaces whose addresses, routes or rules have changed since the previous call.
    pub(crate) fn rerouted(&self) -> Vec<u64> {
        let has_changed =
            |namespace: &Namespace| namespace.changes.as_ref().is_some_and(route::Changes::pending);
        self.iter().filter(|(_, namespace)| has_changed(namespace)).map(|(cookie, _)| cookie).collect()
    }

    /// Reads the port ranges again. Returns the cookies of the namespaces whose range has changed.
    pub(crate) fn reread(&mut self) -> Vec<u64> {
        let mut changed = Vec::new();
        for (cookie, namespace) in &mut self.known {
            let Ok(ports) = netns::within(namespace.file.as_fd(), read_ports).flatten() else { continue };
            let ports = NamespacePorts { has_sources: namespace.ports.has_sources, ..ports };
            if ports != namespace.ports {
                namespace.ports = ports;
                changed.push(*cookie);
            }
        }
        changed
    }

    /// Returns addresses of a prefix that are local in one of the namespaces, at most `limit`.
    pub(crate) fn local_addresses(&self, prefix: IpNet, limit: usize) -> Vec<IpAddr> {
        self.known
            .values()
            .map(|namespace| namespace.local(prefix, limit))
            .find(|local| !local.is_empty())
            .unwrap_or_default()
    }

    /// Notes in each namespace whether all of these source addresses are local there.
    pub(crate) fn note_sources(&mut self, sources: &[IpAddr]) {
        for namespace in self.known.values_mut() {
            let all = netns::within(namespace.file.as_fd(), || {
                sources.iter().all(|source| route::is_local(*source).unwrap_or(false))
            });
            namespace.ports.has_sources = !sources.is_empty() && all.unwrap_or(false);
        }
    }
}

impl Namespace {
    fn local(&self, prefix: IpNet, limit: usize) -> Vec<IpAddr> {
        netns::within(self.file.as_fd(), || local_addresses(prefix, limit)).unwrap_or_default()
    }
}

/// Returns addresses of a prefix that are local in the calling thread's namespace, at most `limit`.
pub(crate) fn local_addresses(prefix: IpNet, limit: usize) -> Vec<IpAddr> {
    let addresses = prefix.hosts().take(EXAMINED);
    addresses.filter(|address| route::is_local(*address).unwrap_or(false)).take(limit).collect()
}

/// Returns the sysctls of the calling thread's namespace.
pub(crate) fn read_ports() -> io::Result<NamespacePorts> {
    let ports = parse_ports(
        &read("net.ipv4.ip_local_port_range")?,
        &read("net.ipv4.ip_local_reserved_ports")?,
        &read("net.ipv4.tcp_tw_reuse")?,
    );
    ports.ok_or_else(|| io::Error::other("net.ipv4.ip_local_port_range cannot be read"))
}

/// Returns a sysctl, empty if the kernel lacks it. One that exists and cannot be read now (EMFILE) is an error.
fn read(name: &str) -> io::Result<String> {
    match sysctl(Path::new("/"), name) {
        None if Path::new("/proc/sys").join(name.replace('.', "/")).exists() => {
            Err(io::Error::other(format!("{name} cannot be read")))
        }
        value => Ok(value.unwrap_or_default()),
    }
}

/// Returns the inode of the namespace of a path.
fn inode(path: &str) -> Option<u64> {
    fs::metadata(path).ok().map(|metadata| metadata.ino())
}

/// Returns the processes in a cgroup and the cgroups below it. An error: no descriptor is left.
pub(crate) fn processes(cgroup: &Path) -> io::Result<Vec<u32>> {
    // A cgroup may be removed in the meantime.
    let is_exhausted = |error: &io::Error| matches!(Errno::of(error), Some(Errno::EMFILE | Errno::ENFILE));
    let text = match fs::read_to_string(cgroup.join("cgroup.procs")) {
        Err(error) if is_exhausted(&error) => return Err(error),
        text => text.unwrap_or_default(),
    };
    let mut found: Vec<u32> =
        text.lines().filter_map(|line| line.parse().ok()).filter(|&process| process != 0).collect();
    let entries = match fs::read_dir(cgroup) {
        Err(error) if is_exhausted(&error) => return Err(error),
        entries => entries.into_iter().flatten().flatten(),
    };
    let is_directory = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    // The directory is closed before those below it are opened: there may be more levels than descriptors.
    let below: Vec<PathBuf> = entries.filter(is_directory).map(|entry| entry.path()).collect();
    for directory in below {
        found.extend(processes(&directory)?);
    }
    Ok(found)
}

const DESTINATIONS: usize = 1_000;

#[derive(Debug, Default)]
pub(crate) struct Connected(HashMap<IpAddr, u64>);

impl Connected {
    /// Counts a connection if its local port is in the range: then this host may have opened it.
    pub(crate) fn add(&mut self, local_port: u16, destination: IpAddr, ports: &NamespacePorts) {
        if (ports.low..=ports.high).contains(&local_port) && !destination.is_unspecified() {
            *self.0.entry(destination).or_default() += 1;
        }
    }

    /// Returns the destinations, the most frequent first.
    pub(crate) fn destinations(self) -> Vec<IpAddr> {
        let mut found: Vec<(IpAddr, u64)> = self.0.into_iter().collect();
        found.sort_by_key(|(address, count)| (Reverse(*count), *address));
        found.into_iter().map(|(address, _)| address).take(DESTINATIONS).collect()
    }
}

/// Reads net.ipv4.ip_local_port_range, net.ipv4.ip_local_reserved_ports and net.ipv4.tcp_tw_reuse. `None` if the range is no
/// range; a missing list reserves nothing, and without net.ipv4.tcp_tw_reuse no TIME_WAIT socket is reused.
pub(crate) fn parse_ports(range: &str, reserved: &str, time_wait_reuse: &str) -> Option<NamespacePorts> {
    let EphemeralPorts { low, high, reserved } = EphemeralPorts::parse(range, reserved)?;
    let time_wait_reuse = time_wait_reuse.trim().parse().unwrap_or(0);
    Some(NamespacePorts { low, high, reserved, time_wait_reuse, has_sources: false })
}

/// Returns the number of ports of the range that are not reserved.
pub(crate) fn usable(ports: &NamespacePorts) -> u32 {
    EphemeralPorts { low: ports.low, high: ports.high, reserved: ports.reserved.clone() }.usable()
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;
    use std::thread;

    use fourtuple_syscalls::seccomp::{self, FailingCall};

    use super::*;

    #[test]
    fn released_namespaces_are_bounded() {
        let mut namespaces = Namespaces::default();
        for cookie in 0..MAX_RELEASED as u64 + 3 {
            let ports = NamespacePorts {
                low: 1,
                high: 2,
                reserved: Vec::new(),
                time_wait_reuse: 0,
                has_sources: false,
            };
            let file = File::open("/dev/null").unwrap().into();
            namespaces.known.insert(cookie, Namespace { file, changes: None, ports });
            assert_eq!(namespaces.release(Path::new("/nonexistent")), [cookie]);
        }
        assert_eq!(namespaces.ports().count(), MAX_RELEASED);
        assert_eq!(namespaces.ports().next().unwrap().0, 3, "the oldest are forgotten");
    }

    /// A user may delegate a cgroup with more levels than there are descriptors.
    #[test]
    fn no_directory_stays_open_for_those_below_it() {
        let root = std::env::temp_dir().join(format!("fourtuple-levels-{}", std::process::id()));
        let deepest = root.join("a/b/c");
        fs::create_dir_all(&deepest).unwrap();
        let list = deepest.join("cgroup.procs");
        assert!(Command::new("mkfifo").arg(&list).status().unwrap().success());
        let of_thread = root.clone();
        let reader = thread::spawn(move || processes(&of_thread));
        // open(2) waits for the reader, which then waits for the end of the list.
        let mut writer = File::options().write(true).open(&list).unwrap();
        let targets = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let targets = targets.filter_map(|entry| fs::read_link(entry.path()).ok());
        let open: Vec<PathBuf> = targets.filter(|path| path.starts_with(&root) && *path != list).collect();
        writer.write_all(b"7\n").unwrap();
        drop(writer);
        assert_eq!(reader.join().unwrap().unwrap(), [7]);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(open, Vec::<PathBuf>::new());
    }

    #[test]
    fn connections_from_the_range_have_destinations() {
        let ports = NamespacePorts {
            low: 20_000,
            high: 20_099,
            reserved: Vec::new(),
            time_wait_reuse: 0,
            has_sources: false,
        };
        let mut connected = Connected::default();
        for (local_port, destination) in [
            (20_000, "127.0.0.2"),
            (20_001, "127.0.0.3"),
            (20_002, "127.0.0.3"),
            (4_000, "127.0.0.4"),
            (20_003, "::1"),
            (20_099, "0.0.0.0"),
            (20_100, "127.0.0.5"),
        ] {
            connected.add(local_port, destination.parse().unwrap(), &ports);
        }
        let found: Vec<String> = connected.destinations().iter().map(IpAddr::to_string).collect();
        assert_eq!(found, ["127.0.0.3", "127.0.0.2", "::1"]);
    }

    /// An empty list of reserved ports would let the fix draw ports that are reserved.
    #[test]
    fn a_sysctl_that_cannot_be_read_now_is_not_empty() {
        let reserved = "net.ipv4.ip_local_reserved_ports";
        let without = move |errno| {
            seccomp::fail(FailingCall::Open, errno).unwrap();
            read(reserved).map_err(|error| error.to_string())
        };
        for errno in [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM] {
            let found = thread::spawn(move || without(errno)).join().unwrap();
            assert_eq!(found, Err(format!("{reserved} cannot be read")), "{errno}");
        }
        read(reserved).unwrap();
        assert_eq!(read("net.ipv4.no_such_sysctl").unwrap(), "");
    }

    #[test]
    fn sysctls_are_a_range_without_reserved_ports() {
        let ports = parse_ports("20000\t20099\n", "8080,20010-20019,20050\n", "2\n").unwrap();
        assert_eq!((ports.low, ports.high, ports.time_wait_reuse), (20_000, 20_099, 2));
        assert_eq!(ports.reserved, [(8_080, 8_080), (20_010, 20_019), (20_050, 20_050)]);
        assert_eq!(usable(&ports), 100 - 11);
    }

    #[test]
    fn a_missing_list_reserves_nothing() {
        let ports = parse_ports("1024 65535", "\n", "").unwrap();
        assert_eq!((ports.reserved.len(), ports.time_wait_reuse, usable(&ports)), (0, 0, 64_512));
        assert!(parse_ports("", "", "").is_none());
        assert!(parse_ports("2 1", "", "").is_none());
    }
}
