//! One connection: one request and its response; the live page and its updates.

use std::convert::Infallible;
use std::fmt;
use std::fs;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use http_body_util::channel::Channel;
use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderValue};
use hyper::http::uri::Authority;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use prometheus_client::registry::Registry;
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::exposition::endpoint::Limits;
use crate::exposition::text;

/// The maximum size of a request in bytes, which is the smallest that hyper permits. A longer request gets the status 431.
const MAX_REQUEST_BYTES: usize = 8 * 1024;
const OPENMETRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
const HTML: HeaderValue = HeaderValue::from_static("text/html; charset=utf-8");
const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

type Body = Either<Full<Bytes>, Channel<Bytes>>;

/// The content that the endpoint serves.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) registry: Registry,
    /// The live page; `None`: metrics only.
    pub(crate) page: Option<Page>,
    texts: Cache,
    pages: Cache,
}

impl Content {
    pub(crate) fn new(registry: Registry, page: Option<Page>) -> Content {
        Content { registry, page, texts: Cache::default(), pages: Cache::default() }
    }

    /// Returns the metrics: with a page of its latest reading, otherwise of this moment.
    fn metrics(&self) -> Result<Bytes, fmt::Error> {
        match &self.page {
            Some(page) => self.texts.get(page.reading(), || text(&self.registry)),
            None => text(&self.registry).map(Bytes::from),
        }
    }

    fn html(&self, page: &Page) -> Bytes {
        let made = self.pages.get(page.reading(), || Ok::<_, Infallible>(page.html()));
        made.unwrap_or_else(|never| match never {})
    }
}

/// Answers one request and closes the connection. At the deadline the connection is closed regardless of its progress.
pub(crate) async fn respond(stream: TcpStream, content: Arc<Content>, limits: Limits) {
    // An error of getsockname(2) counts as loopback, where more is refused.
    let is_local = stream.local_addr().map_or(true, |address| address.ip().to_canonical().is_loopback());
    let streams = Arc::new(AtomicBool::new(false));
    let found = Arc::clone(&streams);
    let service = service_fn(move |request: Request<Incoming>| {
        found.store(request.uri().path() == EVENTS, Ordering::Relaxed);
        let is_refused = is_local && !is_own(request.headers().get(HOST).map(HeaderValue::as_bytes));
        let response = match is_refused {
            true => plain(
                StatusCode::MISDIRECTED_REQUEST,
                "the name in the field Host is not of this host: use an address or localhost\n",
            ),
            false => response(&request, &content),
        };
        async { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(MAX_REQUEST_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    // A client that is too slow or sends no HTTP loses its connection; hyper has answered 400 where possible.
    let late = tokio::time::timeout(limits.deadline, connection.as_mut()).await.is_err();
    if late && streams.load(Ordering::Relaxed) {
        let _ = tokio::time::timeout(limits.stream_deadline, connection).await;
    }
}

/// Returns whether a request over loopback names this host: by an address, as localhost, by its own name, or not at all. A web page of
/// another host that lets its name resolve to 127.0.0.1 (DNS rebinding) could read the answer otherwise; its browser sends that name.
fn is_own(host: Option<&[u8]>) -> bool {
    let Some(host) = host else { return true };
    let Ok(authority) = Authority::try_from(host) else { return false };
    let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
    let address = name.trim_start_matches('[').trim_end_matches(']');
    let own = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    address.parse::<IpAddr>().is_ok()
        || name == "localhost"
        || name.ends_with(".localhost")
        || name == own.trim_end().to_ascii_lowercase()
}

/// The path of the event stream of the live page.
const EVENTS: &str = "/events";

fn response(request: &Request<Incoming>, content: &Content) -> Response<Body> {
    let path = request.uri().path();
    let page = content.page.as_ref();
    if !matches!((path, page), ("/metrics" | "/", _) | (EVENTS, Some(_))) {
        return plain(StatusCode::NOT_FOUND, "see /metrics\n");
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refused = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
        refused.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refused;
    }
    match (path, page) {
        ("/", Some(page)) => typed(HTML, Either::Left(Full::from(content.html(page)))),
        (EVENTS, Some(page)) => typed(EVENT_STREAM, Either::Right(events(page.updates()))),
        _ => match content.metrics() {
            Ok(page) => typed(OPENMETRICS, Either::Left(Full::from(page))),
            Err(_) => plain(StatusCode::INTERNAL_SERVER_ERROR, "a collector failed\n"),
        },
    }
}

fn typed(kind: HeaderValue, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response.headers_mut().insert(CACHE_CONTROL, NO_STORE);
    response
}

/// Returns a body with an event per update, until the client or the endpoint ends.
fn events(mut updates: watch::Receiver<Arc<str>>) -> Channel<Bytes> {
    let (mut sender, body) = Channel::new(1);
    tokio::spawn(async move {
        while updates.changed().await.is_ok() {
            let update = Arc::clone(&updates.borrow_and_update());
            if sender.send_data(Bytes::from(format!("data: {update}\n\n"))).await.is_err() {
                return;
            }
        }
    });
    body
}

fn plain(status: StatusCode, text: &'static str) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::from(text)));
    *response.status_mut() = status;
    response
}

/// The page of an endpoint: a function that renders its HTML, and the updates that it receives as server-sent events.
pub struct Page {
    render: Box<dyn Fn() -> String + Send + Sync>,
    updates: watch::Receiver<Arc<str>>,
    readings: Arc<AtomicU64>,
}

/// Sends updates to a [`Page`].
#[derive(Debug)]
pub struct Publisher {
    updates: watch::Sender<Arc<str>>,
    readings: Arc<AtomicU64>,
}

impl Page {
    /// Creates a page and its publisher. The endpoint calls `render`, and reads the metrics, at the first request after each call of
    /// [`Publisher::renew`]; other requests get the same text, so that clients in a loop cost little.
    pub fn new(render: impl Fn() -> String + Send + Sync + 'static) -> (Page, Publisher) {
        let (sender, updates) = watch::channel(Arc::from(""));
        let readings = Arc::new(AtomicU64::new(0));
        let page = Page { render: Box::new(render), updates, readings: Arc::clone(&readings) };
        (page, Publisher { updates: sender, readings })
    }

    /// Returns the number of calls of [`Publisher::renew`].
    pub(crate) fn reading(&self) -> u64 {
        self.readings.load(Ordering::Acquire)
    }

    pub(crate) fn html(&self) -> String {
        (self.render)()
    }

    /// Returns a receiver of later updates.
    pub(crate) fn updates(&self) -> watch::Receiver<Arc<str>> {
        let mut updates = self.updates.clone();
        updates.mark_unchanged();
        updates
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Page").finish_non_exhaustive()
    }
}

impl Publisher {
    /// Returns whether a browser reads updates.
    pub fn has_readers(&self) -> bool {
        // The page itself has a receiver.
        self.updates.receiver_count() > 1
    }

    /// Says that the page and the metrics have changed.
    pub fn renew(&self) {
        self.readings.fetch_add(1, Ordering::Release);
    }

    /// Sends an update to all browsers: a text without line ends, such as JSON. A browser that has not read the previous update
    /// gets the latest only.
    pub fn send(&self, update: String) {
        // Without receivers the endpoint has ended.
        let _ = self.updates.send(Arc::from(update));
    }
}

/// A text of the latest reading.
#[derive(Debug, Default)]
pub(crate) struct Cache(Mutex<Option<(u64, Bytes)>>);

impl Cache {
    /// Returns the text of a reading, which `make` makes once.
    pub(crate) fn get<E>(&self, reading: u64, make: impl FnOnce() -> Result<String, E>) -> Result<Bytes, E> {
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*cached {
            Some((of, text)) if *of == reading => Ok(text.clone()),
            _ => {
                let text = Bytes::from(make()?);
                *cached = Some((reading, text.clone()));
                Ok(text)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_hosts_are_told_from_own_ones() {
        let own = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        for host in [
            "127.0.0.1",
            "127.0.0.1:9416",
            "[::1]:9416",
            "LocalHost:80",
            "a.localhost.",
            "192.0.2.1",
            own.trim_end(),
        ] {
            assert!(is_own(Some(host.as_bytes())), "{host}");
        }
        assert!(is_own(None));
        for host in [
            "rebound.example:9416",
            "localhost.example",
            "127.0.0.1.example",
            "",
            "a b",
            "user@localhost.example",
        ] {
            assert!(!is_own(Some(host.as_bytes())), "{host}");
        }
    }
}
