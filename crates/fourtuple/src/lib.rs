//! Socket calls for programs that open, accept or spread many connections on Linux: proxies, servers, crawlers, load generators.
//!
//! - [`dial`] opens TCP connections and connected UDP sockets: it finds a free source port quickly, and its errors name the cause.
//! - [`listen`] distributes connections over the workers of a server.
//! - [`spread`] distributes the packets of a UDP port over a group of sockets.
//! - [`ports`] calculates with port ranges and budgets; with the feature `plan` it also simulates the kernel's port search.
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
//! let dialer = Dialer::to("192.0.2.1:443".parse()?).build()?; // one for each destination, shared by threads
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
//! A server with hyper (feature `tokio`): [`listen`] has a type `AcceptedStream`, whose documentation is a whole server that drains on SIGTERM.
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
//! - `plan`: the simulation of the kernel's port search in [`ports`], for the tools of this repository. The feature promises no
//!   stability: any version may change its types and functions.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![warn(clippy::exhaustive_enums, clippy::exhaustive_structs)]
#![warn(missing_debug_implementations, missing_docs)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod auto_traits;
#[cfg(feature = "tokio")]
mod blocking_thread;
pub mod capabilities;
pub mod dial;
#[cfg(test)]
mod error_texts;
pub mod listen;
pub mod ports;
pub mod spread;
mod sync;
mod temporary;
#[cfg(feature = "serde")]
mod text;

// Compiles the examples of the README of the repository and of the package.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
#[doc = include_str!("../README.md")]
struct Readme;
