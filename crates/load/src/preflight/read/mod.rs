use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use fourtuple::ports::{PortRange, PortSet};
use fourtuple_syscalls::errno_name;
use fourtuple_syscalls::procfs;
use fourtuple_syscalls::resource;
use fourtuple_syscalls::route;
use fourtuple_syscalls::sock_diag::{self, Filter, Listener, state};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::unix_diag;

use crate::preflight::{Conntrack, Descriptors, ListenQueue, Snapshot, Taken};

/// The reason why the host's resources could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A file of procfs could not be read.
    #[error("cannot read {}: {}", .path.display(), errno_name(.error))]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The error.
        #[source]
        error: io::Error,
    },
    /// A file of procfs has unexpected contents.
    #[error("cannot make sense of {}: {content:?}", .path.display())]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// The contents.
        content: String,
    },
    /// A system call failed.
    #[error("cannot {what}: {}", errno_name(.error))]
    Call {
        /// The attempted operation.
        what: &'static str,
        /// The error.
        #[source]
        error: io::Error,
    },
}

impl ReadError {
    fn call(what: &'static str) -> impl FnOnce(io::Error) -> ReadError {
        move |error| ReadError::Call { what, error }
    }
}

impl Snapshot {
    /// Reads the resources of the calling thread's network namespace for connections from `sources` (empty: the kernel's
    /// choice) to `destination`. `proc` is the mount point of procfs: `/proc`. Sends nothing and changes nothing.
    ///
    /// # Errors
    ///
    /// See [`ReadError`]. Features that a kernel may lack (conntrack, tcp_tw_reuse_delay) are left out without an error. If
    /// the kernel does not list its sockets, [`Snapshot::unseen`] has the reason.
    pub fn read(
        proc: &Path,
        transport: Transport,
        destination: SocketAddr,
        sources: &[IpAddr],
    ) -> Result<Snapshot, ReadError> {
        let mut snapshot = Snapshot::read_without_ports(proc)?;
        let loopback = |ip: IpAddr| ip.to_canonical().is_loopback();
        snapshot.destination = Some(destination);
        snapshot.sources = sources.len().max(1) as u64;
        snapshot.loopback =
            loopback(destination.ip()) || (!sources.is_empty() && sources.iter().all(|ip| loopback(*ip)));
        let unseen = |error: io::Error| format!("sock_diag: {}", errno_name(&error));
        match taken(transport, destination, sources) {
            Ok(taken) => snapshot.taken = taken,
            Err(error) => snapshot.unseen = Some(unseen(error)),
        }
        if transport == Transport::Tcp && snapshot.unseen.is_none() {
            let listeners = match listeners() {
                Ok(listeners) => listeners,
                Err(error) => {
                    snapshot.unseen = Some(unseen(error));
                    return Ok(snapshot);
                }
            };
            let ports: HashSet<u16> = listeners.iter().map(|listener| listener.local.port()).collect();
            let counts = |port: &&u16| snapshot.range.contains(**port) && !snapshot.reserved.contains(**port);
            snapshot.listened_at = ports.iter().filter(counts).count() as u32;
            snapshot.listener = queue(&listeners, destination);
        }
        Ok(snapshot)
    }

    /// Reads the same resources for a run over the unix socket at `path`, which has an accept queue but no ports.
    ///
    /// # Errors
    ///
    /// See [`ReadError`]. A path without a socket is no error: the snapshot has no listener.
    pub fn read_unix(proc: &Path, path: &Path) -> Result<Snapshot, ReadError> {
        let mut snapshot = Snapshot::read_without_ports(proc)?;
        let queue = match unix_diag::listener(path) {
            Ok(queue) => queue,
            Err(error) => {
                snapshot.unseen = Some(format!("unix_diag: {}", errno_name(&error)));
                None
            }
        };
        snapshot.listener = queue.map(|queue| ListenQueue {
            sockets: 1,
            backlog: queue.backlog.into(),
            waiting: queue.waiting.into(),
        });
        Ok(snapshot)
    }

    /// Reads the resources for every run: limits, and settings of the namespace.
    pub fn read_without_ports(proc: &Path) -> Result<Snapshot, ReadError> {
        let proc = Proc(proc);
        let (soft, hard) =
            resource::descriptor_limits().map_err(ReadError::call("read the limit on descriptors"))?;
        let max = proc.number("sys/net/netfilter/nf_conntrack_max")?;
        let count = proc.number("sys/net/netfilter/nf_conntrack_count")?;
        Ok(Snapshot {
            destination: None,
            range: proc.ports("ip_local_port_range", |text| text.parse::<PortRange>().ok())?,
            reserved: proc.ports("ip_local_reserved_ports", |text| PortSet::parse_list(text).ok())?,
            listened_at: 0,
            sources: 1,
            taken: Taken::default(),
            unseen: None,
            loopback: false,
            tcp_tw_reuse: proc.required("sys/net/ipv4/tcp_tw_reuse")? as u8,
            tcp_tw_reuse_delay: proc.number("sys/net/ipv4/tcp_tw_reuse_delay")?.map(Duration::from_millis),
            tcp_timestamps: proc.required("sys/net/ipv4/tcp_timestamps")? != 0,
            descriptors: Descriptors { soft, hard, open: proc.entries("thread-self/fd")? },
            somaxconn: proc.number("sys/net/core/somaxconn")?,
            tcp_max_syn_backlog: proc.required("sys/net/ipv4/tcp_max_syn_backlog")?,
            // The file is absent without CONFIG_SYN_COOKIES.
            tcp_syncookies: proc.number("sys/net/ipv4/tcp_syncookies")?.unwrap_or(0) != 0,
            listener: None,
            conntrack: max.zip(count).map(|(max, count)| Conntrack { max, count }),
            tcp_max_tw_buckets: proc.required("sys/net/ipv4/tcp_max_tw_buckets")?,
            time_wait: proc.time_wait()?,
        })
    }
}

/// Counts the tuples towards `destination`, from `sources` or from the source address of the route.
fn taken(transport: Transport, destination: SocketAddr, sources: &[IpAddr]) -> io::Result<Taken> {
    let mut from: HashSet<IpAddr> = sources.iter().map(IpAddr::to_canonical).collect();
    if from.is_empty() {
        // Without a route no connection is possible, so all sockets count.
        from.extend(route::source_for(destination.ip()));
    }
    let mut taken = Taken::default();
    let filter = Filter { transport, source: None, source_port: None, destination };
    sock_diag::each(&filter, |entry| {
        if !from.is_empty() && !from.contains(&entry.local.ip()) {
            return;
        }
        match entry.state {
            state::ESTABLISHED => taken.established += 1,
            state::TIME_WAIT => {
                taken.time_wait += 1;
                let second = entry.expires.unwrap_or_default().as_secs() as usize;
                if taken.time_wait_back.len() <= second {
                    taken.time_wait_back.resize(second + 1, 0);
                }
                taken.time_wait_back[second] += 1;
            }
            _ => taken.other += 1,
        }
    })?;
    Ok(taken)
}

fn listeners() -> io::Result<Vec<Listener>> {
    let mut all = Vec::new();
    sock_diag::each_listener(|listener| all.push(listener))?;
    Ok(all)
}

/// Returns the sockets that get connections to `destination`: the sockets bound to its address, else the sockets bound to
/// all addresses (`compute_score` of net/ipv4/inet_hashtables.c, which prefers IPv4 sockets).
fn queue(listeners: &[Listener], destination: SocketAddr) -> Option<ListenQueue> {
    let wanted = SocketAddr::new(destination.ip().to_canonical(), destination.port());
    let all_of_ipv6 = |listener: &Listener| listener.local.is_ipv6() && listener.local.ip().is_unspecified();
    let ranks: [&dyn Fn(&Listener) -> bool; 3] = [
        &|listener| listener.local.ip() == wanted.ip(),
        &|listener| listener.local.is_ipv4() == wanted.is_ipv4() && listener.local.ip().is_unspecified(),
        &|listener| wanted.is_ipv4() && all_of_ipv6(listener) && !listener.only_ipv6,
    ];
    ranks.iter().find_map(|rank| {
        let mut queue = ListenQueue::default();
        let here = |listener: &&Listener| listener.local.port() == wanted.port() && rank(listener);
        for listener in listeners.iter().filter(here) {
            queue.sockets += 1;
            queue.backlog += u64::from(listener.backlog);
            queue.waiting += u64::from(listener.waiting);
        }
        (queue.sockets > 0).then_some(queue)
    })
}

/// The mount point of procfs. `sys/net` and `thread-self/net` show the network namespace of the calling thread.
struct Proc<'a>(&'a Path);

impl Proc<'_> {
    /// Reads a file; returns `None` if the file does not exist.
    fn text(&self, path: &str) -> Result<Option<String>, ReadError> {
        let path = self.0.join(path);
        match procfs::read_to_string(&path) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(ReadError::File { path, error }),
        }
    }

    fn number(&self, path: &str) -> Result<Option<u64>, ReadError> {
        let Some(content) = self.text(path)? else { return Ok(None) };
        match content.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(self.malformed(path, content)),
        }
    }

    fn required(&self, path: &str) -> Result<u64, ReadError> {
        self.number(path)?.ok_or_else(|| self.missing(path))
    }

    fn ports<T>(&self, name: &str, parse: impl Fn(&str) -> Option<T>) -> Result<T, ReadError> {
        let path = format!("sys/net/ipv4/{name}");
        let content = self.text(&path)?.ok_or_else(|| self.missing(&path))?;
        parse(&content).ok_or_else(|| self.malformed(&path, content))
    }

    fn missing(&self, path: &str) -> ReadError {
        ReadError::File { path: self.0.join(path), error: io::ErrorKind::NotFound.into() }
    }

    fn malformed(&self, path: &str, content: String) -> ReadError {
        ReadError::Malformed { path: self.0.join(path), content }
    }

    fn entries(&self, path: &str) -> Result<u64, ReadError> {
        let path = self.0.join(path);
        match fs::read_dir(&path) {
            // The count includes the descriptor of the directory itself.
            Ok(entries) => Ok((entries.count() as u64).saturating_sub(1)),
            Err(error) => Err(ReadError::File { path, error }),
        }
    }

    /// Returns `tw` of the TCP line of sockstat.
    fn time_wait(&self) -> Result<u64, ReadError> {
        let path = "thread-self/net/sockstat";
        let content = self.text(path)?.unwrap_or_default();
        let count = content.lines().find(|line| line.starts_with("TCP:")).and_then(|line| {
            let mut words = line.split_whitespace();
            words.find(|word| *word == "tw")?;
            words.next()?.parse().ok()
        });
        count.ok_or_else(|| self.malformed(path, content))
    }
}

#[cfg(test)]
mod tests;
