use std::net::SocketAddr;
use std::time::Duration;

use crate::dial::strategy::Strategy;

/// The source port of a connection, and the time it took to get it.
///
/// Example: [`Dialer`](super::Dialer).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DialReport {
    /// The strategy of the dial; for [`Strategy::Auto`] the strategy that the dialer chose, or
    /// [`Strategy::KernelDefault`] while few ports are in use.
    pub strategy: Strategy,
    /// Source address and port.
    pub source: SocketAddr,
    /// Calls of bind() or connect() to get a port, the successful call included: at least 1.
    pub attempts: u32,
    /// Time in connect(), and in bind() to a port, over all attempts. In a blocking dial without a timeout this includes the
    /// handshake.
    pub connect: Duration,
    /// Time waited for the handshake after a non-blocking connect().
    pub handshake: Duration,
}
