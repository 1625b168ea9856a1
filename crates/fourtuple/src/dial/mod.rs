//! Dialing: a source port chosen well, and failures told apart.
//!
//! [`Dialer`] opens TCP connections, [`UdpDialer`] connected UDP sockets. What they leave alone: names are not resolved,
//! connections are not pooled, nothing on the host is changed, and no thread is started.

mod attempt;
mod book;
mod builder;
mod census;
mod dialer;
mod error;
mod random;
mod report;
mod rooms;
mod source;
pub mod strategy;
#[cfg(feature = "tokio")]
mod tokio;
mod udp;

pub use attempt::{Attempt, Retry, Wanted};
pub use builder::{Builder, Choice};
pub use dialer::Dialer;
pub use error::{BuildError, Census, DialError};
pub use report::DialReport;
pub use source::{MOST_SOURCES, SourceError, SourcePool};
pub use strategy::{Step, Strategy};
pub use udp::{Sharing, UdpDialer};
