use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};

use fourtuple::dial::{self, ConnectRequest, DialError, Dialer, SourcePool};
use fourtuple_syscalls::Errno;

/// The sources and destinations of connections. The destinations, given by their numbers, are taken in turn.
pub(crate) struct Origin {
    sources: Sources,
    pub(crate) destinations: usize,
    next: AtomicUsize,
}

enum Sources {
    /// TCP: the strategies of the library choose the port; a dialer for each destination.
    Dialers(Vec<Dialer>),
    /// UDP: the source addresses in turn, with a port that the kernel chooses. Unix sockets: no source.
    Plain(Vec<IpAddr>),
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
    /// Connections of TCP: `dialers` has one per destination.
    pub(crate) fn dialers(dialers: Vec<Dialer>) -> Origin {
        Origin { destinations: dialers.len(), sources: Sources::Dialers(dialers), next: AtomicUsize::new(0) }
    }

    /// Connections of UDP and of unix sockets.
    pub(crate) fn plain(sources: &SourcePool, destinations: usize) -> Origin {
        let sources = Sources::Plain(sources.addresses().to_vec());
        Origin { sources, destinations, next: AtomicUsize::new(0) }
    }

    /// Returns the number of the destination for the next connection, and its source.
    pub(crate) fn begin(&self) -> Result<(usize, Attempt<'_>, ConnectRequest), DialError> {
        let number = match (&self.sources, self.destinations) {
            (Sources::Dialers(_), 1) => 0,
            _ => self.next.fetch_add(1, Ordering::Relaxed),
        };
        let to = number % self.destinations;
        match &self.sources {
            Sources::Dialers(dialers) => {
                let attempt = dialers[to].begin()?;
                let request = attempt.request();
                Ok((to, Attempt::Dialer(attempt), request))
            }
            Sources::Plain(sources) => {
                // Each round over the destinations has one source, so that each destination gets all sources.
                let number = number / self.destinations;
                let attempt = Attempt::Plain { sources, number, failed: 0 };
                Ok((to, attempt, request_from(sources, number)))
            }
        }
    }

    /// Notes that a local port is free again towards a destination.
    pub(crate) fn release(&self, to: usize, local: SocketAddr) {
        if let Sources::Dialers(dialers) = &self.sources {
            dialers[to].release(local);
        }
    }
}

impl Attempt<'_> {
    /// Returns a request for another port after the last one was in use, if one is worth trying. `is_bind`: bind() failed.
    pub(crate) fn taken(&mut self, is_bind: bool) -> Option<ConnectRequest> {
        match self {
            Attempt::Dialer(_) if is_bind => self.failed(is_bind, Errno::EADDRINUSE.into()),
            Attempt::Dialer(_) => self.failed(is_bind, Errno::EADDRNOTAVAIL.into()),
            Attempt::Plain { .. } => None,
        }
    }

    /// Returns a request for another source after bind() or connect() failed because of the last one, if one is worth trying.
    pub(crate) fn failed(&mut self, is_bind: bool, error: io::Error) -> Option<ConnectRequest> {
        match self {
            Attempt::Dialer(attempt) => {
                let next = match is_bind {
                    true => attempt.bind_failed(error),
                    false => attempt.connect_failed(error).map(drop),
                };
                next.ok().map(|()| attempt.request())
            }
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
