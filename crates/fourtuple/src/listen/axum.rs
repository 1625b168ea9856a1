//! The acceptor as the listener of `axum::serve`.

use std::convert::Infallible;
use std::future::{self, Future};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::http::header::{CONNECTION, CONTENT_LENGTH, HeaderValue, TRANSFER_ENCODING, UPGRADE};
use axum::http::{Method, StatusCode, Version};
use axum::response::Response;
use axum::serve::{IncomingStream, Listener};
use tokio::time;
use tower_service::Service;

use crate::listen::ListenError;
use crate::listen::async_connection::{AsyncConnection, ConnectionHandle, StreamAddr};
use crate::listen::tokio::{AsyncAcceptor, OnError, Session};

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
/// use fourtuple::listen::{AsyncAcceptor, ListenerGroupBuilder, Workers};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let app = Router::new().route("/", get(|| async { "hello" }));
/// let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 8080)).workers(Workers::Runtimes).open()?;
/// axum::serve(AsyncAcceptor::new(group.join()?)?, app).await?;
/// # Ok(()) }
/// ```
impl Listener for AsyncAcceptor {
    type Io = AsyncConnection;
    type Addr = StreamAddr;

    async fn accept(&mut self) -> (AsyncConnection, StreamAddr) {
        loop {
            match AsyncAcceptor::accept(self).await {
                Ok(accepted) => {
                    let stream = accepted;
                    // Without an address the client has already reset the connection.
                    if let Ok(address) = stream.peer_addr() {
                        return (stream, address);
                    }
                }
                Err(ListenError::Drained) => future::pending().await,
                Err(error) => {
                    self.on_error.report(&error);
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
    ///
    /// ```no_run
    /// # async fn example(app: axum::Router, acceptor: fourtuple::listen::AsyncAcceptor) -> std::io::Result<()> {
    /// let acceptor = acceptor.on_error(|error| eprintln!("cannot accept: {error}"));
    /// axum::serve(acceptor, app).await
    /// # }
    /// ```
    #[must_use]
    pub fn on_error(mut self, report: impl Fn(&ListenError) + Send + Sync + 'static) -> AsyncAcceptor {
        self.on_error = OnError::new(report);
        self
    }
}

/// The address of the client, for `ConnectInfo<StreamAddr>` in handlers.
impl Connected<IncomingStream<'_, AsyncAcceptor>> for StreamAddr {
    fn connect_info(stream: IncomingStream<'_, AsyncAcceptor>) -> StreamAddr {
        stream.remote_addr().clone()
    }
}

/// The session of the connection, for `ConnectInfo<ConnectionHandle>` in handlers and middleware: counts requests, and closes
/// connections for [`Recycle`](crate::listen::Recycle) and a drain. [`by_request`] does both without a middleware.
///
/// ```
/// use axum::extract::{ConnectInfo, Request};
/// use axum::http::header::{CONNECTION, HeaderValue};
/// use axum::{Router, middleware, middleware::Next, response::Response, routing::get};
/// use fourtuple::listen::ConnectionHandle;
///
/// async fn count(ConnectInfo(session): ConnectInfo<ConnectionHandle>, request: Request, next: Next) -> Response {
///     let mut response = next.run(request).await;
///     if session.should_close() {
///         response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
///     }
///     session.response_sent();
///     response
/// }
///
/// let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(middleware::from_fn(count));
/// let app = app.into_make_service_with_connect_info::<ConnectionHandle>();
/// # drop(app);
/// ```
impl Connected<IncomingStream<'_, AsyncAcceptor>> for ConnectionHandle {
    fn connect_info(stream: IncomingStream<'_, AsyncAcceptor>) -> ConnectionHandle {
        stream.io().handle()
    }
}

/// Serves a router so that each request reaches an idle worker, on kept connections too: with
/// [`SharedOneshot`](crate::listen::AcceptPolicy::SharedOneshot) a connection returns to its group after each response, and any idle
/// worker gets its next request. Without it a connection stays with the worker that accepted it, and its requests wait while that worker
/// blocks, even if other workers are idle.
///
/// The service also counts requests, closes connections for [`Recycle`](crate::listen::Recycle) and a drain, and gives handlers
/// `ConnectInfo<StreamAddr>`.
///
/// A connection stays with its worker under HTTP/2, after an upgrade, after a request with a chunked body or one whose body the handler
/// has not read, and while a client sends requests without waiting for responses (pipelining). Each request costs a task of hyper and
/// four calls of epoll_ctl(2).
///
/// ```no_run
/// use axum::{Router, routing::get};
/// use fourtuple::listen::{AcceptPolicy, AsyncAcceptor, ListenerGroupBuilder, Workers, by_request};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let app = Router::new().route("/", get(|| async { "hello" }));
/// let group = ListenerGroupBuilder::at(([127, 0, 0, 1], 8080))
///     .workers(Workers::Runtimes)
///     .policy(AcceptPolicy::SharedOneshot)
///     .open()?;
/// axum::serve(AsyncAcceptor::new(group.join()?)?, by_request(app)).await?; // in each runtime
/// # Ok(()) }
/// ```
pub fn by_request(app: Router) -> ByRequest {
    ByRequest { app: app.with_state(()) }
}

/// Makes a service for each connection. Example: [`by_request`].
#[derive(Clone, Debug)]
pub struct ByRequest {
    app: Router,
}

impl Service<IncomingStream<'_, AsyncAcceptor>> for ByRequest {
    type Response = CountedRequests;
    type Error = Infallible;
    type Future = future::Ready<Result<CountedRequests, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, stream: IncomingStream<'_, AsyncAcceptor>) -> Self::Future {
        let session = stream.io().handle();
        future::ready(Ok(CountedRequests {
            app: self.app.clone(),
            session,
            address: stream.remote_addr().clone(),
        }))
    }
}

/// The service of one connection. Example: [`by_request`].
#[derive(Clone, Debug)]
pub struct CountedRequests {
    app: Router,
    session: ConnectionHandle,
    address: StreamAddr,
}

impl Service<Request> for CountedRequests {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        let session = self.session.session();
        if let Some(session) = &session {
            session.turn.begin(length_of_body(&request));
        }
        request.extensions_mut().insert(ConnectInfo(self.address.clone()));
        let response = self.app.call(request);
        Box::pin(async move {
            let Ok(mut response) = response.await;
            if let Some(session) = session {
                if session.should_close() {
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                session.response_sent();
                if response.status() == StatusCode::SWITCHING_PROTOCOLS
                    || response.headers().contains_key(CONNECTION)
                {
                    session.turn.stay();
                }
                response = response.map(|body| Body::new(CountedBody { body, _turn: EndOfTurn(session) }));
            }
            Ok(response)
        })
    }
}

/// Returns the length of the body of a request after whose response the connection may return to its group.
fn length_of_body(request: &Request) -> Option<u64> {
    let headers = request.headers();
    let stays = request.version() != Version::HTTP_11
        || request.method() == Method::CONNECT
        || headers.contains_key(TRANSFER_ENCODING)
        || headers.contains_key(UPGRADE)
        || headers
            .get_all(CONNECTION)
            .iter()
            .any(|value| !value.as_bytes().eq_ignore_ascii_case(b"keep-alive"));
    if stays {
        return None;
    }
    headers.get(CONTENT_LENGTH).map_or(Some(0), |length| length.to_str().ok()?.parse().ok())
}

/// Ends the turn of a connection when hyper drops the body of the response.
struct EndOfTurn(Arc<Session>);

impl Drop for EndOfTurn {
    fn drop(&mut self) {
        self.0.turn.answer();
    }
}

struct CountedBody {
    body: Body,
    _turn: EndOfTurn,
}

impl HttpBody for CountedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}
