//! Sockets that connections and packets come in by.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use fourtuple::listen::{OwnPath, Policy, bind_path};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Endpoint, errno_name};

use crate::error::ServeError;

/// The sockets of a server, one entry per worker.
pub(crate) struct Sockets {
    pub(crate) of_worker: Vec<Arc<OwnedFd>>,
    pub(crate) address: Endpoint,
    pub(crate) policy: Policy,
    pub(crate) path: Option<OwnPath>,
}

/// What is asked of the sockets.
pub(crate) struct Wanted<'a> {
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) transport: Transport,
    pub(crate) workers: usize,
    pub(crate) backlog: i32,
    pub(crate) defer_accept: bool,
}

/// Opens them all, or none.
pub(crate) fn open(wanted: &Wanted<'_>) -> Result<Sockets, ServeError> {
    match wanted.endpoint {
        Endpoint::Inet(_) => inet(wanted),
        Endpoint::Unix(path) => unix(wanted, path),
    }
}

fn inet(wanted: &Wanted<'_>) -> Result<Sockets, ServeError> {
    alone(wanted)?;
    let mut endpoint = wanted.endpoint.clone();
    let mut of_worker = Vec::with_capacity(wanted.workers);
    for _ in 0..wanted.workers {
        let (listener, address) = one_of_many(wanted, &endpoint)?;
        of_worker.push(Arc::new(listener));
        // The first one may have been given a port: the others join it.
        endpoint = address;
    }
    Ok(Sockets { of_worker, address: endpoint, policy: Policy::Reuseport, path: None })
}

fn one_of_many(wanted: &Wanted<'_>, endpoint: &Endpoint) -> Result<(OwnedFd, Endpoint), ServeError> {
    let failed = |call| move |source| listen_error(call, endpoint, source);
    let address = endpoint.inet().expect("it is no path");
    let listener = socket::open(wanted.transport, address, true).map_err(failed("socket()"))?;
    if wanted.transport == Transport::Tcp {
        // TIME_WAIT of an earlier server must not keep its address.
        option::set_reuse_address(listener.as_fd(), true).map_err(failed("SO_REUSEADDR"))?;
        // Accepted sockets have it from here. Else pipelined responses wait for the client's delayed ACK.
        option::set_no_delay(listener.as_fd()).map_err(failed("TCP_NODELAY"))?;
    }
    set("SO_REUSEPORT", endpoint, option::set_reuse_port(listener.as_fd()))?;
    socket::bind(listener.as_fd(), address).map_err(failed("bind()"))?;
    if wanted.transport == Transport::Tcp {
        if wanted.defer_accept {
            set("TCP_DEFER_ACCEPT", endpoint, option::set_defer_accept(listener.as_fd(), 1))?;
        }
        socket::listen(listener.as_fd(), wanted.backlog).map_err(failed("listen()"))?;
    }
    let address = socket::local_address(listener.as_fd()).map_err(failed("getsockname()"))?;
    Ok((listener, address.into()))
}

/// SO_REUSEPORT would let us share the address with another server of the same user, which then gets a part of the
/// connections and nobody knows. So the address is first bound as one that is not shared.
fn alone(wanted: &Wanted<'_>) -> Result<(), ServeError> {
    let address = wanted.endpoint.inet().expect("it is no path");
    let failed = |call| move |source| listen_error(call, wanted.endpoint, source);
    let probe = socket::open(wanted.transport, address, true).map_err(failed("socket()"))?;
    if wanted.transport == Transport::Tcp {
        option::set_reuse_address(probe.as_fd(), true).map_err(failed("SO_REUSEADDR"))?;
    }
    socket::bind(probe.as_fd(), address).map_err(failed("bind()"))
}

fn unix(wanted: &Wanted<'_>, path: &Path) -> Result<Sockets, ServeError> {
    let (listener, own) = bind_path(path, true)?;
    socket::listen(listener.as_fd(), wanted.backlog)
        .map_err(|source| listen_error("listen()", wanted.endpoint, source))?;
    let listener = Arc::new(listener);
    let of_worker = (0..wanted.workers).map(|_| Arc::clone(&listener)).collect();
    Ok(Sockets { of_worker, address: wanted.endpoint.clone(), policy: Policy::Exclusive, path: Some(own) })
}

fn set(call: &'static str, endpoint: &Endpoint, answer: io::Result<Answer>) -> Result<(), ServeError> {
    match answer {
        Ok(Answer::Done) => Ok(()),
        Ok(Answer::Absent) => {
            Err(listen_error(call, endpoint, io::Error::other("this kernel has not got it")))
        }
        Err(error) => Err(listen_error(call, endpoint, error)),
    }
}

fn listen_error(call: &'static str, endpoint: &Endpoint, source: io::Error) -> ServeError {
    let hint = match errno_name(&source).as_str() {
        "EADDRINUSE" => "; stop the program that has it, or take another port",
        "EADDRNOTAVAIL" => "; the address must be one of this host",
        "EACCES" => {
            "; ports below net.ipv4.ip_unprivileged_port_start (1024) need root, a path a directory to write in"
        }
        _ => "",
    };
    ServeError::Listen { call, address: shown(endpoint), source, hint }
}

/// An endpoint as `--listen` takes it.
pub(crate) fn shown(endpoint: &Endpoint) -> String {
    match endpoint {
        Endpoint::Inet(address) => address.to_string(),
        Endpoint::Unix(path) => format!("unix:{}", path.display()),
    }
}
