use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};

use fourtuple::dial::{Attempt, DialError, Dialer, SourcePool, Wanted};

/// Where connections come from.
pub(crate) enum Origin {
    /// TCP: a port by the library's strategies.
    Dialer(Box<Dialer>),
    /// UDP: one source after the other, the port left to the kernel; unix sockets: nothing at all.
    Plain { sources: Vec<IpAddr>, next: AtomicUsize },
}

impl Origin {
    pub(crate) fn plain(sources: &SourcePool) -> Origin {
        Origin::Plain { sources: sources.addresses().to_vec(), next: AtomicUsize::new(0) }
    }

    /// What the next connection is to be given.
    pub(crate) fn begin(&self) -> Result<(Option<Attempt<'_>>, Wanted), DialError> {
        match self {
            Origin::Dialer(dialer) => dialer.begin().map(|(attempt, wanted)| (Some(attempt), wanted)),
            Origin::Plain { sources, next } => {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let source = sources.get(number % sources.len().max(1));
                Ok((None, Wanted { source: source.map(|ip| SocketAddr::new(*ip, 0)), window: None }))
            }
        }
    }

    /// A port is free again.
    pub(crate) fn release(&self, local: SocketAddr) {
        if let Origin::Dialer(dialer) = self {
            dialer.release(local);
        }
    }
}
