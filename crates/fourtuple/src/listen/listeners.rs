//! The listening sockets of a group: one for all workers, or one per worker with SO_REUSEPORT.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

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
        /// A bound socket that never listens. It keeps the port while no worker listens.
        _holder: OwnedFd,
        /// Listeners of workers that left. A remaining worker accepts from each until another worker joins.
        inherited: Mutex<Vec<InheritedListener>>,
    },
}

/// A listener of a worker that left, from which a remaining worker accepts until another worker joins.
#[derive(Clone, Debug)]
pub(crate) struct InheritedListener {
    pub(crate) listener: Arc<OwnedFd>,
    /// Whether another worker owns the listener now.
    claimed: Arc<AtomicBool>,
}

impl InheritedListener {
    pub(crate) fn new(listener: OwnedFd) -> InheritedListener {
        InheritedListener { listener: Arc::new(listener), claimed: Arc::default() }
    }

    /// Takes ownership of the listener; `false` if another worker was faster.
    pub(crate) fn claim(&self) -> bool {
        !self.claimed.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_claimed(&self) -> bool {
        self.claimed.load(Ordering::Acquire)
    }
}

/// Reserves the address of `holder`, which is bound and never listens, for SO_REUSEPORT listeners of this group. Returns the
/// first listener, which queues connections until a worker joins.
///
/// Two sockets with SO_REUSEADDR may share an address as long as neither listens (`inet_csk_bind_conflict`), so the holder
/// clears that option once it is bound. The kernel caches per port whether all sockets set the option (`fastreuse`) and would
/// not check the holder; listen(2) on another socket invalidates this cache.
pub(crate) fn reserve(holder: &OwnedFd, endpoint: &Endpoint, backlog: i32) -> Result<OwnedFd, ListenError> {
    option::set_reuse_address(holder.as_fd(), false)
        .map_err(|source| call("setsockopt(SO_REUSEADDR)", endpoint, source))?;
    set_reuse_port(holder, endpoint)?;
    open_reuseport(endpoint, backlog)
}

/// Opens one more listener on an address whose sockets have SO_REUSEPORT.
pub(crate) fn open_reuseport(endpoint: &Endpoint, backlog: i32) -> Result<OwnedFd, ListenError> {
    let listener = bind(endpoint, true, true)?;
    socket::listen(listener.as_fd(), backlog).map_err(|source| call("listen()", endpoint, source))?;
    Ok(listener)
}

fn set_reuse_port(socket: &OwnedFd, endpoint: &Endpoint) -> Result<(), ListenError> {
    let failed = |source| call("setsockopt(SO_REUSEPORT)", endpoint, source);
    match option::set_reuse_port(socket.as_fd()).map_err(failed)? {
        Answer::Done => Ok(()),
        Answer::Absent => Err(failed(io::ErrorKind::Unsupported.into())),
    }
}

/// Opens and binds a TCP socket that does not listen yet.
pub(crate) fn bind(endpoint: &Endpoint, reuse_port: bool, nonblocking: bool) -> Result<OwnedFd, ListenError> {
    let failed = |name| move |source| call(name, endpoint, source);
    let Some(address) = endpoint.inet() else {
        return Err(failed("bind()")(io::ErrorKind::InvalidInput.into()));
    };
    let socket = socket::open(Transport::Tcp, address, nonblocking).map_err(failed("socket()"))?;
    // Without SO_REUSEADDR, TIME_WAIT sockets of an earlier server make bind(2) fail.
    option::set_reuse_address(socket.as_fd(), true).map_err(failed("setsockopt(SO_REUSEADDR)"))?;
    // Accepted sockets inherit TCP_NODELAY. Without it, pipelined responses wait for the client's delayed ACK.
    option::set_no_delay(socket.as_fd()).map_err(failed("setsockopt(TCP_NODELAY)"))?;
    if reuse_port {
        set_reuse_port(&socket, endpoint)?;
    }
    socket::bind(socket.as_fd(), address).map_err(failed("bind()"))?;
    Ok(socket)
}

/// Returns the address of a socket, with the port that the kernel chose.
pub(crate) fn local_endpoint(socket: &OwnedFd, endpoint: &Endpoint) -> Result<Endpoint, ListenError> {
    let address = socket::local_address(socket.as_fd());
    Ok(address.map_err(|source| call("getsockname()", endpoint, source))?.into())
}

/// Returns whether the kernel moves the queue of a closed SO_REUSEPORT listener to the remaining ones of its group
/// (net.ipv4.tcp_migrate_req, Linux 5.14).
pub(crate) fn kernel_migrates_queues() -> bool {
    fs::read_to_string("/proc/sys/net/ipv4/tcp_migrate_req").is_ok_and(|value| value.trim() == "1")
}

fn call(call: &'static str, endpoint: &Endpoint, source: io::Error) -> ListenError {
    ListenError::Call { call, endpoint: endpoint.clone(), source }
}
