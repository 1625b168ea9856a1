//! Accepts connections: which worker gets the next one, and who serves the next request of one that is kept.
//!
//! Workers that share a listener wait for it in one of several ways, and the way decides who is woken: the kernel hands
//! out work in the order of waiters, not of load. A [`Policy`] is such a way. What a worker does is the same with all:
//!
//! ```no_run
//! use std::io::{Read, Write};
//!
//! use fourtuple::listen::{Listen, Policy};
//!
//! let group = Listen::at("127.0.0.1:8080".parse::<std::net::SocketAddr>()?.into())
//!     .policy(Policy::SharedOneshot)
//!     .open()?;
//! std::thread::scope(|scope| {
//!     for _ in 0..4 {
//!         scope.spawn(|| {
//!             let mut acceptor = group.join()?;
//!             while let Some(mut connection) = acceptor.next(None)? {
//!                 let mut request = [0; 1024];
//!                 match connection.read(&mut request) {
//!                     Ok(0) | Err(_) => continue, // closed by the client: dropping closes our end
//!                     Ok(_) => connection.write_all(b"answer\n")?,
//!                 }
//!                 connection.answered();
//!                 if !connection.is_last() {
//!                     acceptor.keep(connection)?; // its next request, whoever of the workers gets it
//!                 }
//!             }
//!             Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
//!         });
//!     }
//! });
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! It starts no thread (the adapter for tokio starts one per worker), speaks no protocol and changes no sysctl. Sockets it hands out are non-blocking.

mod acceptor;
mod auto;
mod break_even;
mod connection;
mod dispatcher;
mod error;
mod fresh;
mod group;
mod lobby;
mod path;
mod policy;
mod recycle;
mod rounds;
mod seats;
#[cfg(feature = "tokio")]
mod tokio;
mod wait;

pub use acceptor::{Acceptor, Farewell, Waker};
pub use auto::Choice;
pub use break_even::BreakEven;
pub use connection::{Connection, Place};
pub use dispatcher::{Dispatcher, DispatcherStats};
pub use error::ListenError;
pub use fourtuple_syscalls::Endpoint;
pub use group::{Group, Listen, Workers};
pub use path::{OwnPath, bind_path};
pub use policy::{Family, Policy, PolicyError};
pub use recycle::Recycle;
pub use seats::SeatStats;
#[cfg(feature = "tokio")]
pub use tokio::{Accepted, AsyncAcceptor, Stream, Visit};
