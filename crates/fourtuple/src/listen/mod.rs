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
//! [`ListenerGroupBuilder::write_limit`] permits.
//!
//! A connection has one owner at every moment: the worker that serves it, the policy's `Wait` that watches it, or the handoff queue. Its
//! seat counts it as open until it is dropped, which closes its socket. An impossible policy is an error; no other policy replaces it.

#[cfg(feature = "tokio")]
mod accepted_stream;
mod acceptor;
mod adopt;
mod auto;
#[cfg(feature = "axum")]
mod axum;
mod break_even;
mod builder;
mod channels;
mod connection;
mod dispatcher;
mod drain;
mod error;
mod events;
mod fresh;
mod group;
mod handoff;
mod idle;
#[cfg(feature = "tokio")]
mod incoming;
mod listeners;
mod path;
mod policy;
mod policy_table;
mod process;
mod recycle;
mod rounds;
mod seats;
#[cfg(feature = "tokio")]
mod stream;
#[cfg(feature = "tokio")]
mod tokio;
#[cfg(feature = "tokio")]
mod turn;
mod wait;

#[cfg(feature = "tokio")]
pub use accepted_stream::{AcceptedStream, SessionHandle, StreamAddr};
pub use acceptor::{AcceptWaker, Acceptor, LeaveReport};
pub use auto::PolicyChoice;
#[cfg(feature = "axum")]
pub use axum::{ByRequest, CountedRequests, by_request};
pub use break_even::BreakEven;
pub use builder::ListenerGroupBuilder;
pub use connection::{Connection, OpenGuard};
pub use dispatcher::{Dispatcher, DispatcherStats};
pub use drain::DrainReport;
pub use error::ListenError;
pub use fourtuple_syscalls::{Endpoint, EndpointParseError};
pub use group::ListenerGroup;
#[cfg(feature = "tokio")]
pub use incoming::Incoming;
pub use path::{SocketPath, bind_path};
pub use policy::{AcceptPolicy, Family, UnknownFamily, Workers};
pub use policy_table::AcceptPolicyError;
pub use process::WorkerProcess;
pub use recycle::Recycle;
pub use seats::SeatStats;
#[cfg(feature = "tokio")]
pub use stream::Stream;
#[cfg(feature = "tokio")]
pub use tokio::{Accepted, AsyncAcceptor, Session};
