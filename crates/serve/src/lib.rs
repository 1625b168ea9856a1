//! Small servers for tests and measurements, which count what each worker did.
//!
//! ```no_run
//! use fourtuple_serve::{Protocol, Serve};
//!
//! let serve = Serve::new(Protocol::Http { body: 2 }, "127.0.0.1:0".parse::<std::net::SocketAddr>()?.into());
//! let running = serve.start()?;
//! println!("{}", running.address());
//! let results = running.stop();
//! println!("{} requests", results.workers.iter().map(|worker| worker.requests).sum::<u64>());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Serve::start`] creates the sockets and the worker threads. They belong to the network namespace of the calling thread and
//! inherit its CPU affinity.
#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod connection;
mod counts;
mod datagrams;
mod decoder;
mod dispatcher_thread;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod listener;
mod policy_worker;
mod protocol;
mod running;
mod serve;
mod service;
mod settings;
mod slab;
mod stop;
mod validity;
mod work;
mod worker;
mod worker_thread;

pub use error::ServeError;
pub use protocol::Protocol;
pub use running::Running;
pub use serve::Serve;
pub use service::{Service, Shape};
pub use settings::{Close, Stall};
pub use validity::validity;
