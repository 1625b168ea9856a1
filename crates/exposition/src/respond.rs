//! One connection: one request and its response.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use prometheus_client::registry::Registry;
use tokio::net::TcpStream;

use crate::family::text;

/// The maximum size of a request in bytes, which is the smallest that hyper permits. A longer request gets the status 431.
const LONGEST_REQUEST: usize = 8 * 1024;
const OPENMETRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");

/// Answers one request and closes the connection. At the deadline the connection is closed regardless of its progress.
pub(crate) async fn respond(stream: TcpStream, registry: Arc<Registry>, deadline: Duration) {
    let service = service_fn(move |request: Request<Incoming>| {
        let response = response(&request, &registry);
        async { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(LONGEST_REQUEST)
        .serve_connection(TokioIo::new(stream), service);
    // A client that is too slow or sends no HTTP loses its connection; hyper has answered 400 where possible.
    let _ = tokio::time::timeout(deadline, connection).await;
}

fn response(request: &Request<Incoming>, registry: &Registry) -> Response<Full<Bytes>> {
    if !matches!(request.uri().path(), "/metrics" | "/") {
        return plain(StatusCode::NOT_FOUND, "see /metrics\n");
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refused = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    match text(registry) {
        Ok(page) => {
            let mut response = Response::new(Full::from(page));
            response.headers_mut().insert(CONTENT_TYPE, OPENMETRICS);
            response
        }
        Err(_) => plain(StatusCode::INTERNAL_SERVER_ERROR, "a collector failed\n"),
    }
}

fn plain(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response
}
