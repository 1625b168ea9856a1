use std::fmt;
use std::io;
use std::time::Duration;

use crate::dial::error::{BuildError, DialError};

/// A failure of a [`Connector`](super::Connector).
///
/// The client of hyper-util returns this error as the source of its own error:
///
#[cfg_attr(feature = "hyper", doc = "```")]
#[cfg_attr(not(feature = "hyper"), doc = "```ignore")]
/// use fourtuple::dial::ConnectError;
/// use std::error::Error;
///
/// fn is_exhausted(error: &hyper_util::client::legacy::Error) -> bool {
///     let source = error.source().and_then(|source| source.downcast_ref::<ConnectError>());
///     source.is_some_and(ConnectError::is_exhausted)
/// }
/// # let _ = is_exhausted;
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The URI has no host.
    #[error("the URI {uri:?} has no host; expected http://HOST[:PORT]/PATH")]
    #[non_exhaustive]
    NoHost {
        /// The URI.
        uri: String,
    },
    /// The URI has another scheme than `http`.
    #[error("the URI {uri:?} has another scheme than http; a TLS layer needs enforce_http(false)")]
    #[non_exhaustive]
    NotHttp {
        /// The URI.
        uri: String,
    },
    /// The resolver failed.
    #[error("cannot resolve the name {host}")]
    #[non_exhaustive]
    Resolve {
        /// The host.
        host: String,
        /// The error of the resolver.
        #[source]
        error: io::Error,
    },
    /// The resolver returned no address.
    #[error("the name {host} has no address")]
    #[non_exhaustive]
    NoAddress {
        /// The host.
        host: String,
    },
    /// The time limit passed during the resolution or the connection.
    #[error("no connection to {host} port {port} within {after:?}")]
    #[non_exhaustive]
    TimedOut {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// The time limit.
        after: Duration,
    },
    /// The dialer of the address could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The connection to the only address failed.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The connections to all addresses of a name failed.
    #[error("no address of {host} could be connected: {}", List(failures))]
    #[non_exhaustive]
    AllFailed {
        /// The host.
        host: String,
        /// The failure of each address, in the order of their occurrence: at least 2.
        failures: Vec<ConnectError>,
    },
}

impl ConnectError {
    /// Makes the error of a name from the failures of its addresses.
    pub(super) fn of_addresses(host: &str, mut failures: Vec<ConnectError>) -> ConnectError {
        match failures.len() {
            0 => ConnectError::NoAddress { host: host.to_owned() },
            1 => failures.remove(0),
            _ => ConnectError::AllFailed { host: host.to_owned(), failures },
        }
    }

    /// Returns the kind of [`io::Error`] that fits. For [`ConnectError::AllFailed`] this is the kind of the first failure.
    ///
    /// ```
    /// use std::io;
    /// use fourtuple::dial::Connector;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let error = Connector::new().connect_to("127.0.0.1:1".parse()?).await.unwrap_err();
    /// assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    /// assert!(error.is_retryable() && !error.is_exhausted());
    /// # Ok(()) }
    /// ```
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            ConnectError::NoHost { .. } | ConnectError::NotHttp { .. } => io::ErrorKind::InvalidInput,
            ConnectError::Resolve { error, .. } => error.kind(),
            ConnectError::NoAddress { .. } => io::ErrorKind::NotFound,
            ConnectError::TimedOut { .. } => io::ErrorKind::TimedOut,
            ConnectError::Build(error) => error.kind(),
            ConnectError::Dial(error) => error.kind(),
            ConnectError::AllFailed { failures, .. } => {
                failures.first().map_or(io::ErrorKind::Other, ConnectError::kind)
            }
        }
    }

    /// Returns whether an address failed because no source port was free: [`DialError::is_exhausted`].
    pub fn is_exhausted(&self) -> bool {
        match self {
            ConnectError::Dial(error) => error.is_exhausted(),
            ConnectError::AllFailed { failures, .. } => failures.iter().any(ConnectError::is_exhausted),
            _ => false,
        }
    }

    /// Returns whether the same connect may succeed later without a change of the settings: the resolver failed or the time limit
    /// passed, or [`DialError::is_retryable`] or [`BuildError::is_retryable`] is true for an address.
    pub fn is_retryable(&self) -> bool {
        match self {
            ConnectError::Resolve { .. } | ConnectError::TimedOut { .. } => true,
            ConnectError::Build(error) => error.is_retryable(),
            ConnectError::Dial(error) => error.is_retryable(),
            ConnectError::AllFailed { failures, .. } => failures.iter().any(ConnectError::is_retryable),
            ConnectError::NoHost { .. } | ConnectError::NotHttp { .. } | ConnectError::NoAddress { .. } => {
                false
            }
        }
    }
}

impl From<ConnectError> for io::Error {
    fn from(error: ConnectError) -> io::Error {
        io::Error::new(error.kind(), error)
    }
}

/// Displays errors with their sources, because `source()` can return only one error.
struct List<'a>(&'a [ConnectError]);

impl fmt::Display for List<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            if index > 0 {
                formatter.write_str("; ")?;
            }
            error.fmt(formatter)?;
            let mut source = std::error::Error::source(error);
            while let Some(error) = source {
                write!(formatter, ": {error}")?;
                source = error.source();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fourtuple_syscalls::Errno;

    use super::*;

    #[test]
    fn a_build_without_descriptors_is_retryable() {
        let range = |error| ConnectError::from(BuildError::Range { error });
        assert!(range(io::Error::from(Errno::EMFILE)).is_retryable());
        assert!(!range(io::ErrorKind::NotFound.into()).is_retryable());
        assert!(!ConnectError::from(BuildError::SourcePort).is_retryable());
    }
}
