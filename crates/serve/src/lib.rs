//! The other side of a measurement: small servers, and what each of their workers did.
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
//! Sockets are made by the thread that calls [`Serve::start`], and workers are threads that it starts: in its network
//! namespace, on the processors it may use.
#![forbid(unsafe_code)]

mod connection;
mod counts;
mod datagrams;
mod error;
mod listener;
mod pooled;
mod running;
mod seat;
mod serve;
mod service;
mod slab;
mod stop;
mod talk;
mod validity;
mod work;
mod worker;

pub use error::ServeError;
pub use running::Running;
pub use serve::{Close, Protocol, Serve, Stall};
pub use service::{Service, Shape};
pub use validity::validity;
