use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};

use fourtuple::dial::{Attempt, ConnectRequest, DialError, Dialer, SourcePool};

/// The source addresses and ports of connections.
pub(crate) enum Origin {
    /// TCP: the strategies of the library choose the port.
    Dialer(Box<Dialer>),
    /// UDP: the source addresses in turn, with a port that the kernel chooses. Unix sockets: no source.
    Plain { sources: Vec<IpAddr>, next: AtomicUsize },
}

impl Origin {
    pub(crate) fn plain(sources: &SourcePool) -> Origin {
        Origin::Plain { sources: sources.addresses().to_vec(), next: AtomicUsize::new(0) }
    }

    /// Returns the source for the next connection.
    pub(crate) fn begin(&self) -> Result<(Option<Attempt<'_>>, ConnectRequest), DialError> {
        match self {
            Origin::Dialer(dialer) => dialer.begin().map(|(attempt, request)| (Some(attempt), request)),
            Origin::Plain { sources, next } => {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let source = sources.get(number % sources.len().max(1));
                Ok((None, ConnectRequest::from_source(source.copied())))
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
