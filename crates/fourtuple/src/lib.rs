//! Socket calls for programs that open, accept or spread many connections on Linux: proxies, servers, crawlers, load generators.
//!
//! - [`dial`] opens TCP connections and connected UDP sockets: it finds a free source port quickly, and its errors name the cause.
//! - [`listen`] distributes connections over the workers of a server.
//! - [`spread`] distributes the packets of a UDP port over a group of sockets.
//! - [`ports`] calculates with port ranges and budgets; with the feature `plan` it also simulates the kernel's port search.
//! - [`capabilities`] probes which socket options the kernel supports.
//!
//! The crate resolves no names, keeps no pool of connections, speaks no protocol and changes no sysctl.
#![forbid(unsafe_code)]

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
