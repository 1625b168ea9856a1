//! Events of dials, for the crate tracing. Without the feature `tracing` these functions do nothing.

use std::net::SocketAddr;

use crate::dial::error::DialError;
use crate::dial::report::DialReport;

/// Reports the end of a dial as an event of level DEBUG.
pub(super) fn ended<T>(
    destination: SocketAddr,
    result: Result<(T, DialReport), DialError>,
) -> Result<(T, DialReport), DialError> {
    #[cfg(feature = "tracing")]
    match &result {
        Ok((_, report)) => tracing::debug!(
            %destination,
            source = %report.source,
            attempts = report.attempts,
            strategy = %report.strategy,
            connect_ns = u64::try_from(report.connect.as_nanos()).unwrap_or(u64::MAX),
            handshake_ns = u64::try_from(report.handshake.as_nanos()).unwrap_or(u64::MAX),
            "connected"
        ),
        Err(error) => tracing::debug!(%destination, %error, "dial failed"),
    }
    #[cfg(not(feature = "tracing"))]
    let _ = destination;
    result
}
