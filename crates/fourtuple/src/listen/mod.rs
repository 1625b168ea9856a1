//! Distribution of connections, and of the requests on kept connections, among the workers of a server.
//!
//! The workers of a [`ListenerGroup`] share an address. Its [`AcceptPolicy`] determines which worker gets the next connection:
//! the kernel wakes workers in the order in which they wait, regardless of their load. A worker holds one of the group's
//! *seats*: worker slots, numbered from 0, with counters that forked workers share. The code of a worker is the same with every
//! policy:
//!
//! ```no_run
#![doc = include_str!("../../examples/listen.rs")]
//! ```
//!
//! The module starts no thread (except one per worker in the adapter for tokio), implements no protocol and changes no sysctl.
//! Reading from a connection never waits. Writing waits for room in the send buffer, for as long as
//! [`ListenerGroupBuilder::write_timeout`] permits.
//!
//! A connection has one owner at every moment: the worker that serves it, the policy's `Wait` that watches it, or the handoff queue. Its
//! seat counts it as open until it is dropped, which closes its socket. An impossible policy is an error; no other policy replaces it.

mod acceptor;
#[cfg(feature = "tokio")]
mod async_connection;
#[cfg(feature = "axum")]
mod axum;
mod builder;
mod connection;
mod dispatcher;
mod drain;
mod error;
mod group;
mod handoff;
mod policy;
mod recycle;
mod seats;
#[cfg(feature = "tokio")]
mod tokio;
mod wait;

pub use acceptor::{AcceptWaker, Acceptor, LeaveReport};
#[cfg(feature = "tokio")]
pub use async_connection::{AsyncConnection, ConnectionHandle, StreamAddr};
#[cfg(feature = "axum")]
pub use axum::{ByRequest, by_request};
pub use builder::ListenerGroupBuilder;
pub use connection::{Connection, OpenGuard};
pub use dispatcher::{Dispatcher, DispatcherStats};
pub use drain::DrainReport;
pub use error::ListenError;
pub use fourtuple_syscalls::{Endpoint, EndpointParseError};
pub use group::{ListenerGroup, SocketPath, WorkerProcess, bind_path};
pub use policy::{AcceptPolicy, AcceptPolicyError, Family, PolicyChoice, UnknownFamily, Workers};
pub use recycle::{BreakEven, Recycle};
pub use seats::SeatStats;
#[cfg(feature = "tokio")]
pub use tokio::{AsyncAcceptor, Incoming};
