//! The listening sockets of a group: one for all workers, or one per worker with SO_REUSEPORT.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;

use fourtuple_syscalls::Endpoint;
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};

use crate::listen::error::ListenError;

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
        let failed =
            |error| call("getsockopt(TCP_DEFER_ACCEPT, TCP_FASTOPEN or IPV6_V6ONLY)", endpoint, error);
        let set = |value: u32| (value > 0).then(|| u16::try_from(value).unwrap_or(u16::MAX));
        let ipv6_only = endpoint
            .inet()
            .is_some_and(|address| address.is_ipv6())
            .then(|| option::is_ipv6_only(listener.as_fd()))
            .transpose();
        Ok(TcpOptions {
            defer_accept: set(option::defer_accept(listener.as_fd()).map_err(failed)?),
            fast_open: set(option::fast_open(listener.as_fd()).map_err(failed)?),
            ipv6_only: ipv6_only.map_err(failed)?,
        })
    }

    /// Sets the options on a socket that is not bound.
    fn set(self, socket: &OwnedFd, endpoint: &Endpoint) -> Result<(), ListenError> {
        let failed = |name| move |error| call(name, endpoint, error);
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
        .map_err(|error| call("setsockopt(SO_REUSEADDR)", endpoint, error))?;
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
    socket::listen(listener.as_fd(), backlog).map_err(|error| call("listen()", endpoint, error))?;
    Ok(listener)
}

fn set_reuse_port(socket: &OwnedFd, endpoint: &Endpoint) -> Result<(), ListenError> {
    let failed = |error| call("setsockopt(SO_REUSEPORT)", endpoint, error);
    match option::set_reuse_port(socket.as_fd()).map_err(failed)? {
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
    let failed = |name| move |error| call(name, endpoint, error);
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
    Ok(address.map_err(|error| call("getsockname()", endpoint, error))?.into())
}

/// Returns whether the kernel moves the queue of a closed SO_REUSEPORT listener to the remaining ones of its group
/// (net.ipv4.tcp_migrate_req, Linux 5.14).
pub(crate) fn kernel_migrates_queues() -> bool {
    fs::read_to_string("/proc/sys/net/ipv4/tcp_migrate_req").is_ok_and(|value| value.trim() == "1")
}

fn call(call: &'static str, endpoint: &Endpoint, error: io::Error) -> ListenError {
    ListenError::Call { call, endpoint: endpoint.clone(), error }
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
    let failed = |call| {
        let endpoint = endpoint.clone();
        move |error| ListenError::Call { call, endpoint, error }
    };
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
        Err(error) => return Err(ListenError::Call { call: "stat()", endpoint, error }),
    }
    let failed = |call| {
        let endpoint = endpoint.clone();
        move |error| ListenError::Call { call, endpoint, error }
    };
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
