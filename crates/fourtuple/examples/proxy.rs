//! A reverse proxy: `cargo run -p fourtuple --features hyper --example proxy -- LISTEN UPSTREAM`, as in
//! `-- 127.0.0.1:8080 127.0.0.1:8000`. Each request goes to UPSTREAM, over connections that the proxy keeps. Each processor has a worker
//! with its own runtime. SIGTERM ends the proxy when the requests in progress have their responses, after 10 s at most.
#![forbid(unsafe_code)]

use std::env;
use std::error::Error;
use std::net::SocketAddr;
use std::process;
use std::thread;
use std::time::Duration;

use fourtuple::dial::{ConnectError, Connector};
use fourtuple::listen::{AsyncAcceptor, ListenError, ListenerGroup, ListenerGroupBuilder, Workers};
use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONNECTION, HeaderMap, HeaderValue};
use hyper::server::conn::http1;
use hyper::{Request, Response, StatusCode, Uri, http, service::service_fn};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};

type Upstream = Client<Connector, Incoming>;
type Answer = Response<Either<Incoming, Full<Bytes>>>;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let (Some(listen), Some(upstream)) = (arguments.next(), arguments.next()) else {
        return Err("usage: proxy LISTEN UPSTREAM".into());
    };
    let workers = thread::available_parallelism()?.get();
    let group = ListenerGroupBuilder::at(listen.parse::<SocketAddr>()?);
    let group = group.workers(Workers::Runtimes).max_workers(workers).open()?;
    // The clones of the connector share what they know of the source ports.
    let connector = Connector::new();
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                work(&group, &connector, &upstream).unwrap_or_else(|error| {
                    eprintln!("{error}");
                    process::exit(1)
                });
            });
        }
        runtime()?.block_on(async {
            signal(SignalKind::terminate())?.recv().await;
            group.drain_tokio(Duration::from_secs(10)).await?;
            Ok(())
        })
    })
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// Serves the connections of one worker until the group is drained.
fn work(group: &ListenerGroup, connector: &Connector, upstream: &str) -> Result<(), Box<dyn Error>> {
    let client: Upstream = Client::builder(TokioExecutor::new()).build(connector.clone());
    runtime()?.block_on(async {
        let mut acceptor = AsyncAcceptor::new(group.join()?)?;
        loop {
            let stream = match acceptor.accept().await {
                Err(ListenError::Drained) => return Ok(()),
                accepted => accepted?,
            };
            let (client, upstream, session) = (client.clone(), upstream.to_owned(), stream.handle());
            let service = service_fn(move |request| {
                let (client, upstream, session) = (client.clone(), upstream.clone(), session.clone());
                async move {
                    let mut response = forward(client, upstream, request).await?;
                    session.response_sent();
                    if session.should_close() {
                        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                    }
                    Ok::<_, http::Error>(response)
                }
            });
            // A client may close its connection in the middle of a request. The timer limits the time for the head of a request.
            let mut server = http1::Builder::new();
            tokio::spawn(server.timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service));
        }
    })
}

async fn forward(
    client: Upstream,
    upstream: String,
    mut request: Request<Incoming>,
) -> Result<Answer, http::Error> {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = Uri::builder().scheme("http").authority(upstream).path_and_query(path).build()?;
    remove_hop_by_hop(request.headers_mut());
    match client.request(request).await {
        Ok(mut response) => {
            remove_hop_by_hop(response.headers_mut());
            Ok(response.map(Either::Left))
        }
        Err(error) => {
            let reason = error.source().and_then(|source| source.downcast_ref::<ConnectError>());
            let exhausted = reason.is_some_and(ConnectError::is_exhausted);
            let status = if exhausted { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::BAD_GATEWAY };
            let text = reason.map_or_else(|| chain(&error), |reason| chain(reason));
            Response::builder().status(status).body(Either::Right(Full::new(text.into())))
        }
    }
}

/// Removes the fields that belong to one connection (RFC 9110, section 7.6.1).
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let named: Vec<String> =
        values.flat_map(|value| value.split(',')).map(|name| name.trim().to_owned()).collect();
    let always = ["connection", "keep-alive", "proxy-connection", "te", "transfer-encoding", "upgrade"];
    for name in named.iter().map(String::as_str).chain(always) {
        headers.remove(name);
    }
}

/// Returns the text of an error and of its sources.
fn chain(error: &dyn Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {}", chain(source)))
}
