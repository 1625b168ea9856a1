//! Listening sockets, and UDP sockets of servers.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use fourtuple::listen::{AcceptPolicy, SocketPath, bind_path};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Endpoint, Errno};

use crate::serve::ServeError;

/// The sockets of a server, one entry per worker.
pub(crate) struct Sockets {
    pub(crate) of_worker: Vec<Arc<OwnedFd>>,
    pub(crate) address: Endpoint,
    pub(crate) policy: AcceptPolicy,
    pub(crate) path: Option<SocketPath>,
}

/// The requested properties of the sockets.
pub(crate) struct SocketRequest<'a> {
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) transport: Transport,
    pub(crate) workers: usize,
    pub(crate) backlog: i32,
    pub(crate) defer_accept: bool,
}

/// Opens all sockets, or none after an error.
pub(crate) fn open(request: &SocketRequest<'_>) -> Result<Sockets, ServeError> {
    match request.endpoint {
        Endpoint::Inet(_) => inet(request),
        Endpoint::Unix(path) => unix(request, path),
    }
}

fn inet(request: &SocketRequest<'_>) -> Result<Sockets, ServeError> {
    alone(request)?;
    let mut endpoint = request.endpoint.clone();
    let mut of_worker = Vec::with_capacity(request.workers);
    for _ in 0..request.workers {
        let (listener, address) = one_of_many(request, &endpoint)?;
        of_worker.push(Arc::new(listener));
        // The first socket may have got its port from the kernel: the others bind to the same port.
        endpoint = address;
    }
    Ok(Sockets { of_worker, address: endpoint, policy: AcceptPolicy::Reuseport, path: None })
}

fn one_of_many(request: &SocketRequest<'_>, endpoint: &Endpoint) -> Result<(OwnedFd, Endpoint), ServeError> {
    let failed = |call| move |source| listen_error(call, endpoint, source);
    let address = endpoint.inet().expect("it is not a path");
    let listener = socket::open(request.transport, address, true).map_err(failed("socket()"))?;
    if request.transport == Transport::Tcp {
        // TIME_WAIT sockets of an earlier server must not block the address.
        option::set_reuse_address(listener.as_fd(), true).map_err(failed("SO_REUSEADDR"))?;
        // Accepted sockets inherit TCP_NODELAY. Without it pipelined responses wait for the delayed ACK of the client.
        option::set_no_delay(listener.as_fd()).map_err(failed("TCP_NODELAY"))?;
    }
    // With SO_REUSEPORT, bind(2) of a UDP socket to port 0 may choose the port of another server of this user
    // (udp_lib_lport_inuse).
    let shares = || set("SO_REUSEPORT", endpoint, option::set_reuse_port(listener.as_fd()));
    let late = request.transport == Transport::Udp && address.port() == 0;
    if !late {
        shares()?;
    }
    socket::bind(listener.as_fd(), address).map_err(failed("bind()"))?;
    if late {
        shares()?;
    }
    if request.transport == Transport::Tcp {
        if request.defer_accept {
            set("TCP_DEFER_ACCEPT", endpoint, option::set_defer_accept(listener.as_fd(), 1))?;
        }
        socket::listen(listener.as_fd(), request.backlog).map_err(failed("listen()"))?;
    }
    let address = socket::local_address(listener.as_fd()).map_err(failed("getsockname()"))?;
    Ok((listener, address.into()))
}

/// Checks that no other server has the address. SO_REUSEPORT alone would share it with another server of the same user, which
/// would silently get a part of the connections. So this function first binds the address without SO_REUSEPORT.
fn alone(request: &SocketRequest<'_>) -> Result<(), ServeError> {
    let address = request.endpoint.inet().expect("it is not a path");
    let failed = |call| move |source| listen_error(call, request.endpoint, source);
    let probe = socket::open(request.transport, address, true).map_err(failed("socket()"))?;
    if request.transport == Transport::Tcp {
        option::set_reuse_address(probe.as_fd(), true).map_err(failed("SO_REUSEADDR"))?;
    }
    socket::bind(probe.as_fd(), address).map_err(failed("bind()"))
}

fn unix(request: &SocketRequest<'_>, path: &Path) -> Result<Sockets, ServeError> {
    let (listener, own) = bind_path(path, true)?;
    socket::listen(listener.as_fd(), request.backlog)
        .map_err(|source| listen_error("listen()", request.endpoint, source))?;
    let listener = Arc::new(listener);
    let of_worker = (0..request.workers).map(|_| Arc::clone(&listener)).collect();
    Ok(Sockets {
        of_worker,
        address: request.endpoint.clone(),
        policy: AcceptPolicy::Exclusive,
        path: Some(own),
    })
}

fn set(call: &'static str, endpoint: &Endpoint, answer: io::Result<Answer>) -> Result<(), ServeError> {
    match answer {
        Ok(Answer::Done) => Ok(()),
        Ok(Answer::Absent) => {
            Err(listen_error(call, endpoint, io::Error::other("not supported by this kernel")))
        }
        Err(error) => Err(listen_error(call, endpoint, error)),
    }
}

fn listen_error(call: &'static str, endpoint: &Endpoint, source: io::Error) -> ServeError {
    let hint = match Errno::of(&source) {
        Some(Errno::EADDRINUSE) => "; stop the program that has it, or take another port",
        Some(Errno::EADDRNOTAVAIL) => "; the address must be one of this host",
        Some(Errno::EACCES) => {
            "; ports below net.ipv4.ip_unprivileged_port_start (1024) need root, a path a directory to write in"
        }
        _ => "",
    };
    ServeError::Listen { call, address: shown(endpoint), source, hint }
}

/// Formats an endpoint in the syntax of `--listen`.
pub(crate) fn shown(endpoint: &Endpoint) -> String {
    match endpoint {
        Endpoint::Inet(address) => address.to_string(),
        Endpoint::Unix(path) => format!("unix:{}", path.display()),
    }
}
