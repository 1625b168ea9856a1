//! The listening socket, its thread and its limits.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::sync::oneshot;

use crate::exposition::respond::Page;
use crate::exposition::respond::{Content, respond};

/// The pause after a failed accept(2) (EMFILE, ENFILE, ENOBUFS, ENOMEM). Clients wait in the accept queue, and the thread does
/// not spin.
const BACK_OFF: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The maximum number of connections at once, at least 1. A further connection closes the oldest one: a scrape takes
    /// milliseconds, so the oldest is idle or slow.
    pub connections: usize,
    /// The time limit from accept(2) to the last byte of the response; the endpoint then closes the connection.
    pub deadline: Duration,
    /// The time limit of an event stream of the live page. Browsers then open another.
    pub stream_deadline: Duration,
}

impl Default for Limits {
    /// Returns limits of 64 connections, 5 s and 10 minutes.
    fn default() -> Limits {
        Limits {
            connections: 64,
            deadline: Duration::from_secs(5),
            stream_deadline: Duration::from_secs(600),
        }
    }
}

/// An error of starting an endpoint.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// socket(2), bind(2) or listen(2) failed: EADDRINUSE, EADDRNOTAVAIL, EACCES.
    #[error("cannot listen at {address}: {source}")]
    Listen {
        /// The address to listen at.
        address: SocketAddr,
        /// The error of the call.
        source: io::Error,
    },
    /// The thread or its epoll could not be created: EAGAIN, EMFILE.
    #[error("cannot start the thread of the endpoint at {address}: {source}")]
    Thread {
        /// The address to listen at.
        address: SocketAddr,
        /// The error of the call.
        source: io::Error,
    },
}

/// A running HTTP endpoint: `GET /metrics` returns the metrics as OpenMetrics text, with one request per connection; `GET /` returns the
/// live page if there is one, else the metrics too. A request over loopback whose field Host names another host gets the status 421. Drop ends its thread and closes its connections.
#[derive(Debug)]
pub struct Endpoint {
    address: SocketAddr,
    failures: Arc<AtomicU64>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Endpoint {
    /// Binds the address and starts the thread that serves it. With port 0 the kernel chooses a port.
    ///
    /// # Errors
    ///
    /// [`EndpointError`]
    pub fn start(address: SocketAddr, limits: Limits, registry: Registry) -> Result<Endpoint, EndpointError> {
        Endpoint::serve(address, limits, Content::new(registry, None))
    }

    /// Like [`Endpoint::start`], with a live page at `/` whose updates are at `/events`.
    ///
    /// # Errors
    ///
    /// [`EndpointError`]
    pub fn start_with_page(
        address: SocketAddr,
        limits: Limits,
        registry: Registry,
        page: Page,
    ) -> Result<Endpoint, EndpointError> {
        Endpoint::serve(address, limits, Content::new(registry, Some(page)))
    }

    fn serve(address: SocketAddr, limits: Limits, content: Content) -> Result<Endpoint, EndpointError> {
        let listen = |source| EndpointError::Listen { address, source };
        let listener = std::net::TcpListener::bind(address).map_err(listen)?;
        listener.set_nonblocking(true).map_err(listen)?;
        let bound = listener.local_addr().map_err(listen)?;
        let failed = |source| EndpointError::Thread { address, source };
        let runtime = Builder::new_current_thread().enable_io().enable_time().build().map_err(failed)?;
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(listener).map_err(failed)?
        };
        let failures = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&failures);
        let (stop, stopped) = oneshot::channel();
        let thread = thread::Builder::new()
            .name("exposition".to_owned())
            .spawn(move || {
                runtime.spawn(accept(listener, limits, Arc::new(content), counted));
                // A dropped sender also stops the thread. All tasks end with the runtime.
                let _ = runtime.block_on(stopped);
            })
            .map_err(failed)?;
        Ok(Endpoint { address: bound, failures, stop: Some(stop), thread: Some(thread) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the number of failed accept(2) calls. The endpoint waits 100 ms after each.
    pub fn accept_failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // The send fails if the thread has already ended.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            // The panic hook has already reported a panic of the thread.
            let _ = thread.join();
        }
    }
}

async fn accept(listener: TcpListener, limits: Limits, content: Arc<Content>, failures: Arc<AtomicU64>) {
    let mut connections = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            // The client has already closed the connection.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(_) => {
                failures.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(BACK_OFF).await;
                continue;
            }
        };
        connections.retain(|connection: &tokio::task::JoinHandle<()>| !connection.is_finished());
        while connections.len() >= limits.connections.max(1)
            && let Some(oldest) = connections.pop_front()
        {
            oldest.abort();
        }
        connections.push_back(tokio::spawn(respond(stream, Arc::clone(&content), limits)));
    }
}
