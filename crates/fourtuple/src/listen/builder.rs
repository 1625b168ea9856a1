//! The settings of a group, and how it is opened.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{self, UnixListener, UnixStream};
use std::path::PathBuf;
use std::process;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fourtuple_syscalls::socket::{self, Connect, Transport};
use fourtuple_syscalls::{Endpoint, option};

use crate::listen::ListenError;
use crate::listen::connection::Recycle;
use crate::listen::group::{self, Inner, ListenerGroup, Listeners, SocketPath, TcpOptions, bind_path};
use crate::listen::handoff::{self, HandoffQueue};
use crate::listen::policy::{self, AcceptPolicy, Family, Workers};
use crate::listen::seats::Seats;
use crate::listen::wait::Preparation;

/// A builder for a [`ListenerGroup`].
///
/// ```
/// use std::net::SocketAddr;
/// use std::time::Duration;
/// use fourtuple::listen::{AcceptPolicy, ListenerGroupBuilder, Recycle, Workers};
///
/// let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 0))
///     .workers(Workers::Threads)
///     .policy(AcceptPolicy::ROTATE)
///     .max_workers(16)
///     .backlog(1024)
///     .recycle(Recycle::Requests(1000))
///     .idle_timeout(Duration::from_secs(30))
///     .write_timeout(Duration::from_secs(1))
///     .defer_accept(Duration::from_secs(5))
///     .fast_open(256)
///     .open()?;
/// assert_eq!((group.policy(), group.stats().len()), (AcceptPolicy::ROTATE, 16));
///
/// let every_ipv6: SocketAddr = "[::]:8080".parse()?;
/// let builder = ListenerGroupBuilder::at(every_ipv6).ipv6_only(true);
/// # drop(builder);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ListenerGroupBuilder {
    pub(super) endpoint: Endpoint,
    /// Listeners that another process has opened.
    pub(super) adopted: Vec<Arc<OwnedFd>>,
    tcp: TcpOptions,
    policy: AcceptPolicy,
    seats: usize,
    backlog: u32,
    workers: Workers,
    recycle: Recycle,
    idle: Duration,
    write_timeout: Duration,
}

impl ListenerGroupBuilder {
    /// Returns a builder for a group that listens on this address or path: a `SocketAddr`, an address and a port, or a `Path`. Port 0
    /// lets the kernel choose a port.
    ///
    /// Defaults: [`AcceptPolicy::Auto`], 64 seats, an accept queue of 4096, threads as workers, connections kept until the
    /// client closes them, an idle limit of 60 s, a write limit of 2 s.
    ///
    /// ```no_run
    /// use fourtuple::listen::{Endpoint, ListenerGroupBuilder};
    ///
    /// let group = ListenerGroupBuilder::at(([0, 0, 0, 0], 8080)).open()?;
    /// let local = ListenerGroupBuilder::at(std::path::Path::new("/run/server.sock")).open()?;
    /// let of_configuration: Endpoint = "unix:/run/admin.sock".parse()?;
    /// let admin = ListenerGroupBuilder::at(of_configuration).open()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn at(endpoint: impl Into<Endpoint>) -> ListenerGroupBuilder {
        ListenerGroupBuilder {
            endpoint: endpoint.into(),
            adopted: Vec::new(),
            tcp: TcpOptions::default(),
            policy: AcceptPolicy::Auto,
            seats: 64,
            backlog: 4096,
            workers: Workers::Threads,
            recycle: Recycle::Never,
            idle: Duration::from_secs(60),
            write_timeout: Duration::from_secs(2),
        }
    }

    /// Sets the accept policy.
    #[must_use]
    pub fn policy(mut self, policy: AcceptPolicy) -> ListenerGroupBuilder {
        self.policy = policy;
        self
    }

    /// Sets the maximum number of workers at one time, each of which has a seat. At least 1; with
    /// [`AcceptPolicy::ReuseportLeastBusy`] at most 64.
    #[must_use]
    pub fn max_workers(mut self, seats: usize) -> ListenerGroupBuilder {
        self.seats = seats;
        self
    }

    /// Sets the length of each accept queue. The kernel silently limits it to net.core.somaxconn; [`ListenerGroup::backlog`]
    /// returns the effective length.
    #[must_use]
    pub fn backlog(mut self, backlog: u32) -> ListenerGroupBuilder {
        self.backlog = backlog;
        self
    }

    /// Sets whether workers are threads, threads with a runtime, or processes. Servers on tokio set [`Workers::Runtimes`], so that
    /// [`AcceptPolicy::Auto`] spreads the connections evenly.
    #[must_use]
    pub fn workers(mut self, workers: Workers) -> ListenerGroupBuilder {
        self.workers = workers;
        self
    }

    /// Sets when the server closes kept connections.
    #[must_use]
    pub fn recycle(mut self, recycle: Recycle) -> ListenerGroupBuilder {
        self.recycle = recycle;
        self
    }

    /// Sets the time after which a connection without a request, or with a partial request, is closed: 60 s by default.
    /// `Duration::MAX` means no limit: a silent connection then uses a descriptor until the client closes it.
    ///
    /// A connection is closed between this time and 1.25 times this time after its last request;
    /// [`SeatStats::idle_closed`](crate::listen::SeatStats::idle_closed) counts such connections. On a tokio runtime the limit
    /// applies only until the first bytes arrive.
    #[must_use]
    pub fn idle_timeout(mut self, limit: Duration) -> ListenerGroupBuilder {
        self.idle = limit;
        self
    }

    /// Sets how long the writes of a worker may wait for space in the socket's send buffer, in total between two calls of
    /// [`Acceptor::next`](crate::listen::Acceptor::next): 2 s by default.
    ///
    /// The worker serves no other connection meanwhile, so one client that does not read delays other clients by up to this
    /// time. A response larger than the send buffer needs as long as the client takes to read it.
    ///
    /// The limit has no effect on a tokio runtime, whose writes do not block the worker.
    #[must_use]
    pub fn write_timeout(mut self, limit: Duration) -> ListenerGroupBuilder {
        self.write_timeout = limit;
        self
    }

    /// Sets TCP_DEFER_ACCEPT: the kernel queues a connection when its first bytes have arrived, so that a client that connects first and
    /// sends later wakes no worker in vain. After `limit` the kernel queues the connection without bytes; the kernel rounds it up to
    /// 1, 3, 7, 15, 31, 63 s and so on, the times of the retransmits of a SYN-ACK (`secs_to_retrans`). At least 1 s; TCP only.
    #[must_use]
    pub fn defer_accept(mut self, limit: Duration) -> ListenerGroupBuilder {
        let seconds = limit.as_millis().div_ceil(1000);
        self.tcp.defer_accept = Some(u16::try_from(seconds).unwrap_or(u16::MAX));
        self
    }

    /// Sets TCP_FASTOPEN: the SYN of a client that has connected before may carry the request. The kernel accepts such SYNs only if bit
    /// 1 of net.ipv4.tcp_fastopen is set, and for at most `queue` connections whose handshake is in progress. TCP only. A request can
    /// arrive twice (RFC 7413, section 6.1).
    #[must_use]
    pub fn fast_open(mut self, queue: u16) -> ListenerGroupBuilder {
        self.tcp.fast_open = Some(queue);
        self
    }

    /// Sets IPV6_V6ONLY: whether a group at `[::]` leaves IPv4 connections to other listeners. The default is the sysctl
    /// net.ipv6.bindv6only, usually false. IPv6 only.
    #[must_use]
    pub fn ipv6_only(mut self, on: bool) -> ListenerGroupBuilder {
        self.tcp.ipv6_only = Some(on);
        self
    }

    fn check(&self) -> Result<(), ListenError> {
        let family = Family::of(&self.endpoint);
        let refuse =
            |setting, value: String, accepted| Err(ListenError::Setting { setting, value, accepted });
        if self.seats == 0 {
            return refuse("max_workers", "0".to_owned(), "at least 1");
        }
        if self.idle.is_zero() {
            return refuse("idle_timeout", "0s".to_owned(), "more than 0");
        }
        if self.tcp != TcpOptions::default() && !self.adopted.is_empty() {
            return refuse(
                "from_listeners",
                "an option of TCP".to_owned(),
                "listeners with the options already set",
            );
        }
        if self.tcp.defer_accept == Some(0) {
            return refuse("defer_accept", "0s".to_owned(), "at least 1s");
        }
        if self.tcp.ipv6_only.is_some() && family != Family::Tcp6 {
            return refuse("ipv6_only", self.endpoint.to_string(), "an IPv6 address");
        }
        if self.tcp != TcpOptions::default() && family == Family::Unix {
            return refuse("defer_accept or fast_open", self.endpoint.to_string(), "a TCP address");
        }
        self.recycle.check()
    }

    /// Opens the listeners and the shared state of the group, in the network namespace of the calling thread.
    ///
    /// # Errors
    ///
    /// A setting is out of range; the policy is impossible for the address, or this kernel lacks or forbids it; a system call
    /// failed. The builder never falls back to another policy.
    pub fn open(self) -> Result<ListenerGroup, ListenError> {
        self.check()?;
        let family = Family::of(&self.endpoint);
        let choice = policy::choose(self.policy, family, self.workers);
        choice.policy.check(family, self.workers)?;
        let failed = |call| ListenError::call(call, &self.endpoint);
        let seats = Arc::new(Seats::new(self.seats).map_err(failed("mmap()"))?);
        let handoff = HandoffQueue::new(&seats).map_err(failed("socketpair()"))?;
        let backlog = i32::try_from(self.backlog).unwrap_or(i32::MAX);
        // Further listeners of the group get the options of an adopted one.
        let (tcp, effective) = match self.adopted.first() {
            None => (self.tcp, Some(backlog)),
            Some(_) if family == Family::Unix => (self.tcp, None),
            Some(listener) => {
                let effective = option::backlog(listener.as_fd()).map_err(failed("getsockopt(TCP_INFO)"))?;
                (TcpOptions::of(listener, &self.endpoint)?, i32::try_from(effective).ok())
            }
        };
        let (listeners, endpoint, path) = self.open_listeners(choice.policy, backlog, &handoff)?;
        if self.recycle == Recycle::Measured {
            let fresh = measure_fresh(family).map_err(failed("a connection to measure its cost"))?;
            seats.comparison().set_fresh(fresh);
        }
        let preparation =
            Preparation { listeners: &listeners, seats: self.seats, idle: self.idle, endpoint: &endpoint };
        let shared = choice.policy.prepare(&preparation)?;
        let inner = Inner {
            endpoint,
            family,
            choice,
            backlog: effective,
            tcp,
            workers: self.workers,
            recycle: self.recycle,
            seats,
            handoff,
            listeners,
            shared,
            idle: self.idle,
            write_timeout: self.write_timeout,
            path: Mutex::new(path),
            wakers: Mutex::default(),
            known_listeners: Mutex::default(),
            is_filter_refused: AtomicBool::new(false),
        };
        let group = ListenerGroup(Arc::new(inner));
        if let Listeners::Shared(listener) = &group.0.listeners {
            group.register_listener(listener)?;
        }
        Ok(group)
    }

    /// Opens the shared listener, or reserves the address for listeners per worker and puts the first one into `handoff`.
    fn open_listeners(
        &self,
        policy: AcceptPolicy,
        backlog: i32,
        handoff: &HandoffQueue,
    ) -> Result<(Listeners, Endpoint, Option<SocketPath>), ListenError> {
        let failed = |call| ListenError::call(call, &self.endpoint);
        let nonblocking = policy != AcceptPolicy::Blocking;
        if !self.adopted.is_empty() {
            let listeners = self.adopt(policy, nonblocking, handoff)?;
            return Ok((listeners, self.endpoint.clone(), None));
        }
        if let Endpoint::Unix(path) = &self.endpoint {
            let (listener, own) = bind_path(path, nonblocking)?;
            socket::listen(listener.as_fd(), backlog).map_err(failed("listen()"))?;
            return Ok((Listeners::Shared(Arc::new(listener)), self.endpoint.clone(), Some(own)));
        }
        // With SO_REUSEPORT from the start, another server of the same user could silently take a share of the connections.
        // So the first bind(2) is exclusive.
        let first = group::bind(&self.endpoint, self.tcp, false, nonblocking)?;
        if policy.has_listener_each() {
            let endpoint = group::local_endpoint(&first, &self.endpoint)?;
            let listener = group::reserve(&first, &endpoint, self.tcp, backlog)?;
            handoff.offer_listener(listener.as_fd(), handoff::deadline()).map_err(failed("sendmsg()"))?;
            return Ok((Listeners::PerWorker { _holder: Some(first) }, endpoint, None));
        }
        socket::listen(first.as_fd(), backlog).map_err(failed("listen()"))?;
        let endpoint = group::local_endpoint(&first, &self.endpoint)?;
        Ok((Listeners::Shared(Arc::new(first)), endpoint, None))
    }

    /// Returns a builder for a group of listeners that another process or another library has opened, with the defaults of
    /// [`at`](ListenerGroupBuilder::at). The accept queues, the backlog and the options of the listeners stay as they are; the group
    /// sets or clears O_NONBLOCK. A path of a unix socket is not removed at the end.
    ///
    /// All policies take one listener. [`AcceptPolicy::Reuseport`] takes any number of TCP listeners with SO_REUSEPORT, one for each
    /// worker, and opens more for more workers: with TCP_DEFER_ACCEPT, TCP_FASTOPEN, IPV6_V6ONLY and the backlog of the first one, and without
    /// its other options.
    ///
    /// ```
    /// use fourtuple::listen::ListenerGroupBuilder;
    /// use std::net::TcpListener;
    ///
    /// let listener = TcpListener::bind("127.0.0.1:0")?;
    /// let address = listener.local_addr()?;
    /// let group = ListenerGroupBuilder::from_listeners([listener])?.open()?;
    /// assert_eq!(group.endpoint().inet(), Some(address));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ListenError::Adopted`]: there is no descriptor, a descriptor is not a listening socket, or the listeners have different addresses.
    pub fn from_listeners<L: Into<OwnedFd>>(
        listeners: impl IntoIterator<Item = L>,
    ) -> Result<ListenerGroupBuilder, ListenError> {
        let refused = |why, error| ListenError::Adopted { why, error };
        let mut endpoint = None;
        let mut adopted = Vec::new();
        for listener in listeners {
            let listener = listener.into();
            let of_socket = |error| refused("a descriptor is not a socket", Some(error));
            if !option::is_listening(listener.as_fd()).map_err(of_socket)? {
                return Err(refused("a socket does not listen", None));
            }
            let address =
                address(&listener).map_err(|error| refused("a socket has no address", Some(error)))?;
            if *endpoint.get_or_insert_with(|| address.clone()) != address {
                return Err(refused("the listeners have different addresses", None));
            }
            adopted.push(Arc::new(listener));
        }
        let endpoint = endpoint.ok_or(refused("there is none", None))?;
        let mut builder = ListenerGroupBuilder::at(endpoint);
        builder.adopted = adopted;
        Ok(builder)
    }

    /// Returns a builder for the listeners of socket activation (LISTEN_FDS, sd_listen_fds(3)), or `None` if the process was started
    /// without them. All of them belong to one group. The first call takes the descriptors; later calls return `None`.
    ///
    /// # Errors
    ///
    /// The errors of [`from_listeners`](ListenerGroupBuilder::from_listeners); [`ListenError::Adopted`] if LISTEN_FDS is not a number, or
    /// announces a descriptor that is not open.
    ///
    /// # Examples
    ///
    /// ```
    /// use fourtuple::listen::ListenerGroupBuilder;
    ///
    /// let group = match ListenerGroupBuilder::from_environment()? {
    ///     Some(activated) => activated.open()?,
    ///     None => ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).open()?,
    /// };
    /// # drop(group);
    /// # Ok::<(), fourtuple::listen::ListenError>(())
    /// ```
    pub fn from_environment() -> Result<Option<ListenerGroupBuilder>, ListenError> {
        let refused = |error| ListenError::Adopted { why: "LISTEN_FDS is wrong", error: Some(error) };
        let listeners = socket::take_listeners().map_err(refused)?;
        if listeners.is_empty() {
            Ok(None)
        } else {
            ListenerGroupBuilder::from_listeners(listeners).map(Some)
        }
    }

    /// Returns the adopted listeners in the form of a policy.
    pub(super) fn adopt(
        &self,
        policy: AcceptPolicy,
        nonblocking: bool,
        handoff: &HandoffQueue,
    ) -> Result<Listeners, ListenError> {
        let failed = |call| ListenError::call(call, &self.endpoint);
        let refused = |why| Err(ListenError::Adopted { why, error: None });
        for listener in &self.adopted {
            socket::set_nonblocking(listener.as_fd(), nonblocking).map_err(failed("ioctl(FIONBIO)"))?;
        }
        if !policy.has_listener_each() {
            return match self.adopted.as_slice() {
                [only] => Ok(Listeners::Shared(Arc::clone(only))),
                _ => refused("the policy takes one listener; reuseport takes several"),
            };
        }
        if policy != AcceptPolicy::Reuseport {
            return refused("the policy opens its listeners itself; reuseport takes some");
        }
        for listener in &self.adopted {
            let has_option =
                option::has_reuse_port(listener.as_fd()).map_err(failed("getsockopt(SO_REUSEPORT)"))?;
            if !has_option {
                return refused("the policy takes listeners with SO_REUSEPORT");
            }
            // One worker accepts from all of them until others join.
            let until = handoff::deadline();
            let sent = handoff.offer_listener(listener.as_fd(), until);
            sent.and_then(|_| handoff.put_listener(listener.as_fd(), until)).map_err(failed("sendmsg()"))?;
        }
        Ok(Listeners::PerWorker { _holder: None })
    }
}

/// Returns the address of a listener.
fn address(listener: &OwnedFd) -> io::Result<Endpoint> {
    match TcpListener::from(listener.try_clone()?).local_addr() {
        Ok(address) => Ok(Endpoint::Inet(address)),
        Err(_not_inet) => {
            let address = UnixListener::from(listener.try_clone()?).local_addr()?;
            // An abstract or unnamed address has no path.
            Ok(Endpoint::Unix(address.as_pathname().map_or_else(PathBuf::new, PathBuf::from)))
        }
    }
}

/// The number of measured connections.
const CONNECTIONS: usize = 64;
/// The timeout of a connection over loopback, which normally completes at once.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Measures connect(2), accept4(2) and two close(2) with a separate listener on 127.0.0.1, ::1 or an abstract address, in the
/// network namespace of the calling thread. Returns the median of 64 connections. One thread suffices, because a connection is
/// established once it is in the accept queue.
///
/// Over TCP the client closes with RST, so that no TIME_WAIT socket remains; FIN would cost slightly more.
fn measure_fresh(family: Family) -> io::Result<Duration> {
    let mut times = Vec::with_capacity(CONNECTIONS);
    match family {
        Family::Unix => {
            let name = format!("fourtuple-fresh-{}-{:016x}", process::id(), fastrand::u64(..));
            let address = net::SocketAddr::from_abstract_name(name)?;
            let listener = UnixListener::bind_addr(&address)?;
            for _ in 0..CONNECTIONS {
                times.push(time(listener.as_fd(), || UnixStream::connect_addr(&address).map(OwnedFd::from))?);
            }
        }
        Family::Tcp4 | Family::Tcp6 => {
            let host: IpAddr =
                if family == Family::Tcp4 { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
            let listener = TcpListener::bind(SocketAddr::new(host, 0))?;
            let address = listener.local_addr()?;
            for _ in 0..CONNECTIONS {
                times.push(time(listener.as_fd(), || connect(address))?);
            }
        }
    }
    times.sort_unstable();
    Ok(times[CONNECTIONS / 2])
}

fn time(listener: BorrowedFd<'_>, connect: impl FnOnce() -> io::Result<OwnedFd>) -> io::Result<Duration> {
    let begun = Instant::now();
    let client = connect()?;
    let server = loop {
        match socket::accept(listener) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            accepted => break accepted?,
        }
    };
    drop(client);
    drop(server);
    Ok(begun.elapsed())
}

fn connect(address: SocketAddr) -> io::Result<OwnedFd> {
    let socket = socket::open(Transport::Tcp, address, true)?;
    option::set_reset_on_close(socket.as_fd())?;
    if socket::connect(socket.as_fd(), address)? == Connect::Pending
        && !socket::wait_writable(socket.as_fd(), Some(TIMEOUT))?
    {
        return Err(io::ErrorKind::TimedOut.into());
    }
    option::take_error(socket.as_fd())?.map_or(Ok(socket), Err)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use fourtuple_syscalls::signals::IntervalTimer;
    use fourtuple_testing::accept_queue::full_listener;
    use fourtuple_testing::in_namespace;

    use super::*;

    /// A busy kernel handles the last ACK of a handshake later, so that connect() and accept() wait.
    #[test]
    fn signals_end_no_wait_of_a_measurement() {
        in_namespace(|| {
            let _storm = IntervalTimer::for_this_thread(Duration::from_millis(1)).unwrap();
            let before = IntervalTimer::signals();
            let (_listener, full, _queued) = full_listener("127.0.0.1");
            assert_eq!(connect(full).unwrap_err().kind(), io::ErrorKind::TimedOut);
            assert!(IntervalTimer::signals() > before);
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let (address, before) = (listener.local_addr().unwrap(), IntervalTimer::signals());
            let client = thread::spawn(move || {
                while IntervalTimer::signals() < before + 20 {
                    thread::sleep(Duration::from_millis(1));
                }
                connect(address)
            });
            time(listener.as_fd(), || Ok(listener.try_clone()?.into())).unwrap();
            client.join().unwrap().unwrap();
        });
    }

    #[test]
    fn every_family_has_a_cost() {
        in_namespace(|| {
            for family in Family::ALL {
                let cost = measure_fresh(family).unwrap();
                assert!(
                    cost > Duration::from_nanos(500) && cost < Duration::from_secs(1),
                    "{family}: {cost:?}"
                );
            }
        });
    }
}
