use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use fourtuple::ports::{PortRange, PortSet};
use fourtuple_syscalls::sock_diag::{self, Filter, Listener, state};
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{errno_name, procfs, resource, route, unix_diag};

/// The resources of this host for a run, in one network namespace at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The destination of the run; `None` for a unix socket, which has no ports. Of several, the first without a listening socket.
    pub destination: Option<SocketAddr>,
    /// net.ipv4.ip_local_port_range, of IPv6 too.
    pub range: PortRange,
    /// net.ipv4.ip_local_reserved_ports: the kernel does not choose these by itself.
    pub reserved: PortSet,
    /// Number of ports in the range, without reserved ones, on which a socket listens. The search of connect() skips each port
    /// that was bound by number, at any address (`__inet_hash_connect`: `tb->fastreuse >= 0`). 0 for UDP.
    pub listened_at: u32,
    /// Number of source addresses; 1 if the kernel chooses the source by route. Of several destinations the sum: their 4-tuples are
    /// distinct.
    pub sources: u64,
    /// 4-tuples from these sources to the destination that are in use by any process.
    pub taken: Taken,
    /// The reason why sockets could not be listed (sock_diag, unix_diag). If it is set, `taken`, `listened_at` and `listener`
    /// are unknown.
    pub unseen: Option<String>,
    /// Whether tcp_tw_reuse=2 treats the connections of the run as loopback: one of their addresses is in 127.0.0.0/8 or is
    /// ::1 (`tcp_twsk_unique`). Any other address of this host does not count.
    pub loopback: bool,
    /// net.ipv4.tcp_tw_reuse. 0: never; 1: everywhere; 2, the default: on loopback.
    pub tcp_tw_reuse: u8,
    /// net.ipv4.tcp_tw_reuse_delay (Linux 6.14). `None` on earlier kernels, where the delay lasts until the next full
    /// second.
    pub tcp_tw_reuse_delay: Option<Duration>,
    /// Whether net.ipv4.tcp_timestamps is not 0. Without timestamps no TIME_WAIT socket is reused.
    pub tcp_timestamps: bool,
    pub descriptors: Descriptors,
    /// net.core.somaxconn, to which listen(2) limits a backlog. `None` if it is not visible: older kernels hide it in a
    /// namespace that belongs to a user namespace (`sysctl_core_net_init`).
    pub somaxconn: Option<u64>,
    /// net.ipv4.tcp_max_syn_backlog: the limit on handshakes in progress without SYN cookies.
    pub tcp_max_syn_backlog: u64,
    /// Whether net.ipv4.tcp_syncookies is not 0.
    pub tcp_syncookies: bool,
    /// The listening sockets at the destination, if it is in this namespace.
    pub listener: Option<ListenQueue>,
    /// The table of connection tracking, if the kernel has one. It may be unused.
    pub conntrack: Option<Conntrack>,
    /// net.ipv4.tcp_max_tw_buckets: most sockets in TIME_WAIT, per namespace. A further socket is closed at once
    /// (`inet_twsk_alloc`, counted as TCPTimeWaitOverflow).
    pub tcp_max_tw_buckets: u64,
    /// Sockets in TIME_WAIT in this namespace (`tw` of /proc/net/sockstat).
    pub time_wait: u64,
}

/// The 4-tuples in use, by the state of their sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Sockets in ESTABLISHED; for UDP, connected sockets.
    pub established: u64,
    /// Sockets in TIME_WAIT.
    pub time_wait: u64,
    /// Sockets in the handshake, or closing.
    pub other: u64,
    /// Number of TIME_WAIT sockets that expire in the first second from now, in the second one, and so on (idiag_expires).
    pub time_wait_back: Vec<u64>,
}

impl Taken {
    /// Returns the number of all 4-tuples in use.
    pub fn all(&self) -> u64 {
        self.established + self.time_wait + self.other
    }

    /// Returns the number of 4-tuples that are in use even after all TIME_WAIT sockets have expired.
    pub(super) fn forget_time_wait(&mut self) {
        self.time_wait = 0;
        self.time_wait_back.clear();
    }
}

/// The limits of RLIMIT_NOFILE and the number of open descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// The soft limit, which the kernel enforces.
    pub soft: u64,
    /// The hard limit, up to which any process may raise its soft limit.
    pub hard: u64,
    /// Number of open descriptors of this process.
    pub open: u64,
}

/// The accept queues at the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListenQueue {
    /// Number of listening sockets; more than one with SO_REUSEPORT.
    pub sockets: u64,
    /// Sum of the effective backlogs of all sockets (sk_max_ack_backlog).
    pub backlog: u64,
    /// Number of connections in all accept queues now (sk_ack_backlog).
    pub waiting: u64,
}

/// The table of connection tracking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conntrack {
    /// The sysctl net.netfilter.nf_conntrack_max.
    pub max: u64,
    /// net.netfilter.nf_conntrack_count, of this namespace. 0 usually means that no rule uses connection tracking.
    pub count: u64,
}

impl Snapshot {
    /// Adds the snapshot of another destination, to which connections go in turn with the connections of this snapshot.
    pub(crate) fn add(&mut self, other: Snapshot) {
        self.sources += other.sources;
        self.loopback &= other.loopback;
        self.unseen = self.unseen.take().or(other.unseen);
        let (taken, more) = (&mut self.taken, other.taken);
        taken.established += more.established;
        taken.time_wait += more.time_wait;
        taken.other += more.other;
        let seconds = taken.time_wait_back.len().max(more.time_wait_back.len());
        taken.time_wait_back.resize(seconds, 0);
        taken.time_wait_back.iter_mut().zip(more.time_wait_back).for_each(|(sum, more)| *sum += more);
        (self.destination, self.listener) = match (self.listener, other.listener) {
            // Both may be the queue of one socket (`[::]`): the smaller one is certain.
            (Some(one), Some(two)) => {
                (self.destination, Some(if one.backlog <= two.backlog { one } else { two }))
            }
            (Some(_), None) => (other.destination, None),
            (None, _) => (self.destination, None),
        };
    }

    /// Returns the number of ports that one source can use: the range without reserved ports and ports of listening sockets.
    pub fn ports(&self) -> u64 {
        let open = self.range.len() - self.reserved.count_in(self.range);
        u64::from(open.saturating_sub(self.listened_at))
    }

    /// Returns the number of 4-tuples to the destination, free or in use: ports x sources.
    pub fn budget(&self) -> u64 {
        self.ports().saturating_mul(self.sources)
    }

    /// Returns the age from which connect() reuses a TIME_WAIT socket; `None` if tcp_tw_reuse does not apply to this
    /// destination. Before Linux 6.14, which has no tcp_tw_reuse_delay, the upper bound of 1 s: `tcp_twsk_unique`
    /// compared clocks of whole seconds then.
    pub fn reuse(&self) -> Option<Duration> {
        let applies = self.tcp_timestamps
            && match self.tcp_tw_reuse {
                0 => false,
                2 => self.loopback,
                _ => true,
            };
        applies.then(|| self.tcp_tw_reuse_delay.unwrap_or(Duration::from_secs(1)))
    }
}

/// The reason why the host's resources could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// A file of procfs could not be read.
    #[error("cannot read {}: {}", .path.display(), errno_name(.error))]
    File {
        path: PathBuf,
        #[source]
        error: io::Error,
    },
    /// A file of procfs has unexpected contents.
    #[error("cannot make sense of {}: {content:?}", .path.display())]
    Malformed { path: PathBuf, content: String },
    /// A system call failed.
    #[error("cannot {what}: {}", errno_name(.error))]
    Call {
        /// The attempted operation.
        what: &'static str,
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
    /// See [`ReadError`]. A path without a socket is not an error: the snapshot has no listener.
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
        &|listener| wanted.is_ipv4() && all_of_ipv6(listener) && !listener.ipv6_only,
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
mod tests {
    use std::env;
    use std::io::Read as _;
    use std::net::{Shutdown, TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process;
    use std::thread;
    use std::time::Instant;

    use fourtuple_syscalls::seccomp::{self, Facility};
    use fourtuple_syscalls::{netns, socket};
    use fourtuple_testing::{connect, each_in_namespace, in_namespace, keep_time_wait, listener, set_sysctl};

    use super::*;
    use crate::load::preflight::Transport::Unix;
    use crate::load::preflight::{Need, judge};

    const PROC: &str = "/proc";

    fn read(destination: SocketAddr) -> Snapshot {
        read_from(Transport::Tcp, destination, &[])
    }

    fn read_from(transport: Transport, destination: SocketAddr, sources: &[IpAddr]) -> Snapshot {
        Snapshot::read(Path::new(PROC), transport, destination, sources).expect("a snapshot")
    }

    fn connected(destination: SocketAddr, number: usize) -> Vec<TcpStream> {
        (0..number).map(|_| connect(destination)).collect()
    }

    /// Returns a run of operations, each with a connection of its own.
    fn one_by_one(operations: u64) -> Need {
        let operations = Some(operations);
        Need { connections: 1, requests_per_connection: 1, operations, ..Need::default() }
    }

    /// Opens a server in the namespace, and sets a small ephemeral range for its clients.
    fn server(address: &str, range: &str) -> (TcpListener, SocketAddr) {
        set_sysctl("net.ipv4.ip_local_port_range", range);
        let server = TcpListener::bind((address, 80)).expect("a listener");
        let destination = server.local_addr().expect("its address");
        (server, destination)
    }

    /// Opens a connection and closes it, client first. Returns false if no port was free.
    fn churn(server: &TcpListener, destination: SocketAddr) -> bool {
        match TcpStream::connect(destination) {
            Ok(client) => {
                let (mut accepted, _) = server.accept().expect("the other end");
                // Not by close(): a process that another test has just started has a copy of the socket until its exec(), and the server
                // would close first.
                client.shutdown(Shutdown::Write).expect("shutdown");
                assert_eq!(accepted.read(&mut [0]).expect("the end"), 0);
                true
            }
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => false,
            Err(error) => panic!("connect: {error}"),
        }
    }

    #[test]
    fn tuples_in_use_are_counted_by_state() {
        in_namespace(|| {
            keep_time_wait();
            let began = Instant::now();
            let (server, destination) = server("127.0.0.1", "20000 20015");
            let held = connected(destination, 3);
            let accepted: Vec<TcpStream> =
                (0..3).map(|_| server.accept().expect("the other end").0).collect();
            assert!((0..4).all(|_| churn(&server, destination)));
            let half_closed = TcpStream::connect(destination).expect("a port");
            let waits = server.accept().expect("the other end").0;
            // The client's socket is in FIN_WAIT2, the server's in CLOSE_WAIT.
            half_closed.shutdown(Shutdown::Write).expect("shutdown");
            let states = |taken: &Taken| (taken.established, taken.time_wait, taken.other);
            // The number of all sockets in TIME_WAIT is read before the sockets.
            let is_settled =
                |snapshot: &Snapshot| states(&snapshot.taken) == (3, 4, 1) && snapshot.time_wait == 4;
            let mut snapshot = read(destination);
            // A process that another test has just started has copies of the sockets until its exec(), and closes them last.
            while !is_settled(&snapshot) && began.elapsed() < Duration::from_secs(50) {
                snapshot = read(destination);
            }
            assert_eq!(snapshot.budget(), 16);
            let taken = &snapshot.taken;
            assert_eq!(states(taken), (3, 4, 1));
            assert_eq!((snapshot.time_wait, snapshot.loopback), (4, true));
            // 60 s less the elapsed time, plus the delay of a late timer.
            assert_eq!(taken.time_wait_back.iter().sum::<u64>(), 4);
            let least = 58_usize.saturating_sub(began.elapsed().as_secs() as usize);
            assert!((least..=66).contains(&taken.time_wait_back.len()), "{:?}", taken.time_wait_back);
            let elsewhere = read(SocketAddr::from(([127, 0, 0, 1], 81)));
            assert_eq!((elsewhere.taken.all(), elsewhere.listener), (0, None));
            let another = ["127.0.0.2".parse().expect("an address")];
            let others = read_from(Transport::Tcp, destination, &another);
            assert_eq!(others.taken.all(), 0, "from other sources nothing is taken");
            drop((held, accepted, half_closed, waits));
        });
    }

    #[test]
    fn flows_of_udp_are_taken_tuples() {
        in_namespace(|| {
            let server = UdpSocket::bind("127.0.0.1:80").expect("a socket");
            let destination = server.local_addr().expect("its address");
            let flow = UdpSocket::bind("127.0.0.1:0").expect("a socket");
            flow.connect(destination).expect("a peer");
            let snapshot = read_from(Transport::Udp, destination, &[]);
            assert_eq!((snapshot.taken.established, snapshot.taken.all()), (1, 1));
        });
    }

    #[test]
    fn sockets_that_cannot_be_listed_are_a_finding() {
        in_namespace(|| {
            let (_listener, destination) = listener("127.0.0.1", 50);
            let client = TcpStream::connect(destination).expect("a port");
            seccomp::refuse(Facility::SocketDiag).expect("a filter");
            let snapshot = read(destination);
            assert_eq!(snapshot.unseen.as_deref(), Some("sock_diag: EPROTONOSUPPORT"));
            let judged = judge(&snapshot, &Need { connections: 1, ..Need::default() });
            let unseen = judged.findings.iter().find(|finding| finding.id == "sockets-unseen");
            let unseen = unseen.expect("a finding");
            assert!(unseen.to_string().contains("cannot be seen (sock_diag: EPROTONOSUPPORT)"), "{unseen}");
            assert!(judged.findings.iter().all(|finding| finding.id != "nobody-listens"));
            drop(client);
        });
    }

    #[test]
    fn the_backlog_is_limited_by_somaxconn() {
        in_namespace(|| {
            let (socket, destination) = listener("127.0.0.1", 50);
            let clients = connected(destination, 2);
            let queue = read(destination).listener.expect("it listens");
            assert_eq!(queue, ListenQueue { sockets: 1, backlog: 50, waiting: 2 });
            set_sysctl("net.core.somaxconn", "20");
            socket::listen(socket.as_fd(), 50).expect("listen again");
            let snapshot = read(destination);
            assert_eq!(snapshot.somaxconn, Some(20));
            assert_eq!(snapshot.listener.map(|queue| queue.backlog), Some(20));
            drop(clients);
        });
    }

    #[test]
    fn a_queue_takes_one_more_than_its_backlog() {
        in_namespace(|| {
            set_sysctl("net.ipv4.tcp_syncookies", "0");
            let (socket, destination) = listener("127.0.0.1", 4);
            let clients = connected(destination, 5);
            assert_eq!(read(destination).listener.map(|queue| queue.waiting), Some(5));
            // The kernel drops the sixth SYN; the reply to the retransmitted SYN would arrive after 1 s.
            let sixth = TcpStream::connect_timeout(&destination, Duration::from_millis(200));
            assert_eq!(sixth.expect_err("the queue is full").kind(), io::ErrorKind::TimedOut);
            drop((socket, clients));
        });
    }

    #[test]
    fn unix_sockets_have_a_queue_and_no_ports() {
        let path = env::temp_dir().join(format!("fourtuple-preflight-{}.sock", process::id()));
        // A killed process with the same ID may have left it.
        let _ = fs::remove_file(&path);
        let server = UnixListener::bind(&path).expect("a listener");
        let client = UnixStream::connect(&path).expect("a connection");
        let snapshot = Snapshot::read_unix(Path::new(PROC), &path).expect("a snapshot");
        let queue = snapshot.listener.expect("it listens");
        assert_eq!((queue.sockets, queue.waiting), (1, 1));
        let connections = queue.backlog + 2;
        let need = Need { transport: Unix, connections, requests_per_connection: 1, ..Need::default() };
        let judged = judge(&snapshot, &need);
        assert_eq!(judged.budget, None);
        let backlog = judged.findings.iter().find(|finding| finding.id == "backlog").expect("a finding");
        assert!(backlog.message.contains("EAGAIN"), "{backlog}");
        drop((server, client));
        fs::remove_file(&path).expect("the file of the socket");
        assert_eq!(Snapshot::read_unix(Path::new(PROC), &path).expect("a snapshot").listener, None);
    }

    #[test]
    fn the_queue_belongs_to_the_socket_that_gets_connections() {
        let at = |local: &str, ipv6_only, backlog| Listener {
            local: local.parse().expect("an address"),
            ipv6_only,
            waiting: 0,
            backlog,
        };
        let to = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let all = [
            at("[::]:80", false, 1),
            at("0.0.0.0:80", false, 2),
            at("10.0.0.1:80", false, 4),
            at("10.0.0.1:80", false, 8),
            at("[::1]:81", false, 16),
            at("[::]:82", true, 32),
            at("[::]:83", false, 64),
        ];
        for (name, destination, expected) in [
            ("SO_REUSEPORT", "10.0.0.1:80", Some((2, 12))),
            ("any address of the family", "10.0.0.2:80", Some((1, 2))),
            ("any address of IPv6", "[::1]:80", Some((1, 1))),
            ("its own address", "[::1]:81", Some((1, 16))),
            ("IPV6_V6ONLY", "127.0.0.1:82", None),
            ("IPv4 at an IPv6 socket", "127.0.0.1:83", Some((1, 64))),
        ] {
            let queue = queue(&all, to(destination)).map(|queue| (queue.sockets, queue.backlog));
            assert_eq!(queue, expected, "{name}");
        }
    }

    #[test]
    fn ipv6_listeners_report_ipv6_v6only() {
        in_namespace(|| {
            // The standard library does not set IPV6_V6ONLY, so net.ipv6.bindv6only applies.
            let _both = TcpListener::bind("[::]:80").expect("a listener");
            set_sysctl("net.ipv6.bindv6only", "1");
            let _only = TcpListener::bind("[::]:81").expect("a listener");
            assert!(read(SocketAddr::from(([127, 0, 0, 1], 80))).listener.is_some());
            assert!(read(SocketAddr::from(([127, 0, 0, 1], 81))).listener.is_none());
        });
    }

    #[test]
    fn a_listening_port_is_subtracted_from_the_range() {
        in_namespace(|| {
            keep_time_wait();
            let (server, destination) = server("127.0.0.1", "20000 20007");
            set_sysctl("net.ipv4.tcp_tw_reuse", "0");
            set_sysctl("net.ipv4.ip_local_reserved_ports", "19001,19003,19005,19007,19009,20007");
            // One listener on a different address, and one outside the range.
            let _in_the_way = TcpListener::bind("127.0.0.5:20003").expect("a listener");
            let _not = TcpListener::bind("127.0.0.5:20100").expect("a listener");
            let snapshot = read(destination);
            assert_eq!((snapshot.ports(), snapshot.listened_at), (6, 1));
            assert_eq!(judge(&snapshot, &one_by_one(6)).stall, None);
            let stall = judge(&snapshot, &one_by_one(7)).stall.expect("a stall");
            let seen = (0..20).take_while(|_| churn(&server, destination)).count();
            assert_eq!(seen as u64, stall.after_connections);
        });
    }

    /// Returns whether ports in TIME_WAIT are usable for the same destination long before 60 s have passed.
    fn comes_back(server: &TcpListener, destination: SocketAddr, patience: Duration) -> bool {
        keep_time_wait();
        while churn(server, destination) {}
        let begun = Instant::now();
        while begun.elapsed() < patience {
            if churn(server, destination) {
                return true;
            }
            thread::sleep(Duration::from_millis(20));
        }
        false
    }

    #[test]
    fn reuse_applies_as_the_snapshot_predicts() {
        in_namespace(|| {
            let cases = [
                ("127.0.0.1", "0", "1", false),
                ("127.0.0.1", "1", "1", true),
                ("127.0.0.1", "2", "1", true),
                ("127.0.0.1", "2", "0", false),
                ("::1", "2", "1", true),
                // An address of this host on the loopback device, but outside 127.0.0.0/8.
                ("fd00::9", "2", "1", false),
                ("fd00::9", "1", "1", true),
            ];
            each_in_namespace(cases, |(address, reuse, timestamps, expected)| {
                netns::add_loopback_address("fd00::9".parse().expect("an address")).expect("an address more");
                set_sysctl("net.ipv4.ip_local_port_range", "20000 20003");
                set_sysctl("net.ipv4.tcp_tw_reuse", reuse);
                set_sysctl("net.ipv4.tcp_timestamps", timestamps);
                let server = TcpListener::bind((address, 80)).expect("a listener");
                let destination = server.local_addr().expect("its address");
                let name = format!("{address}, tcp_tw_reuse={reuse}, tcp_timestamps={timestamps}");
                assert_eq!(read(destination).reuse().is_some(), expected, "{name}");
                let patience = Duration::from_millis(if expected { 60_000 } else { 1_500 });
                assert_eq!(comes_back(&server, destination, patience), expected, "{name}");
            });
        });
    }

    #[test]
    fn the_reuse_delay_is_read_from_the_kernel() {
        in_namespace(|| {
            let (server, destination) = server("127.0.0.1", "20000 20003");
            let has_delay = Path::new("/proc/sys/net/ipv4/tcp_tw_reuse_delay").exists();
            assert_eq!(read(destination).tcp_tw_reuse_delay.is_some(), has_delay);
            if has_delay {
                set_sysctl("net.ipv4.tcp_tw_reuse_delay", "50000");
                assert_eq!(read(destination).reuse(), Some(Duration::from_secs(50)));
                assert!(!comes_back(&server, destination, Duration::from_millis(1_500)));
            }
        });
    }

    #[test]
    fn time_wait_is_cut_at_tcp_max_tw_buckets() {
        in_namespace(|| {
            keep_time_wait();
            let (server, destination) = server("127.0.0.1", "20000 20015");
            set_sysctl("net.ipv4.tcp_tw_reuse", "0");
            set_sysctl("net.ipv4.tcp_max_tw_buckets", "8");
            let snapshot = read(destination);
            let judged = judge(&snapshot, &one_by_one(64));
            assert_eq!((judged.stall, judged.findings[0].id), (None, "tw-buckets"));
            assert!((0..64).all(|_| churn(&server, destination)), "four times as many as there are ports");
            let after = read(destination);
            assert!((7..=9).contains(&after.time_wait), "{}", after.time_wait);
        });
    }

    struct FakeProc(PathBuf);

    impl FakeProc {
        fn with(name: &str, changes: &[(&str, &str)]) -> FakeProc {
            let fake =
                FakeProc(env::temp_dir().join(format!("fourtuple-preflight-{name}-{}", process::id())));
            let files = [
                ("sys/net/ipv4/ip_local_port_range", "1024\t65535\n"),
                ("sys/net/ipv4/ip_local_reserved_ports", "8080,9000-9002\n"),
                ("sys/net/ipv4/tcp_tw_reuse", "1\n"),
                ("sys/net/ipv4/tcp_timestamps", "2\n"),
                ("sys/net/ipv4/tcp_max_syn_backlog", "512\n"),
                ("sys/net/ipv4/tcp_max_tw_buckets", "8192\n"),
                ("sys/net/core/somaxconn", "128\n"),
                (
                    "thread-self/net/sockstat",
                    "sockets: used 9\nTCP: inuse 1 orphan 0 tw 77 alloc 1 mem 2\nUDP: inuse 0\n",
                ),
                ("thread-self/fd/0", ""),
            ];
            for (path, content) in files.iter().chain(changes) {
                let path = fake.0.join(path);
                fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
                fs::write(path, content).expect("a file");
            }
            fake
        }
    }

    impl Drop for FakeProc {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn missing_files_are_left_out() {
        let fake = FakeProc::with("old", &[]);
        let snapshot = Snapshot::read_without_ports(&fake.0).expect("a snapshot");
        assert_eq!((snapshot.ports(), snapshot.time_wait, snapshot.somaxconn), (64_508, 77, Some(128)));
        assert!(snapshot.tcp_timestamps && !snapshot.tcp_syncookies && snapshot.conntrack.is_none());
        assert_eq!(snapshot.reuse(), Some(Duration::from_secs(1)), "before Linux 6.14");
        let tracking = [
            ("sys/net/netfilter/nf_conntrack_max", "65536\n"),
            ("sys/net/netfilter/nf_conntrack_count", "12\n"),
            ("sys/net/ipv4/tcp_tw_reuse_delay", "250\n"),
        ];
        let fake = FakeProc::with("tracking", &tracking);
        let snapshot = Snapshot::read_without_ports(&fake.0).expect("a snapshot");
        assert_eq!(snapshot.conntrack, Some(Conntrack { max: 65_536, count: 12 }));
        assert_eq!(snapshot.reuse(), Some(Duration::from_millis(250)));
    }

    #[test]
    fn unreadable_files_are_named() {
        let fake = FakeProc::with("odd", &[("sys/net/core/somaxconn", "many\n")]);
        let error = Snapshot::read_without_ports(&fake.0).expect_err("no number").to_string();
        let is_named = error.starts_with("cannot make sense of") && error.ends_with("somaxconn: \"many\"");
        assert!(is_named, "{error}");
        let nowhere = Path::new("/nonexistent");
        let error = Snapshot::read_without_ports(nowhere).expect_err("no files").to_string();
        assert!(error.contains("/nonexistent/sys/net/ipv4/ip_local_port_range"), "{error}");
    }
}
