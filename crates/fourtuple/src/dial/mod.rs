//! Dialers: they find a free source port quickly, open the connection, and report each cause of a failure separately.
//!
//! [`Dialer`] opens TCP connections, [`UdpDialer`] connected UDP sockets. They keep no pool of connections,
//! change nothing on the host, and start no threads. Example: [`Dialer`].
//!
#![cfg_attr(
    feature = "tokio",
    doc = "With the feature `tokio`, [`Dialers`] keeps a dialer per destination, and [`Connector`] connects to host names."
)]
#![cfg_attr(
    not(feature = "tokio"),
    doc = "With the feature `tokio`, `Dialers` keeps a dialer per destination, and `Connector` connects to host names."
)]

mod attempt;
mod builder;
mod census;
#[cfg(feature = "tokio")]
mod connect_error;
#[cfg(feature = "tokio")]
mod connector;
#[cfg(feature = "tokio")]
mod dialed_stream;
mod dialer;
#[cfg(feature = "tokio")]
mod dialers;
mod error;
mod events;
mod guarded_stream;
#[cfg(feature = "tokio")]
mod happy_eyeballs;
#[cfg(feature = "hyper")]
mod hyper;
mod ledger;
mod random;
mod rank_tree;
mod report;
#[cfg(feature = "tokio")]
mod resolve;
mod source;
pub mod strategy;
#[cfg(feature = "tokio")]
mod tokio;
mod udp;

pub use attempt::{Attempt, ConnectRequest, Retry};
pub use builder::{DialerBuilder, StrategyChoice};
#[cfg(feature = "tokio")]
pub use connect_error::ConnectError;
#[cfg(feature = "tokio")]
pub use connector::{Connector, ConnectorBuilder};
#[cfg(feature = "tokio")]
pub use dialed_stream::DialedStream;
pub use dialer::Dialer;
#[cfg(feature = "tokio")]
pub use dialers::Dialers;
pub use error::{BuildError, Census, DialError, Uncounted, Unseen};
pub use guarded_stream::GuardedStream;
pub use report::DialReport;
#[cfg(feature = "tokio")]
pub use resolve::{Resolve, Resolving, SystemResolver};
pub use source::{MAX_SOURCES, SourceError, SourcePool};
pub use strategy::{Step, Strategy};
pub use udp::{Sharing, UdpDialer};
