//! A pool of workers behind one listener, and its clients; shared by `lab accept` and `lab keepalive`.
//!
//! The setup is a small version of "Keepalives considered harmful" (Cloudflare). Each worker serves one request at a time;
//! the clients are the upstream connections of a TLS terminator, each with one request in progress. Both speak HTTP/1.1, so
//! that the clients can also load nginx or haproxy: a request names the service time, and an answer may name the worker and
//! its timestamps.

pub(crate) mod address;
pub(crate) mod client;
pub(crate) mod matrix;
pub(crate) mod mix;
pub(crate) mod run;
pub(crate) mod series;
pub(crate) mod sums;
pub(crate) mod timeline;
pub(crate) mod wire;
pub(crate) mod words;
pub(crate) mod worker;
pub(crate) mod workers;

pub use matrix::Selection;
pub use mix::{Mix, Spend};
