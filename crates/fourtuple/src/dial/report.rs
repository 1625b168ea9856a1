use std::net::SocketAddr;
use std::time::Duration;

use super::strategy::Strategy;

/// How a connection came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DialReport {
    /// The strategy that was used; for [`Strategy::Auto`], what it chose.
    pub strategy: Strategy,
    /// Source address and port.
    pub source: SocketAddr,
    /// Calls of bind() or connect() that were made for a port, the successful one included: at least 1.
    pub attempts: u32,
    /// Time in connect(), and in bind() where a port was bound by number, over all attempts. Blocking dials without a
    /// timeout spend the handshake in there too.
    pub connect: Duration,
    /// Time waited for the handshake after a connect() that did not block.
    pub handshake: Duration,
}
