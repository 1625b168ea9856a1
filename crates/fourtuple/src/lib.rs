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
//! # Example
//!
//! Once half of the ports to a destination are in use, `connect()` searches the full half of the range first, which takes
//! milliseconds. A [`dial::Dialer`] chooses the port so that the kernel finds a free one at once, to the last port:
//!
//! ```no_run
//! use fourtuple::dial::Dialer;
//!
//! let dialer = Dialer::to("192.0.2.1:443".parse()?).build()?;
//! let (stream, report) = dialer.dial()?;
//! println!("connected from {} with {} attempts", report.source, report.attempts);
//! # let _: std::net::TcpStream = stream;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Features
//!
//! None is on by default.
//!
//! - `tokio`: `Dialer::dial_tokio`, a connector for host names with a cache of dialers, and an acceptor for each worker's tokio
//!   runtime.
//! - `hyper`: the connector as a service for the client of hyper-util.
//! - `axum`: the acceptor as the listener of `axum::serve`.
//! - `bpf`: the accept policy `reuseport-least-busy` and the selectors that are BPF programs. They need CAP_BPF and
//!   CAP_NET_ADMIN at run time, and no compiler at build time.
//! - `plan`: the simulation of the kernel's port search in [`ports`], for tools.
#![forbid(unsafe_code)]

mod auto_traits;
pub mod capabilities;
pub mod dial;
pub mod listen;
pub mod ports;
pub mod spread;
mod sync;

// Compiles the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
