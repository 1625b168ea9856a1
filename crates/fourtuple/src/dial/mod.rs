//! Dialers: they find a free source port quickly, open the connection, and report each cause of a failure separately.
//!
//! [`Dialer`] opens TCP connections, [`UdpDialer`] connected UDP sockets. They resolve no names, keep no pool of connections, change
//! nothing on the host, and start no threads.

mod attempt;
mod builder;
mod census;
mod dialer;
mod error;
mod ledger;
mod random;
mod rank_tree;
mod report;
mod source;
pub mod strategy;
#[cfg(feature = "tokio")]
mod tokio;
mod udp;

pub use attempt::{Attempt, ConnectRequest, Retry};
pub use builder::{DialerBuilder, StrategyChoice};
pub use dialer::Dialer;
pub use error::{BuildError, Census, DialError, Uncounted, Unseen};
pub use report::DialReport;
pub use source::{MOST_SOURCES, SourceError, SourcePool};
pub use strategy::{Step, Strategy};
pub use udp::{Sharing, UdpDialer};
