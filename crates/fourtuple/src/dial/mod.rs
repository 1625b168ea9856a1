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
#[cfg(feature = "tokio")]
mod connector;
mod dialer;
mod error;
mod ledger;
pub mod strategy;
#[cfg(feature = "tokio")]
mod tokio;
mod udp;

pub use attempt::{Attempt, ConnectRequest, Retry};
pub use builder::{DialerBuilder, StrategyChoice};
pub use builder::{MAX_SOURCES, SourceError, SourcePool};
#[cfg(feature = "tokio")]
pub use connector::{
    ConnectError, Connector, ConnectorBuilder, DialedStream, Resolve, Resolving, SystemResolver,
};
pub use dialer::{DialReport, Dialer, GuardedStream};
pub use error::{BuildError, Census, DialError, Uncounted, Unseen};
pub use strategy::{Step, Strategy};
#[cfg(feature = "tokio")]
pub use tokio::Dialers;
pub use udp::{Sharing, UdpDialer};
