//! Small servers for tests and measurements, which count what each worker did.
//!
//! ```no_run
//! use fourtuple_bench::serve::{Protocol, Serve};
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

mod decoder;
#[doc(hidden)]
pub mod fuzzing;
mod listener;
mod policy_worker;
mod protocol;
mod running;
mod service;
mod settings;
mod worker;
mod worker_thread;

pub use protocol::Protocol;
pub use running::Running;
pub use service::{Service, Shape};
pub use settings::{Close, Serve, ServeError, Stall, validity};
