//! Socket calls for programs that open, accept or spread many connections on Linux: proxies, servers, crawlers, load generators.
//!
//! - [`dial`] opens TCP connections and connected UDP sockets: it finds a free source port quickly, and its errors name the cause.
//! - [`listen`] distributes connections over the workers of a server.
//! - [`spread`] distributes the packets of a UDP port over a group of sockets.
//! - [`ports`] calculates with port ranges and budgets.
//! - [`capabilities`] probes which socket options the kernel supports.
//!
//! The crate keeps no pool of connections, speaks no protocol and changes no sysctl.
//!
//! # The problem
//!
//! A connection needs a source port that is free towards its destination. While less than half of the ephemeral ports are in use,
//! `connect()` finds one in microseconds. From half on, the kernel first searches all ports of one parity in vain, on every
//! `connect()`, while other threads of the host wait for the same locks:
//!
//! ```text
//! mean time of connect() while 56,512 connections to one address are opened
//!
//!   kernel default, first half of the ports   |                                                     14 us
//!   kernel default, second half               |###############################################   1,860 us
//!   this crate, all ports                     |                                                     14 us
//! ```
//!
//! *`fourtuple lab ports --range 9024-65535` on Linux 6.18, a virtual machine with 2 CPUs.* With the crate the last port is as cheap as
//! the first, and when no port is left, the error says so and counts the sockets that hold the ports.
//!
//! # Quick start
//!
//! Blocking, with the standard library:
//!
//! ```no_run
//! use fourtuple::dial::Dialer;
//!
//! let dialer = Dialer::builder("192.0.2.1:443".parse()?).build()?; // one for each destination, shared by threads
//! let (stream, report) = dialer.dial()?;
//! println!("connected from {} with {} attempts", report.source, report.attempts);
//! # let _: std::net::TcpStream = stream;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! tokio (feature `tokio`): host names, many destinations, Happy Eyeballs:
//!
#![cfg_attr(feature = "tokio", doc = "```no_run")]
#![cfg_attr(not(feature = "tokio"), doc = "```ignore")]
//! # async fn example() -> Result<(), fourtuple::dial::ConnectError> {
//! let connector = fourtuple::dial::Connector::new();
//! let stream = connector.connect("example.org", 80).await?; // AsyncRead, AsyncWrite
//! # drop(stream); Ok(()) }
//! ```
//!
//! The client of hyper-util (feature `hyper`; `hyper-util` with the features `client-legacy`, `http1` and `tokio`):
//!
#![cfg_attr(feature = "hyper", doc = "```no_run")]
#![cfg_attr(not(feature = "hyper"), doc = "```ignore")]
//! use fourtuple::dial::Connector;
//! use http_body_util::Empty;
//! use hyper::body::Bytes;
//! use hyper_util::{client::legacy::Client, rt::TokioExecutor};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::builder(TokioExecutor::new()).build::<_, Empty<Bytes>>(Connector::new());
//! let response = client.get("http://example.org/".parse()?).await?;
//! # drop(response); Ok(()) }
//! ```
//!
//! A server with hyper (feature `tokio`): [`listen`] has a type `AsyncConnection`, whose documentation is a whole server that drains on SIGTERM.
//!
//! A server with axum (feature `axum`), one listener for all its runtimes:
//!
#![cfg_attr(feature = "axum", doc = "```no_run")]
#![cfg_attr(not(feature = "axum"), doc = "```ignore")]
//! use fourtuple::listen::{AsyncAcceptor, ListenerGroupBuilder, Workers};
//!
//! # async fn example(app: axum::Router) -> Result<(), Box<dyn std::error::Error>> {
//! let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 8080)).workers(Workers::Runtimes).open()?;
//! axum::serve(AsyncAcceptor::new(group.join()?)?, app).await?; // in each runtime
//! # Ok(()) }
//! ```
//!
//! UDP: a connected socket whose 4-tuple no other socket has, and a group of sockets on one port:
//!
//! ```no_run
//! use fourtuple::dial::{Sharing, UdpDialer};
//! use fourtuple::spread::{Selector, UdpGroup};
//!
//! let (socket, report) = UdpDialer::new("192.0.2.1:53".parse()?, None, Sharing::Shared)?.dial()?;
//! let group = UdpGroup::open("0.0.0.0:4000".parse()?, 4, &Selector::Random)?; // packets of one sender reach all four
//! # drop((socket, report, group));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Errors
//!
//! One errno has different causes in different calls, so errors are enums by cause. `Display` names the cause and the addresses, as in
//! `192.0.2.1:80 refused the connection: nothing listens there, or a firewall rejects it`, or the call and its errno; [`source()`](std::error::Error::source)
//! is the error of the call or of the resolver. [`dial::DialError`] has
//! [`is_exhausted`](dial::DialError::is_exhausted), [`is_retryable`](dial::DialError::is_retryable) and
//! [`raw_os_error`](dial::DialError::raw_os_error). The errors of calls convert into [`std::io::Error`] with a fitting kind.
//!
//! # Examples
//!
//! `examples/` of the repository: `proxy` (a reverse proxy), `crawler` (16 source addresses), `dns_forwarder`, `prefork` (worker
//! processes), `listen` and `drain` (worker threads, and an end without a reset), `accept` (tokio), `activated` (socket activation),
//! `dial`, `hyper`. `docs/adoption.md` has the lines for
//! tonic, hickory-dns, pingora, hyper-rustls and async-io.
//!
//! # Features
//!
//! None is on by default.
//!
//! - `tokio`: `Dialer::dial_tokio`, a connector for host names with a cache of dialers, and an acceptor for each worker's tokio
//!   runtime.
//! - `hyper`: the connector as a service for the client of hyper-util.
//! - `axum`: the acceptor as the listener of `axum::serve`, and a service that gives each request to an idle worker.
//! - `bpf`: the accept policy `reuseport-least-busy` and the selectors that are BPF programs. They need CAP_BPF and
//!   CAP_NET_ADMIN at run time, and no compiler at build time.
//! - `uring`: the accept policy `uring-oneshot`.
//! - `serde`: `Serialize` for reports and counters, and also `Deserialize` for settings, in the form of their `Display`.
//! - `tracing`: debug events: each dial and its failure; workers that join and leave, the end of a group, failed accepts, and
//!   connections closed by a limit.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![warn(clippy::exhaustive_enums, clippy::exhaustive_structs)]
#![warn(missing_debug_implementations, missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod capabilities;
pub mod dial;
mod errors;
pub mod listen;
pub mod ports;
pub mod spread;

// Compiles the examples of the README of the repository and of the package.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
#[doc = include_str!("../README.md")]
struct Readme;

mod sync {
    //! Atomics and shared counters. Models (`--cfg fourtuple_loom`) use the types of loom, which tries every interleaving.

    #[cfg(not(all(test, fourtuple_loom)))]
    pub(crate) use fourtuple_syscalls::shared::Counters;
    #[cfg(not(all(test, fourtuple_loom)))]
    pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

    #[cfg(all(test, fourtuple_loom))]
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
    #[cfg(all(test, fourtuple_loom))]
    pub(crate) use model::Counters;

    #[cfg(all(test, fourtuple_loom))]
    mod model {
        use std::io;

        use super::AtomicU64;

        /// A replacement for memory that processes share, because all threads of loom are in one process.
        #[derive(Debug)]
        pub(crate) struct Counters(Vec<AtomicU64>);

        impl Counters {
            pub(crate) fn new(count: usize) -> io::Result<Counters> {
                Ok(Counters((0..count).map(|_| AtomicU64::new(0)).collect()))
            }

            pub(crate) fn all(&self) -> &[AtomicU64] {
                &self.0
            }
        }
    }
}

#[cfg(feature = "serde")]
mod text {
    //! Settings in the form of their `Display` and `FromStr`, for the feature `serde`: `strategy = "full-range"` in a configuration file.

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::dial::{SourcePool, Strategy};
    use crate::listen::{AcceptPolicy, Family};
    use crate::ports::{PortRange, PortSet};
    use crate::spread::{ControlFilter, DeviceName, Selector};

    macro_rules! is_text {
        ($($setting:ty),+) => {$(
            impl Serialize for $setting {
                fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                    serializer.collect_str(self)
                }
            }

            impl<'de> Deserialize<'de> for $setting {
                fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
                }
            }
        )+};
    }

    is_text!(AcceptPolicy, ControlFilter, DeviceName, Family, PortRange, PortSet, Selector, Strategy);

    /// A list of addresses.
    impl Serialize for SourcePool {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.collect_seq(self.addresses())
        }
    }

    /// A list of addresses and networks; an empty list is [`SourcePool::any`].
    impl<'de> Deserialize<'de> for SourcePool {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            match Vec::<String>::deserialize(deserializer)?.join(",") {
                none if none.is_empty() => Ok(SourcePool::any()),
                list => list.parse().map_err(D::Error::custom),
            }
        }
    }
}

/// Runs `work` on a blocking thread of the current runtime. A panic of `work` continues in the caller.
///
/// # Errors
///
/// EAGAIN, and `work` never runs: the runtime has no blocking thread, and the system has none left (RLIMIT_NPROC, pids.max). An error
/// without an errno: the runtime shuts down.
///
/// # Panics
///
/// Outside of a tokio runtime.
#[cfg(feature = "tokio")]
pub(crate) async fn on_blocking_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> std::io::Result<T> {
    use std::io;
    use std::panic::{self, AssertUnwindSafe};
    use std::sync::{Arc, Mutex, PoisonError};

    use fourtuple_syscalls::Errno;

    let no_thread = || io::Error::from(Errno::EAGAIN);
    let runtime = tokio::runtime::Handle::current();
    // spawn_blocking() queues the task, and then panics if it cannot start a thread.
    let work = Arc::new(Mutex::new(Some(work)));
    let queued = Arc::clone(&work);
    let take = |work: &Mutex<Option<_>>| work.lock().unwrap_or_else(PoisonError::into_inner).take();
    let begin = || runtime.spawn_blocking(move || take(&queued).map(|work| work()));
    let Ok(task) = panic::catch_unwind(AssertUnwindSafe(begin)) else {
        take(&work);
        return Err(no_thread());
    };
    match task.await {
        Ok(done) => done.ok_or_else(no_thread),
        Err(error) => match error.try_into_panic() {
            Ok(payload) => panic::resume_unwind(payload),
            Err(error) => Err(io::Error::other(error)),
        },
    }
}

// Compile-time checks that threads and tasks can share the public types.

const fn is_send<T: Send>() {}
const fn is_send_and_sync<T: Send + Sync>() {}
#[cfg(feature = "tokio")]
const fn is_unpin<T: Unpin>() {}

const _: () = {
    is_send_and_sync::<dial::Dialer>();
    is_send_and_sync::<dial::DialerBuilder>();
    is_send_and_sync::<dial::UdpDialer>();
    is_send_and_sync::<dial::SourcePool>();
    is_send_and_sync::<dial::DialError>();
    is_send_and_sync::<dial::BuildError>();
    is_send::<dial::Attempt<'_>>();
    is_send_and_sync::<listen::ListenerGroup>();
    is_send_and_sync::<listen::ListenError>();
    is_send::<listen::Acceptor>();
    is_send::<listen::Connection>();
    is_send_and_sync::<listen::ListenerGroupBuilder>();
    is_send_and_sync::<listen::AcceptWaker>();
    is_send::<listen::Dispatcher>();
    is_send_and_sync::<spread::UdpGroup>();
    is_send_and_sync::<spread::UdpGroupError>();
    is_send_and_sync::<dial::DialReport>();
    is_send_and_sync::<listen::DrainReport>();
    is_send_and_sync::<listen::DispatcherStats>();
    is_send_and_sync::<listen::SeatStats>();
    is_send_and_sync::<listen::OpenGuard>();
    is_send::<listen::LeaveReport>();
    is_send::<listen::WorkerProcess>();
    is_send_and_sync::<capabilities::Capabilities>();
    is_send_and_sync::<capabilities::ProbeError>();
    is_send_and_sync::<spread::Selector>();
    is_send_and_sync::<spread::ControlFilter>();
    is_send_and_sync::<ports::PortRange>();
    is_send_and_sync::<ports::PortSet>();
    is_send_and_sync::<ports::Random>();
};

#[cfg(feature = "tokio")]
const _: () = {
    is_send_and_sync::<dial::Dialers>();
    is_send_and_sync::<dial::Connector>();
    is_send_and_sync::<dial::ConnectError>();
    is_send_and_sync::<dial::ConnectorBuilder>();
    is_send_and_sync::<dial::DialedStream>();
    is_send_and_sync::<dial::GuardedStream<std::sync::Arc<dial::Dialer>>>();
    is_send::<listen::Incoming>();
    is_send_and_sync::<listen::AsyncConnection>();
    is_send_and_sync::<listen::ConnectionHandle>();
    is_send::<listen::AsyncAcceptor>();
    is_unpin::<dial::DialedStream>();
    is_unpin::<listen::AsyncConnection>();
    is_unpin::<listen::Incoming>();
};

/// The futures of a task on a runtime with several threads.
#[cfg(feature = "tokio")]
const _: () = {
    const fn returns_send<T, F: Send>(_: fn(&'static T) -> F) {}
    const fn needs_send<T, F: Send>(_: fn(&'static mut T) -> F) {}
    returns_send(dial::Dialer::dial_tokio);
    returns_send(dial::UdpDialer::dial_tokio);
    needs_send(listen::AsyncAcceptor::accept);
    const fn connects<F: Send>(_: fn(&'static dial::Connector, &'static str, u16) -> F) {}
    connects(dial::Connector::connect);
};
