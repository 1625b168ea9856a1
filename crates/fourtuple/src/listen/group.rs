//! A group of workers that accept from one address: its shared state, and its listening sockets, one for all workers or one per worker with
//! SO_REUSEPORT.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{self, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use fourtuple_syscalls::Endpoint;
use fourtuple_syscalls::epoll::EventFd;
use fourtuple_syscalls::fork::{self, End, Process};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};

use crate::listen::ListenError;
use crate::listen::connection::{BreakEven, Recycle};
use crate::listen::handoff::HandoffQueue;
use crate::listen::policy::{AcceptPolicy, Family, PolicyChoice, Workers};
use crate::listen::seats::{Phase, SeatStats, Seats};
use crate::listen::wait::SharedState;

/// The state that all clones of a [`ListenerGroup`] share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) endpoint: Endpoint,
    pub(crate) family: Family,
    pub(crate) choice: PolicyChoice,
    /// `None` for a unix listener of another process, whose backlog cannot be read.
    pub(crate) backlog: Option<i32>,
    /// The options of listeners that the group opens.
    pub(crate) tcp: TcpOptions,
    pub(crate) workers: Workers,
    pub(crate) recycle: Recycle,
    pub(crate) seats: Arc<Seats>,
    pub(crate) handoff: HandoffQueue,
    pub(crate) listeners: Listeners,
    pub(crate) shared: SharedState,
    pub(crate) idle: Duration,
    pub(crate) write_timeout: Duration,
    /// The path of a unix socket, removed when the group is drained or closed.
    pub(crate) path: Mutex<Option<SocketPath>>,
    /// Wakers of the acceptors and dispatchers of this process.
    pub(crate) wakers: Mutex<Vec<Weak<EventFd>>>,
    /// Listeners that this process has opened or received.
    pub(crate) known_listeners: Mutex<Vec<Weak<OwnedFd>>>,
    /// Whether the kernel goes on to queue connections in a drain, because it refused the filter that drops SYNs.
    pub(crate) is_filter_refused: AtomicBool,
}

/// A group of workers that accept from one address. Clones refer to the same group; dropping the last clone closes it.
///
/// ```
/// use fourtuple::listen::{AcceptPolicy, Family, ListenerGroupBuilder};
///
/// let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).max_workers(4).open()?;
/// println!("{}, {}", group.endpoint(), group.choice()); // the port and the policy of `AcceptPolicy::Auto`
/// assert_eq!((group.family(), group.policy()), (Family::Tcp4, AcceptPolicy::SharedOneshot));
/// assert!(group.backlog() <= Some(4096)); // at most net.core.somaxconn
///
/// let worker = group.join()?;
/// for (seat, stats) in group.stats().iter().enumerate() {
///     println!("worker {seat}: {} connections, {} requests", stats.accepts, stats.requests);
/// }
/// # drop(worker);
/// # Ok::<(), fourtuple::listen::ListenError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ListenerGroup(pub(crate) Arc<Inner>);

impl ListenerGroup {
    /// Returns the address on which the group listens, with the port that the kernel chose.
    pub fn endpoint(&self) -> &Endpoint {
        &self.0.endpoint
    }

    /// Returns the address family of the group.
    pub fn family(&self) -> Family {
        self.0.family
    }

    /// Returns the accept policy, which is never `Auto`.
    pub fn policy(&self) -> AcceptPolicy {
        self.0.choice.policy
    }

    /// Returns the length of each accept queue: the smaller of [`ListenerGroupBuilder::backlog`] and net.core.somaxconn of this
    /// network namespace. A TCP listener of another process has the length that its listen(2) set. Returns `None` for a unix listener of
    /// another process, and if the sysctl cannot be read.
    ///
    /// [`ListenerGroupBuilder::backlog`]: crate::listen::ListenerGroupBuilder::backlog
    pub fn backlog(&self) -> Option<u32> {
        let limit = fs::read_to_string("/proc/sys/net/core/somaxconn").ok()?.trim().parse::<u32>().ok()?;
        u32::try_from(self.0.backlog?).ok().map(|requested| requested.min(limit))
    }

    /// Returns the accept policy and the reason for it.
    pub fn choice(&self) -> PolicyChoice {
        self.0.choice
    }

    /// Returns descriptors of the listeners that this process has opened or received, for a new process that takes the address over
    /// ([`ListenerGroupBuilder::from_listeners`]). The descriptors share their accept queues with the group.
    /// Example: [`ListenerGroup::hand_over`].
    ///
    /// When the new process accepts, this one calls [`hand_over`](ListenerGroup::hand_over). A [drain](ListenerGroup::drain) would drop SYNs for
    /// the new process too.
    ///
    /// # Errors
    ///
    /// [`ListenError::Call`]: fcntl(F_DUPFD_CLOEXEC) fails with EMFILE.
    ///
    /// [`ListenerGroupBuilder::from_listeners`]: crate::listen::ListenerGroupBuilder::from_listeners
    pub fn listeners(&self) -> Result<Vec<OwnedFd>, ListenError> {
        let listeners = self.known_listeners();
        let clones = listeners.iter().map(|listener| listener.try_clone()).collect::<io::Result<_>>();
        clones.map_err(self.failed("fcntl(F_DUPFD_CLOEXEC)"))
    }

    /// Frees the seat of a worker that died without leaving. Call this when the death is certain, such as in the parent
    /// process after waitpid(2).
    ///
    /// Example: [`ListenerGroup::fork`].
    pub fn worker_died(&self, seat: usize) {
        if seat < self.0.seats.count() {
            self.0.seats.worker_died(seat);
        }
    }

    /// Notes the death of the process that ran the [dispatcher](ListenerGroup::dispatcher), whose connections were closed with it. Call this
    /// when the death is certain, such as in the parent process after waitpid(2), and before another process runs the next
    /// dispatcher. New connections wait in the accept queue meanwhile.
    ///
    /// Example: [`ListenerGroup::fork`].
    pub fn dispatcher_died(&self) {
        self.0.seats.dispatcher_died();
    }

    /// Returns the counters of every seat, summed over all workers that held the seat.
    pub fn stats(&self) -> Vec<SeatStats> {
        self.0.seats.stats()
    }

    /// Returns the measured costs of fresh and of kept connections; `None` unless the group uses [`Recycle::Measured`].
    ///
    /// Example: [`Recycle`].
    pub fn break_even(&self) -> Option<BreakEven> {
        self.is_measured().then(|| self.0.seats.comparison().report())
    }

    pub(crate) fn is_measured(&self) -> bool {
        self.0.recycle == Recycle::Measured
    }

    /// Returns a listener for a worker that joins: the shared one, one that a worker left, or a new one.
    pub(crate) fn listener(&self) -> Result<Arc<OwnedFd>, ListenError> {
        if let Listeners::Shared(listener) = &self.0.listeners {
            return Ok(Arc::clone(listener));
        }
        let listener = match self.0.handoff.take_listener().map_err(self.failed("recvmsg()"))? {
            Some(listener) => listener,
            None => {
                let backlog = self.0.backlog.unwrap_or(i32::MAX);
                open_reuseport(&self.0.endpoint, self.0.tcp, backlog)?
            }
        };
        let listener = Arc::new(listener);
        self.register_listener(&listener)?;
        Ok(listener)
    }

    /// Puts the listener of a worker that leaves into the handoff queue, together with the connections in its accept queue.
    ///
    /// A worker accepts from it until the next worker that joins owns it. Where the kernel moves the accept queue to another listener
    /// (tcp_migrate_req), the listener of a process is closed instead; the kernel then resets some connections whose handshake is in
    /// progress.
    pub(crate) fn hand_off_listener(
        &self,
        seat: usize,
        listener: &OwnedFd,
        until: Instant,
    ) -> Result<(), ListenError> {
        let others = self.0.seats.has_others(seat);
        if self.0.workers == Workers::Processes && others && kernel_migrates_queues() {
            return Ok(());
        }
        let handoff = &self.0.handoff;
        // Offered first: a worker that joins between the two calls takes this listener instead of opening one.
        let sent = handoff.offer_listener(listener.as_fd(), until);
        sent.and_then(|_| handoff.put_listener(listener.as_fd(), until))
            .map(drop)
            .map_err(self.failed("sendmsg()"))
    }

    /// Registers a waker, which a drain signals at its end.
    pub(crate) fn register_waker(&self, waker: &Arc<EventFd>) {
        let mut wakers = self.0.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        wakers.retain(|waker| waker.strong_count() > 0);
        wakers.push(Arc::downgrade(waker));
    }

    /// Registers a listener, so that a drain stops it. If a drain is in progress, the listener is stopped now.
    pub(crate) fn register_listener(&self, listener: &Arc<OwnedFd>) -> Result<(), ListenError> {
        {
            let mut known = self.0.known_listeners.lock().unwrap_or_else(PoisonError::into_inner);
            known.retain(|listener| listener.strong_count() > 0);
            known.push(Arc::downgrade(listener));
        }
        if self.0.seats.phase() < Phase::Draining { Ok(()) } else { self.stop_queueing(listener) }
    }

    /// Makes the kernel drop every further SYN for a TCP listener, if this process may do so. A unix listener needs nothing: its path is
    /// removed.
    pub(crate) fn stop_queueing(&self, listener: &OwnedFd) -> Result<(), ListenError> {
        if self.family() == Family::Unix {
            return Ok(());
        }
        match option::drop_syns(listener.as_fd()) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                self.0.is_filter_refused.store(true, Ordering::Relaxed);
                Ok(())
            }
            dropped => dropped.map_err(self.failed("setsockopt(SO_ATTACH_FILTER)")),
        }
    }

    /// Returns a function that makes a [`ListenError::Call`] of a failed system call.
    pub(crate) fn failed(&self, call: &'static str) -> impl Fn(io::Error) -> ListenError {
        ListenError::call(call, &self.0.endpoint)
    }
}

/// A worker process of a group. Dropping it neither ends the process nor waits for it.
///
/// Example: [`ListenerGroup::fork`].
#[derive(Debug)]
pub struct WorkerProcess(Process);

impl ListenerGroup {
    /// Runs `work` in a child process, which shares the listeners, the seats and the handoff queue of this group, and uses its result as
    /// exit code (101 after a panic). For a group with [`Workers::Processes`](crate::listen::Workers::Processes).
    ///
    /// The kernel kills the child when the thread that called this function ends. After the death of a worker that did not leave, call
    /// [`worker_died`](ListenerGroup::worker_died) with its seat, and after the death of a dispatcher
    /// [`dispatcher_died`](ListenerGroup::dispatcher_died). `examples/prefork.rs` is a supervisor.
    ///
    /// # Errors
    ///
    /// [`ListenError::Call`]: this process has several threads, whose locks could stay locked in the child; or fork(2) failed.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use fourtuple::listen::{ListenError, ListenerGroup, ListenerGroupBuilder, Workers};
    ///
    /// fn serve(group: &ListenerGroup) -> Result<(), ListenError> {
    ///     let mut acceptor = group.join()?;
    ///     while let Some(connection) = acceptor.next(None)? {
    ///         drop(connection); // serve it
    ///     }
    ///     Ok(())
    /// }
    ///
    /// let group = ListenerGroupBuilder::at(([0, 0, 0, 0], 8080)).workers(Workers::Processes).open()?;
    /// let worker = group.fork(|group| i32::from(serve(group).is_err()))?;
    /// println!("process {} serves", worker.id());
    /// worker.kill()?;
    /// println!("{}", worker.wait()?); // signal: 9 (SIGKILL)
    /// group.worker_died(0); // the first worker had seat 0
    /// group.dispatcher_died(); // only if the process ran the dispatcher
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fork(&self, work: impl FnOnce(&ListenerGroup) -> i32) -> Result<WorkerProcess, ListenError> {
        fork::run_in_child(|| work(self)).map(WorkerProcess).map_err(self.failed("fork()"))
    }
}

impl WorkerProcess {
    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Sends SIGKILL.
    ///
    /// # Errors
    ///
    /// The errors of kill(2).
    pub fn kill(&self) -> io::Result<()> {
        self.0.kill()
    }

    /// Waits until the process has ended.
    ///
    /// # Errors
    ///
    /// The errors of waitpid(2), such as ECHILD if another function of this process has reaped the child.
    pub fn wait(self) -> io::Result<ExitStatus> {
        // The form of waitpid(2): the exit code in the second byte, the signal in the first.
        self.0.wait().map(|end| match end {
            End::Exited(code) => ExitStatus::from_raw((code & 0xff) << 8),
            End::Killed(signal) => ExitStatus::from_raw(signal),
        })
    }
}

/// The listening sockets of a group.
#[derive(Debug)]
pub(crate) enum Listeners {
    /// One listener for all workers.
    Shared(Arc<OwnedFd>),
    /// One listener per worker, opened when the worker joins.
    PerWorker {
        /// A bound socket that never listens. It keeps the port while no worker listens. `None` for listeners of another process.
        _holder: Option<OwnedFd>,
    },
}

/// Options of TCP listeners; `None` leaves the kernel's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TcpOptions {
    /// TCP_DEFER_ACCEPT, in seconds.
    pub(crate) defer_accept: Option<u16>,
    /// TCP_FASTOPEN: the length of its queue.
    pub(crate) fast_open: Option<u16>,
    /// IPV6_V6ONLY.
    pub(crate) ipv6_only: Option<bool>,
}

impl TcpOptions {
    /// Reads the options of a TCP listener that another process has opened.
    pub(crate) fn of(listener: &OwnedFd, endpoint: &Endpoint) -> Result<TcpOptions, ListenError> {
        let failed = ListenError::call("getsockopt(TCP_DEFER_ACCEPT, TCP_FASTOPEN or IPV6_V6ONLY)", endpoint);
        let set = |value: u32| (value > 0).then(|| u16::try_from(value).unwrap_or(u16::MAX));
        let ipv6_only = endpoint
            .inet()
            .is_some_and(|address| address.is_ipv6())
            .then(|| option::is_ipv6_only(listener.as_fd()))
            .transpose();
        Ok(TcpOptions {
            defer_accept: set(option::defer_accept(listener.as_fd()).map_err(&failed)?),
            fast_open: set(option::fast_open(listener.as_fd()).map_err(&failed)?),
            ipv6_only: ipv6_only.map_err(failed)?,
        })
    }

    /// Sets the options on a socket that is not bound.
    fn set(self, socket: &OwnedFd, endpoint: &Endpoint) -> Result<(), ListenError> {
        let failed = |name| ListenError::call(name, endpoint);
        let done = |name, answer| match answer {
            Answer::Done => Ok(()),
            Answer::Absent => Err(failed(name)(io::ErrorKind::Unsupported.into())),
        };
        const DEFER: &str = "setsockopt(TCP_DEFER_ACCEPT)";
        const FAST: &str = "setsockopt(TCP_FASTOPEN)";
        if let Some(seconds) = self.defer_accept {
            let set = option::set_defer_accept(socket.as_fd(), seconds.into());
            done(DEFER, set.map_err(failed(DEFER))?)?;
        }
        if let Some(queue) = self.fast_open {
            done(FAST, option::set_fast_open(socket.as_fd(), queue.into()).map_err(failed(FAST))?)?;
        }
        match self.ipv6_only {
            Some(on) => option::set_ipv6_only(socket.as_fd(), on).map_err(failed("setsockopt(IPV6_V6ONLY)")),
            None => Ok(()),
        }
    }
}

/// Reserves the address of `holder`, which is bound and never listens, for SO_REUSEPORT listeners of this group. Returns the
/// first listener, which queues connections until a worker joins.
///
/// Two sockets with SO_REUSEADDR may share an address as long as neither listens (`inet_csk_bind_conflict`), so the holder
/// clears that option once it is bound. The kernel caches per port whether all sockets set the option (`fastreuse`) and would
/// not check the holder; listen(2) on another socket invalidates this cache.
pub(crate) fn reserve(
    holder: &OwnedFd,
    endpoint: &Endpoint,
    options: TcpOptions,
    backlog: i32,
) -> Result<OwnedFd, ListenError> {
    option::set_reuse_address(holder.as_fd(), false)
        .map_err(ListenError::call("setsockopt(SO_REUSEADDR)", endpoint))?;
    set_reuse_port(holder, endpoint)?;
    open_reuseport(endpoint, options, backlog)
}

/// Opens one more listener on an address whose sockets have SO_REUSEPORT.
pub(crate) fn open_reuseport(
    endpoint: &Endpoint,
    options: TcpOptions,
    backlog: i32,
) -> Result<OwnedFd, ListenError> {
    let listener = bind(endpoint, options, true, true)?;
    socket::listen(listener.as_fd(), backlog).map_err(ListenError::call("listen()", endpoint))?;
    Ok(listener)
}

fn set_reuse_port(socket: &OwnedFd, endpoint: &Endpoint) -> Result<(), ListenError> {
    let failed = ListenError::call("setsockopt(SO_REUSEPORT)", endpoint);
    match option::set_reuse_port(socket.as_fd()).map_err(&failed)? {
        Answer::Done => Ok(()),
        Answer::Absent => Err(failed(io::ErrorKind::Unsupported.into())),
    }
}

/// Opens and binds a TCP socket that does not listen yet.
pub(crate) fn bind(
    endpoint: &Endpoint,
    options: TcpOptions,
    reuse_port: bool,
    nonblocking: bool,
) -> Result<OwnedFd, ListenError> {
    let failed = |name| ListenError::call(name, endpoint);
    let Some(address) = endpoint.inet() else {
        return Err(failed("bind()")(io::ErrorKind::InvalidInput.into()));
    };
    let socket = socket::open(Transport::Tcp, address, nonblocking).map_err(failed("socket()"))?;
    // Without SO_REUSEADDR, TIME_WAIT sockets of an earlier server make bind(2) fail.
    option::set_reuse_address(socket.as_fd(), true).map_err(failed("setsockopt(SO_REUSEADDR)"))?;
    // Accepted sockets inherit TCP_NODELAY. Without it, pipelined responses wait for the client's delayed ACK.
    option::set_no_delay(socket.as_fd()).map_err(failed("setsockopt(TCP_NODELAY)"))?;
    options.set(&socket, endpoint)?;
    if reuse_port {
        set_reuse_port(&socket, endpoint)?;
    }
    socket::bind(socket.as_fd(), address).map_err(failed("bind()"))?;
    Ok(socket)
}

/// Returns the address of a socket, with the port that the kernel chose.
pub(crate) fn local_endpoint(socket: &OwnedFd, endpoint: &Endpoint) -> Result<Endpoint, ListenError> {
    let address = socket::local_address(socket.as_fd());
    Ok(address.map_err(ListenError::call("getsockname()", endpoint))?.into())
}

/// Returns whether the kernel moves the queue of a closed SO_REUSEPORT listener to the remaining ones of its group
/// (net.ipv4.tcp_migrate_req, Linux 5.14).
pub(crate) fn kernel_migrates_queues() -> bool {
    fs::read_to_string("/proc/sys/net/ipv4/tcp_migrate_req").is_ok_and(|value| value.trim() == "1")
}

/// Binds a unix socket to a path. Returns the socket, which does not listen yet, and a guard that removes the path when it is
/// dropped. An existing socket on which no process listens is removed first.
///
/// # Errors
///
/// [`ListenError::PathInUse`] or [`ListenError::NotASocket`] if the path is taken; [`ListenError::Call`] if a system call failed.
///
/// # Examples
///
/// ```
/// let path = std::env::temp_dir().join(format!("fourtuple-{}.sock", std::process::id()));
/// let (socket, bound) = fourtuple::listen::bind_path(&path, true)?;
/// assert!(path.exists());
/// drop((socket, bound));
/// assert!(!path.exists());
/// # Ok::<(), fourtuple::listen::ListenError>(())
/// ```
pub fn bind_path(path: &Path, nonblocking: bool) -> Result<(OwnedFd, SocketPath), ListenError> {
    remove_dead(path)?;
    let endpoint = Endpoint::Unix(path.to_owned());
    let failed = |call| ListenError::call(call, &endpoint);
    let socket = socket::open_stream(&endpoint, nonblocking).map_err(failed("socket()"))?;
    socket::bind_endpoint(socket.as_fd(), &endpoint).map_err(failed("bind()"))?;
    Ok((socket, SocketPath::of(path)))
}

/// Removes the socket file of a server that has ended.
fn remove_dead(path: &Path) -> Result<(), ListenError> {
    let endpoint = Endpoint::Unix(path.to_owned());
    match fs::symlink_metadata(path) {
        // connect(2) to a regular file fails with ECONNREFUSED too; such a file must not be removed.
        Ok(found) if !found.file_type().is_socket() => {
            return Err(ListenError::NotASocket { path: path.to_owned() });
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(ListenError::call("stat()", &endpoint)(error)),
    }
    let failed = |call| ListenError::call(call, &endpoint);
    let caller = socket::open_stream(&endpoint, true).map_err(failed("socket()"))?;
    match socket::connect_endpoint(caller.as_fd(), &endpoint) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed("unlink()"))
        }
        // EAGAIN means a full accept queue, so a process listens.
        Ok(_) => Err(ListenError::PathInUse { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(ListenError::PathInUse { path: path.to_owned() })
        }
        Err(error) => Err(failed("connect()")(error)),
    }
}

/// The path of a bound unix socket. Dropping it in the process that bound the socket removes the path, unless another socket has
/// replaced it.
///
/// Example: [`bind_path`].
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    inode: Option<(u64, u64)>,
    process: u32,
}

fn inode(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

impl SocketPath {
    fn of(path: &Path) -> SocketPath {
        SocketPath { path: path.to_owned(), inode: inode(path), process: process::id() }
    }

    /// Leaves the path to another process.
    pub(crate) fn leave(mut self) {
        self.inode = None;
    }
}

impl Drop for SocketPath {
    fn drop(&mut self) {
        if self.process == process::id() && self.inode.is_some() && inode(&self.path) == self.inode {
            // An error means that the path is already removed.
            let _ = fs::remove_file(&self.path);
        }
    }
}
