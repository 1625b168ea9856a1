use std::fmt;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::pin::Pin;

use crate::blocking_thread;

/// The future of a name resolution.
///
/// Example: [`Resolve::resolve`].
pub type Resolving<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'a>>;

/// Resolves host names for a [`Connector`](super::Connector).
///
/// The addresses must be in the order of preference (RFC 6724), the most preferred first. A function of a host and a port is a
/// resolver too:
///
/// ```
/// use fourtuple::dial::Connector;
/// use std::net::SocketAddr;
///
/// let connector = Connector::builder()
///     .resolver(|host: String, port: u16| async move {
///         match host.as_str() {
///             "backend" => Ok(vec![SocketAddr::from(([127, 0, 0, 1], port))]),
///             _ => Err(std::io::ErrorKind::NotFound.into()),
///         }
///     })
///     .build();
/// # drop(connector);
/// ```
pub trait Resolve: Send + Sync + 'static {
    /// Returns the socket addresses of `host` with `port`.
    ///
    /// # Errors
    ///
    /// Any error of the name service. An empty list means that the name has no address.
    ///
    /// # Examples
    ///
    /// ```
    /// use fourtuple::dial::{Connector, Resolve, Resolving, SystemResolver};
    ///
    /// /// Resolves one name itself, and passes all others to the system.
    /// struct WithProxy;
    ///
    /// impl Resolve for WithProxy {
    ///     fn resolve<'a>(&'a self, host: &'a str, port: u16) -> Resolving<'a> {
    ///         match host {
    ///             "proxy" => Box::pin(async move { Ok(vec![([127, 0, 0, 1], port).into()]) }),
    ///             _ => SystemResolver.resolve(host, port),
    ///         }
    ///     }
    /// }
    ///
    /// let connector = Connector::builder().resolver(WithProxy).build();
    /// # drop(connector);
    /// ```
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> Resolving<'a>;
}

impl<F, R> Resolve for F
where
    F: Fn(String, u16) -> R + Send + Sync + 'static,
    R: Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'static,
{
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> Resolving<'a> {
        Box::pin(self(host.to_owned(), port))
    }
}

/// The resolver of the C library: getaddrinfo(3) on a blocking thread of the tokio runtime, without a cache.
///
/// Example: [`Resolve::resolve`].
#[derive(Clone, Copy, Debug, Default)]
#[allow(clippy::exhaustive_structs, reason = "has no state")]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> Resolving<'a> {
        Box::pin(async move {
            if let Ok(address) = host.parse::<IpAddr>() {
                return Ok(vec![SocketAddr::new(address, port)]);
            }
            let host = host.to_owned();
            blocking_thread::run(move || Ok((host, port).to_socket_addrs()?.collect())).await?
        })
    }
}

/// Displays a resolver in `Debug` output, because functions have no `Debug`.
pub(super) struct Opaque;

impl fmt::Debug for Opaque {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("..")
    }
}
