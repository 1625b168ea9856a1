//! Fetches pages from many source addresses: `cargo run -p fourtuple --features hyper --example crawler -- SOURCES URL...`, as in
//! `-- 127.0.0.0/28 http://127.0.0.1:8000/`. Sixteen source addresses give sixteen times the ports to each destination.
#![forbid(unsafe_code)]

use std::env;
use std::error::Error;

use fourtuple::dial::{ConnectError, Connector, DialReport, Dialers, SourcePool};
use http_body_util::{BodyExt, Empty};
use hyper::Uri;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::task::JoinSet;

/// Maximum number of requests at one time.
const CONCURRENT: usize = 64;

type Http = Client<Connector, Empty<Bytes>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let sources: SourcePool = arguments.next().ok_or("usage: crawler SOURCES URL...")?.parse()?;
    let urls = arguments.map(|url| url.parse()).collect::<Result<Vec<Uri>, _>>()?;
    let dialers = Dialers::new(10_000).settings(move |dialer| dialer.sources(sources.clone()));
    let connector = Connector::builder().dialers(dialers).build();
    // Each request takes a connection of its own, as to 10,000 hosts.
    let client: Http = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector);
    let (mut urls, mut fetches) = (urls.into_iter(), JoinSet::new());
    loop {
        while fetches.len() < CONCURRENT
            && let Some(url) = urls.next()
        {
            fetches.spawn(fetch(client.clone(), url));
        }
        match fetches.join_next().await {
            Some(line) => println!("{}", line?),
            None => return Ok(()),
        }
    }
}

/// Returns a line about one page.
async fn fetch(client: Http, url: Uri) -> String {
    let response = match client.get(url.clone()).await {
        Ok(response) => response,
        Err(error) => {
            let reason = error.source().and_then(|source| source.downcast_ref::<ConnectError>());
            return format!("{url} {}", reason.map_or_else(|| error.to_string(), ConnectError::to_string));
        }
    };
    let source = response.extensions().get::<DialReport>().map(|report| report.source);
    let (status, body) = (response.status(), response.into_body().collect().await);
    let length = body.map_or(0, |body| body.to_bytes().len());
    format!(
        "{url} {status} {length} bytes from {}",
        source.map_or_else(String::new, |source| source.to_string())
    )
}
