//! Forwards DNS queries: `cargo run -p fourtuple --features tokio --example dns_forwarder -- LISTEN UPSTREAM`, as in
//! `-- 127.0.0.1:5300 192.0.2.53:53`.
//!
//! Each query has a connected socket of its own: the source port is random, which makes forged answers improbable (RFC 5452), and the
//! kernel drops datagrams of other senders. `Sharing::Shared` lets queries to other upstreams use the same ports.
#![forbid(unsafe_code)]

use std::env;
use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fourtuple::dial::{Sharing, UdpDialer};
use tokio::net::UdpSocket;
use tokio::sync::Semaphore;
use tokio::time;

/// Maximum number of queries at one time; further queries wait in the receive buffer.
const CONCURRENT: usize = 1000;
const TIMEOUT: Duration = Duration::from_secs(3);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let (Some(listen), Some(upstream)) = (arguments.next(), arguments.next()) else {
        return Err("usage: dns_forwarder LISTEN UPSTREAM".into());
    };
    let dialer = UdpDialer::new(upstream.parse()?, None, Sharing::Shared)?;
    let clients = Arc::new(UdpSocket::bind(&listen).await?);
    let permits = Arc::new(Semaphore::new(CONCURRENT));
    let mut query = [0; 65_535];
    loop {
        let permit = Arc::clone(&permits).acquire_owned().await?;
        let (length, client) = clients.recv_from(&mut query).await?;
        let (query, dialer, clients) = (query[..length].to_vec(), dialer.clone(), Arc::clone(&clients));
        tokio::spawn(async move {
            // Without an answer the client repeats its query.
            if let Err(error) = forward(&query, &dialer, &clients, client).await {
                eprintln!("{client}: {error}");
            }
            drop(permit);
        });
    }
}

async fn forward(
    query: &[u8],
    dialer: &UdpDialer,
    clients: &UdpSocket,
    client: SocketAddr,
) -> Result<(), Box<dyn Error>> {
    let (upstream, _report) = dialer.dial_tokio().await?;
    upstream.send(query).await?;
    let mut answer = [0; 65_535];
    let length = time::timeout(TIMEOUT, upstream.recv(&mut answer)).await??;
    clients.send_to(&answer[..length], client).await?;
    Ok(())
}
