//! The sockets of a server, and the processes that hold them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_syscalls::epoll::Registration;
use fourtuple_syscalls::sock_diag::{self, Member};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{netns, procfs, unix_diag};

use crate::accept::group::{Handle, transport_name};
use crate::accept::{AcceptError, AcceptTarget};
use crate::target::{command, tree};

/// The addresses of a server in a network namespace.
pub(super) struct Scope {
    target: AcceptTarget,
    /// `None`: the namespace of this process.
    namespace: Option<OwnedFd>,
    addresses: BTreeSet<(Transport, SocketAddr)>,
}

impl Scope {
    pub(super) fn open(target: &AcceptTarget) -> Result<Scope, AcceptError> {
        let namespace = match target {
            AcceptTarget::Address(_) | AcceptTarget::Unix(_) => None,
            AcceptTarget::Process(process) => {
                let file = File::open(format!("/proc/{process}/ns/net"));
                let failed = |source: io::Error| match source.kind() {
                    io::ErrorKind::NotFound => AcceptError::NoProcess(*process),
                    _ => AcceptError::Namespace { process: *process, source },
                };
                Some(file.map_err(failed)?.into())
            }
        };
        let mut scope = Scope { target: target.clone(), namespace, addresses: BTreeSet::new() };
        scope.look(&BTreeSet::new()).map_err(AcceptError::List)?;
        Ok(scope)
    }

    /// Finds the addresses at which the server listens now. Those of a process replace the addresses of before, except for `kept`: a
    /// resolver binds a port for each query, and later another program may listen there.
    pub(super) fn look(&mut self, kept: &BTreeSet<(Transport, SocketAddr)>) -> io::Result<()> {
        let all = self.list()?;
        match &self.target {
            AcceptTarget::Address(address) => self.addresses.extend(matching(&all, *address)),
            AcceptTarget::Unix(_) => {}
            AcceptTarget::Process(process) => {
                let own = inodes(*process);
                let its = all.iter().filter(|member| own.contains(&member.inode));
                self.addresses.retain(|address| kept.contains(address));
                self.addresses.extend(its.map(|member| (member.transport, member.local)));
            }
        }
        Ok(())
    }

    /// Returns the addresses at which the server listens.
    pub(super) fn addresses(&self) -> &BTreeSet<(Transport, SocketAddr)> {
        &self.addresses
    }

    /// Returns the sockets at the addresses of the server, of all processes.
    pub(super) fn members(&self) -> io::Result<Vec<Member>> {
        self.within(|| members(&self.addresses))
    }

    /// Returns the TCP and unix listeners of the server, by cookie.
    pub(super) fn shared(&self) -> io::Result<BTreeMap<u64, SharedListener>> {
        let own = match &self.target {
            AcceptTarget::Process(process) => inodes(*process),
            AcceptTarget::Address(_) | AcceptTarget::Unix(_) => BTreeSet::new(),
        };
        let all = self.list()?;
        let addresses = match &self.target {
            AcceptTarget::Address(address) => matching(&all, *address),
            AcceptTarget::Unix(_) | AcceptTarget::Process(_) => BTreeSet::new(),
        };
        let mut found = BTreeMap::new();
        for Member { transport, local, cookie, inode, queue, .. } in all {
            let is_wanted = addresses.contains(&(transport, local)) || own.contains(&inode);
            if transport == Transport::Tcp && is_wanted {
                found.insert(
                    cookie,
                    SharedListener { transport: "tcp", address: local.to_string(), inode, queue },
                );
            }
        }
        let unix = self.within(|| {
            let mut all = Vec::new();
            unix_diag::each_listener(|listener| all.push(listener)).map(|()| all)
        });
        let unix = match (&self.target, unix) {
            (AcceptTarget::Unix(_), unix) => unix?,
            // A kernel without unix_diag has the listeners of TCP.
            (_, unix) => unix.unwrap_or_default(),
        };
        for unix_diag::Detail { name, inode, cookie, queue } in unix {
            if own.contains(&inode) || matches!(&self.target, AcceptTarget::Unix(path) if *path == name) {
                let queue = queue.waiting;
                found.insert(cookie, SharedListener { transport: "unix", address: name, inode, queue });
            }
        }
        Ok(found)
    }

    fn list(&self) -> io::Result<Vec<Member>> {
        self.within(list)
    }

    fn within<T: Send>(&self, run: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        match &self.namespace {
            Some(namespace) => netns::within(namespace.as_fd(), run)?,
            None => run(),
        }
    }
}

/// A listener that several workers may share.
#[derive(Clone, Debug)]
pub(super) struct SharedListener {
    /// `tcp` or `unix`.
    pub(super) transport: &'static str,
    /// The address, or the path.
    pub(super) address: String,
    pub(super) inode: u32,
    pub(super) queue: u32,
}

impl SharedListener {
    /// Returns the value of `--listen` that names it.
    pub(super) fn name(&self) -> String {
        if self.transport == "unix" { format!("unix:{}", self.address) } else { self.address.clone() }
    }
}

/// Returns the sockets at addresses in the network namespace of this thread, of all processes.
pub(super) fn members(addresses: &BTreeSet<(Transport, SocketAddr)>) -> io::Result<Vec<Member>> {
    let mut all = list()?;
    all.retain(|member| addresses.contains(&(member.transport, member.local)));
    all.sort_by_key(|member| member.cookie);
    Ok(all)
}

fn list() -> io::Result<Vec<Member>> {
    let mut all = Vec::new();
    sock_diag::each_member(|member| all.push(member))?;
    Ok(all)
}

/// Returns the addresses that stand for an address: itself, or else the unspecified address with its port.
fn matching(all: &[Member], wanted: SocketAddr) -> BTreeSet<(Transport, SocketAddr)> {
    let with = |is: &dyn Fn(&SocketAddr) -> bool| -> BTreeSet<_> {
        let found = all.iter().filter(|member| is(&member.local));
        found.map(|member| (member.transport, member.local)).collect()
    };
    let exact = with(&|local| *local == wanted);
    if !exact.is_empty() {
        return exact;
    }
    with(&|local| {
        local.port() == wanted.port()
            && local.ip().is_unspecified()
            && (local.is_ipv6() || wanted.is_ipv4())
            && !matches!(wanted.ip(), IpAddr::V6(ip) if local.is_ipv4() || ip.is_unspecified())
    })
}

/// Returns the handles of sockets by inode, of all processes.
pub(super) fn handles(members: &[Member]) -> BTreeMap<u32, Vec<Handle>> {
    handles_of(&members.iter().map(|member| (member.inode, member.cookie)).collect())
}

/// Does the same for the inodes and cookies of sockets.
pub(super) fn handles_of(wanted: &BTreeMap<u32, u64>) -> BTreeMap<u32, Vec<Handle>> {
    let mut found: BTreeMap<u32, Vec<Handle>> = BTreeMap::new();
    for process in procfs::processes("/") {
        for (descriptor, inode) in sockets_of(process) {
            if let Some(cookie) = wanted.get(&inode) {
                found.entry(inode).or_default().push(Handle { process, descriptor, cookie: *cookie });
            }
        }
    }
    found
}

/// Returns `127.0.0.1:80 (TCP, nginx, process 7)`.
pub(super) fn describe(member: &Member) -> String {
    let handles = handles(&[*member]).remove(&member.inode).unwrap_or_default();
    describe_with(member.transport, member.local, &handles)
}

/// Does the same for a socket with these handles.
pub(super) fn describe_with(transport: Transport, local: SocketAddr, handles: &[Handle]) -> String {
    let process = worker(handles);
    let (transport, command) = (transport_name(transport).to_uppercase(), command(process));
    format!("{local} ({transport}, {command}, process {process})")
}

/// Returns the process that waits for connections of a socket: the only holder, or the first holder with the socket in an epoll
/// instance. Workers inherit the sockets of all other workers from processes such as nginx's master.
pub(super) fn worker(handles: &[Handle]) -> u32 {
    let waits = |handle: &&Handle| polls(handle.process, handle.descriptor);
    let first = handles.first().map_or(0, |handle| handle.process);
    if handles.len() < 2 { first } else { handles.iter().find(waits).map_or(first, |handle| handle.process) }
}

/// Returns whether an epoll instance of a process has this descriptor.
fn polls(process: u32, descriptor: i32) -> bool {
    registrations(process).any(|(_, registration, _)| registration.descriptor == descriptor)
}

/// Returns the registrations in the epoll instances of a process: the descriptor of the instance, the registration, and the inode of its
/// file.
pub(super) fn registrations(process: u32) -> impl Iterator<Item = (i32, Registration, u64)> {
    let is_epoll = |target: &std::path::Path| target.as_os_str() == "anon_inode:[eventpoll]";
    let descriptors = procfs::descriptors("/", process).into_iter().flatten();
    descriptors.filter(move |(_, target)| is_epoll(target)).flat_map(move |(epoll, _)| {
        // The process may have closed it.
        let text = fs::read_to_string(format!("/proc/{process}/fdinfo/{epoll}")).unwrap_or_default();
        let listed: Vec<_> = Registration::listed(&text).collect();
        listed.into_iter().map(move |(registration, inode)| (epoll, registration, inode))
    })
}

/// Returns the inodes of the sockets of a process and its descendants.
fn inodes(process: u32) -> BTreeSet<u32> {
    tree(process).into_iter().flat_map(sockets_of).map(|(_, inode)| inode).collect()
}

/// Returns the sockets of a process, which may end meanwhile.
fn sockets_of(process: u32) -> impl Iterator<Item = (i32, u32)> {
    procfs::sockets("/", process).into_iter().flatten()
}

/// Servers by the name of their process, and their setting.
const SETTINGS: &[(&str, &str)] = &[
    ("nginx", NGINX),
    ("envoy", "Envoy creates one with `enable_reuse_port: true` in the listener"),
    ("haproxy", "HAProxy creates one with `shards by-thread` in its line `bind`"),
    ("gunicorn", "Gunicorn creates one with `--reuse-port` and one process for each listener"),
    ("unbound", "Unbound creates one with `so-reuseport: yes`"),
    ("knotd", "Knot DNS creates one with `udp-workers` and `tcp-reuseport: on`"),
    ("named", "BIND creates one with `reuseport yes` in its options"),
    ("pdns_server", "PowerDNS creates one with `reuseport=yes`"),
    ("pdns_recursor", "PowerDNS Recursor creates one with `reuseport=yes`"),
    ("dnsdist", "dnsdist creates one with `reusePort=true` in addLocal() or setLocal()"),
    ("node", NODE),
    ("apache2", "Apache httpd creates one with `ListenCoresBucketsRatio`"),
    ("httpd", "Apache httpd creates one with `ListenCoresBucketsRatio`"),
];

const NGINX: &str = "nginx creates one with `reuseport` in its directive `listen`; without it `--select rotate` evens out its workers";
const NODE: &str =
    "Node.js (22.12) creates one with `reusePort: true` in server.listen() of several processes";
const OTHER: &str = "a server creates one with several sockets for one address, each with setsockopt(SO_REUSEPORT) before bind(): \
                     Go in `net.ListenConfig.Control`, Python by `socket.SO_REUSEPORT`";

/// Returns how a server creates a group, by the name of its process.
pub(super) fn setting(command: &str) -> &'static str {
    SETTINGS.iter().find(|(name, _)| command.starts_with(name)).map_or(OTHER, |(_, setting)| setting)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(transport: Transport, local: &str) -> Member {
        Member { transport, local: local.parse().unwrap(), cookie: 1, inode: 1, queue: 0, mptcp: false }
    }

    #[test]
    fn an_address_stands_for_itself_or_the_unspecified_one() {
        let all = [
            member(Transport::Tcp, "127.0.0.1:80"),
            member(Transport::Udp, "127.0.0.1:80"),
            member(Transport::Tcp, "0.0.0.0:80"),
            member(Transport::Tcp, "[::]:80"),
            member(Transport::Tcp, "0.0.0.0:81"),
        ];
        let found = |text: &str| -> Vec<String> {
            let found = matching(&all, text.parse().unwrap());
            found.iter().map(|(transport, local)| format!("{transport:?} {local}")).collect()
        };
        assert_eq!(found("127.0.0.1:80"), ["Tcp 127.0.0.1:80", "Udp 127.0.0.1:80"]);
        assert_eq!(found("127.0.0.2:80"), ["Tcp 0.0.0.0:80", "Tcp [::]:80"]);
        assert_eq!(found("0.0.0.0:80"), ["Tcp 0.0.0.0:80"]);
        assert_eq!(found("[::1]:80"), ["Tcp [::]:80"]);
        assert!(found("[::]:81").is_empty() && found("127.0.0.1:82").is_empty());
    }

    #[test]
    fn servers_are_known_by_their_processes() {
        assert!(setting("nginx").contains("`reuseport`"));
        assert!(setting("gunicorn: maste").contains("--reuse-port"));
        assert!(setting("my-server").contains("SO_REUSEPORT"));
    }
}
