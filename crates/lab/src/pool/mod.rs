//! A pool of workers behind one listener, and the clients that ask it: what `lab accept` and `lab keepalive` share.
//!
//! It is the set-up of seed 001 ("Keepalives considered harmful") in small. The workers serve one request at a time to its
//! end; the clients are the upstream connections of a terminator, each with one request under way. Both speak HTTP/1.1, so
//! that the clients can be sent to nginx or haproxy as well: a request names the work that it wants done, an answer may
//! tell which worker did it, and when.

pub(crate) mod client;
pub(crate) mod matrix;
pub(crate) mod mix;
pub(crate) mod place;
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
