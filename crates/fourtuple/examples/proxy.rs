//! A reverse proxy: `cargo run -p fourtuple --features hyper --example proxy -- LISTEN UPSTREAM`, as in
//! `-- 127.0.0.1:8080 127.0.0.1:8000`. Each request goes to UPSTREAM, over connections that the proxy keeps.
#![forbid(unsafe_code)]

use std::env;
use std::error::Error;

use fourtuple::dial::{ConnectError, Connector};
use fourtuple::listen::{AsyncAcceptor, Endpoint, ListenerGroupBuilder};
use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONNECTION, TE, TRANSFER_ENCODING, UPGRADE};
use hyper::server::conn::http1;
use hyper::{Request, Response, StatusCode, Uri, service::service_fn};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo};

type Upstream = Client<Connector, Incoming>;
type Answer = Response<Either<Incoming, Full<Bytes>>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let (Some(listen), Some(upstream)) = (arguments.next(), arguments.next()) else {
        return Err("usage: proxy LISTEN UPSTREAM".into());
    };
    let client: Upstream = Client::builder(TokioExecutor::new()).build(Connector::new());
    let group = ListenerGroupBuilder::at(Endpoint::Inet(listen.parse()?)).open()?;
    let mut acceptor = AsyncAcceptor::new(group.join()?)?;
    loop {
        let stream = TokioIo::new(acceptor.accept().await?.into_stream());
        let (client, upstream) = (client.clone(), upstream.clone());
        let service = service_fn(move |request| forward(client.clone(), upstream.clone(), request));
        // A client may close its connection in the middle of a request.
        tokio::spawn(http1::Builder::new().serve_connection(stream, service));
    }
}

async fn forward(
    client: Upstream,
    upstream: String,
    mut request: Request<Incoming>,
) -> Result<Answer, hyper::http::Error> {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = Uri::builder().scheme("http").authority(upstream).path_and_query(path).build()?;
    // These headers belong to the connection of the client, not to the request.
    for name in [CONNECTION, TE, TRANSFER_ENCODING, UPGRADE] {
        request.headers_mut().remove(name);
    }
    client.request(request).await.map(|response| response.map(Either::Left)).or_else(|error| {
        let reason = error.source().and_then(|source| source.downcast_ref::<ConnectError>());
        let exhausted = reason.is_some_and(ConnectError::is_exhausted);
        let status = if exhausted { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::BAD_GATEWAY };
        let text = reason.map_or_else(|| error.to_string(), ConnectError::to_string);
        Response::builder().status(status).body(Either::Right(Full::new(text.into())))
    })
}
