use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};

use fourtuple::dial::{self, ConnectRequest, DialError, Dialer, SourcePool};

/// The source addresses and ports of connections.
pub(crate) enum Origin {
    /// TCP: the strategies of the library choose the port.
    Dialer(Box<Dialer>),
    /// UDP: the source addresses in turn, with a port that the kernel chooses. Unix sockets: no source.
    Plain { sources: Vec<IpAddr>, next: AtomicUsize },
}

/// The opening of a connection, until it is open or has failed.
pub(crate) enum Attempt<'a> {
    Dialer(dial::Attempt<'a>),
    Plain {
        sources: &'a [IpAddr],
        /// The number of the current source, modulo the number of sources.
        number: usize,
        failed: usize,
    },
}

impl Origin {
    pub(crate) fn plain(sources: &SourcePool) -> Origin {
        Origin::Plain { sources: sources.addresses().to_vec(), next: AtomicUsize::new(0) }
    }

    /// Returns the source for the next connection.
    pub(crate) fn begin(&self) -> Result<(Attempt<'_>, ConnectRequest), DialError> {
        match self {
            Origin::Dialer(dialer) => {
                dialer.begin().map(|(attempt, request)| (Attempt::Dialer(attempt), request))
            }
            Origin::Plain { sources, next } => {
                let number = next.fetch_add(1, Ordering::Relaxed);
                Ok((Attempt::Plain { sources, number, failed: 0 }, request_from(sources, number)))
            }
        }
    }

    /// Notes that a local port is free again.
    pub(crate) fn release(&self, local: SocketAddr) {
        if let Origin::Dialer(dialer) = self {
            dialer.release(local);
        }
    }
}

impl Attempt<'_> {
    /// Returns a request for another port after the last one was in use, if one is worth trying.
    pub(crate) fn taken(&mut self) -> Option<ConnectRequest> {
        match self {
            Attempt::Dialer(attempt) => attempt.taken().ok(),
            Attempt::Plain { .. } => None,
        }
    }

    /// Returns a request for another source after a call failed because of the last one, if one is worth trying.
    pub(crate) fn source_failed(&mut self, call: &'static str, error: io::Error) -> Option<ConnectRequest> {
        match self {
            Attempt::Dialer(attempt) => attempt.source_failed(call, error).ok(),
            Attempt::Plain { sources, number, failed } => {
                *number += 1;
                *failed += 1;
                (*failed < sources.len()).then(|| request_from(sources, *number))
            }
        }
    }

    /// Ends the attempt with an open connection. Returns the address to release when the connection is closed, if any.
    pub(crate) fn keep(self) -> Option<SocketAddr> {
        match self {
            Attempt::Dialer(attempt) => Some(attempt.keep()),
            Attempt::Plain { .. } => None,
        }
    }
}

fn request_from(sources: &[IpAddr], number: usize) -> ConnectRequest {
    ConnectRequest::from_source(sources.get(number % sources.len().max(1)).copied())
}
