//! The connector as a service for the client of hyper-util.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Uri;
use http::uri::Scheme;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tower_service::Service;

use crate::dial::connect_error::ConnectError;
use crate::dial::connector::Connector;
use crate::dial::dialed_stream::DialedStream;

/// Connects to the host and the port of the URI; without a port to 80, or to 443 for `https` and `wss`.
///
/// The extensions of each HTTP response contain the [`DialReport`](super::DialReport) of its connection.
impl Service<Uri> for Connector {
    type Response = TokioIo<DialedStream>;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connector = self.clone();
        Box::pin(async move {
            if connector.enforce_http && uri.scheme().is_some_and(|scheme| *scheme != Scheme::HTTP) {
                return Err(ConnectError::NotHttp { uri: uri.to_string() });
            }
            let Some(host) = uri.host() else { return Err(ConnectError::NoHost { uri: uri.to_string() }) };
            // An IPv6 address is in brackets.
            let host = host.trim_start_matches('[').trim_end_matches(']');
            let default_port = if matches!(uri.scheme_str(), Some("https" | "wss")) { 443 } else { 80 };
            let port = uri.port_u16().unwrap_or(default_port);
            connector.connect(host, port).await.map(TokioIo::new)
        })
    }
}

impl Connection for DialedStream {
    fn connected(&self) -> Connected {
        Connected::new().extra(self.report())
    }
}
