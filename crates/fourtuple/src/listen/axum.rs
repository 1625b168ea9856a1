//! The acceptor as the listener of `axum::serve`.

use std::future;
use std::io;
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::time;

use crate::listen::accepted_stream::{AcceptedStream, SessionHandle, StreamAddr};
use crate::listen::error::ListenError;
use crate::listen::tokio::AsyncAcceptor;

/// Pause after an accept() that failed. The trait cannot return the error.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves the connections of a worker with axum.
///
/// The trait cannot return an error: after a failed accept() the listener calls the function of [`AsyncAcceptor::on_error`], waits
/// 100 ms and tries again. After a [drain](crate::listen::ListenerGroup::drain) it returns
/// no further connection; `with_graceful_shutdown` ends the server. Needs a runtime with I/O and time enabled.
///
/// ```no_run
/// use axum::{Router, routing::get};
/// use fourtuple::listen::{AsyncAcceptor, Endpoint, ListenerGroupBuilder};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let app = Router::new().route("/", get(|| async { "hello" }));
/// let group = ListenerGroupBuilder::at(Endpoint::Inet("127.0.0.1:8080".parse()?)).open()?;
/// axum::serve(AsyncAcceptor::new(group.join()?)?, app).await?;
/// # Ok(()) }
/// ```
impl Listener for AsyncAcceptor {
    type Io = AcceptedStream;
    type Addr = StreamAddr;

    async fn accept(&mut self) -> (AcceptedStream, StreamAddr) {
        loop {
            match AsyncAcceptor::accept(self).await {
                Ok(accepted) => {
                    let stream = accepted.into_stream();
                    // Without an address the client has already reset the connection.
                    if let Ok(address) = stream.peer_addr() {
                        return (stream, address);
                    }
                }
                Err(ListenError::Drained) => future::pending().await,
                Err(error) => {
                    (self.on_error)(&error);
                    time::sleep(PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<StreamAddr> {
        Ok(match self.group().endpoint() {
            crate::listen::Endpoint::Inet(address) => StreamAddr::Tcp(*address),
            crate::listen::Endpoint::Unix(path) => StreamAddr::Unix(Some(path.clone())),
        })
    }
}

impl AsyncAcceptor {
    /// Sets a function that the listener of `axum::serve` calls with each error, for example to log it. By default the listener drops
    /// errors.
    #[must_use]
    pub fn on_error(mut self, report: fn(&ListenError)) -> AsyncAcceptor {
        self.on_error = report;
        self
    }
}

/// The address of the client, for `ConnectInfo<StreamAddr>` in handlers.
impl Connected<IncomingStream<'_, AsyncAcceptor>> for StreamAddr {
    fn connect_info(stream: IncomingStream<'_, AsyncAcceptor>) -> StreamAddr {
        stream.remote_addr().clone()
    }
}

/// The session of the connection, for `ConnectInfo<SessionHandle>` in handlers and middleware: counts requests, and closes
/// connections for [`Recycle`](crate::listen::Recycle) and a drain.
///
/// ```
/// use axum::extract::{ConnectInfo, Request};
/// use axum::http::header::{CONNECTION, HeaderValue};
/// use axum::{Router, middleware, middleware::Next, response::Response, routing::get};
/// use fourtuple::listen::SessionHandle;
///
/// async fn count(ConnectInfo(session): ConnectInfo<SessionHandle>, request: Request, next: Next) -> Response {
///     let mut response = next.run(request).await;
///     if session.is_last() {
///         response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
///     }
///     session.answered();
///     response
/// }
///
/// let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(middleware::from_fn(count));
/// let app = app.into_make_service_with_connect_info::<SessionHandle>();
/// # drop(app);
/// ```
impl Connected<IncomingStream<'_, AsyncAcceptor>> for SessionHandle {
    fn connect_info(stream: IncomingStream<'_, AsyncAcceptor>) -> SessionHandle {
        stream.io().session_handle()
    }
}
