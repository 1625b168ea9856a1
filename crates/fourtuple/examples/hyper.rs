//! Fetches a page with hyper over a connection of the dialer.
//!
//! `cargo run -p fourtuple --example hyper -- ADDRESS [PATH] [SOURCES]`, as in
//! `-- 127.0.0.1:8000 / 127.0.0.0/28`
#![forbid(unsafe_code)]

use std::env;
use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use fourtuple::dial::Dialer;
use http_body_util::{BodyExt, Empty};
use hyper::Request;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper_util::rt::TokioIo;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let address = arguments.next().ok_or("usage: hyper ADDRESS [PATH] [SOURCES]")?;
    let path = arguments.next().unwrap_or_else(|| "/".to_owned());
    let mut builder = Dialer::builder(address.parse().map_err(|error| format!("ADDRESS: {error}"))?)
        .timeout(Duration::from_secs(3));
    if let Some(sources) = arguments.next() {
        builder = builder.sources(sources.parse()?);
    }
    let dialer = builder.build()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(10), fetch(&dialer, &path))
            .await
            .map_err(|_| format!("{address} accepted the connection and did not answer"))?
    })
}

async fn fetch(dialer: &Dialer, path: &str) -> Result<(), Box<dyn Error>> {
    // Only this line changes: it was `TcpStream::connect(address).await?`.
    let (stream, report) = dialer.dial_tokio().await?;
    eprintln!("connected from {} by {}, {:.1?} in connect()", report.source, report.strategy, report.connect);

    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let request =
        Request::get(path).header(HOST, dialer.destination().to_string()).body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    eprintln!("{:?} {}", response.version(), response.status());
    let body = response.into_body().collect().await?.to_bytes();
    io::stdout().write_all(&body)?;

    drop(sender);
    connection.await??;
    // Without Dialer::release: this side closed the connection, so its port is in TIME_WAIT.
    Ok(())
}
