//! Compares `HttpConnector` of hyper-util with `Connector`: new connections per second of a hyper client to a local server, while 95%
//! of 56,512 ports to the server are in use. `cargo test --workspace --bench hyper`. Needs root, for a network namespace.
//!
//! Connections without a bind by number hold all ports of one parity and 90% of the ports of the other parity, as after many connect()
//! calls of an unmodified program. The server closes each connection first, so that the use stays at 95%. Trials of 0.5 s alternate in the order A B B A.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::dial::Connector;
use fourtuple_measure::median_interval;
use fourtuple_syscalls::option::Answer;
use fourtuple_syscalls::parking::Parking;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{netns, option};
use http_body_util::{BodyExt, Empty};
use hyper::Uri;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connect, HttpConnector};
use hyper_util::rt::TokioExecutor;
use tokio::runtime::{Builder, Runtime};

const LOW: u16 = 9_000;
const HIGH: u16 = 65_511;
const BLOCKS: usize = 6;
const TRIAL: Duration = Duration::from_millis(500);

fn main() -> Result<(), Box<dyn Error>> {
    netns::enter_new()?;
    fs::write("/proc/sys/net/ipv4/ip_local_port_range", format!("{LOW} {HIGH}"))?;
    let listener = TcpListener::bind("127.0.0.1:4000")?;
    let address = listener.local_addr()?;
    let held = fill(&listener, address)?;
    println!("{} sockets hold 95% of the ports {LOW} to {HIGH} to {address}", held.len());
    thread::Builder::new().name("server".to_owned()).spawn(move || serve(&listener))?;

    let runtime = Builder::new_current_thread().enable_all().build()?;
    let uri: Uri = format!("http://{address}/").parse()?;
    let theirs = client(HttpConnector::new());
    let ours = client(Connector::new());
    let mut rates = [Vec::new(), Vec::new()];
    let mut ratios = Vec::new();
    for _ in 0..BLOCKS {
        let mut block = [0.0, 0.0];
        for side in [0, 1, 1, 0] {
            let rate =
                if side == 0 { trial(&runtime, &theirs, &uri)? } else { trial(&runtime, &ours, &uri)? };
            rates[side].push(rate);
            block[side] += rate;
        }
        ratios.push(block[1] / block[0]);
    }
    let mut random = fastrand::Rng::with_seed(1);
    let [theirs, ours] = rates;
    for (name, samples) in
        [("HttpConnector, connections/s", theirs), ("Connector, connections/s", ours), ("ratio", ratios)]
    {
        let interval = median_interval(&samples, &mut random).ok_or("no samples")?;
        println!(
            "{name:<32} {:>9.1} (95% interval {:.1} to {:.1})",
            interval.value, interval.low, interval.high
        );
    }
    println!("load average {}", fs::read_to_string("/proc/loadavg")?.trim());
    Ok(())
}

/// Holds 95% of the ports, without a descriptor for each socket. Option 51 with one port chooses the port as an unmodified
/// connect() does: a bind by number would change the cost of the kernel's search.
fn fill(listener: &TcpListener, address: SocketAddr) -> Result<Parking, Box<dyn Error>> {
    let mut held = Parking::new()?;
    for port in LOW..=HIGH {
        if port % 20 == 1 {
            continue;
        }
        let socket = socket::open(Transport::Tcp, address, false)?;
        if option::set_local_port_range(socket.as_fd(), port, port)? == Answer::Absent {
            return Err("this kernel has no IP_LOCAL_PORT_RANGE".into());
        }
        socket::connect(socket.as_fd(), address)?;
        let (accepted, _) = listener.accept()?;
        for socket in [socket, accepted.into()] {
            if held.park(socket) {
                held.settle()?;
            }
        }
    }
    Ok(held)
}

/// Answers each request and closes the connection.
fn serve(listener: &TcpListener) {
    while let Ok((mut stream, _)) = listener.accept() {
        // A client that closes its connection early is no failure of the server.
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello");
    }
}

fn client<C: Connect + Clone>(connector: C) -> Client<C, Empty<Bytes>> {
    Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector)
}

/// Returns the rate of requests, each on a new connection.
fn trial<C: Connect + Clone + Send + Sync + 'static>(
    runtime: &Runtime,
    client: &Client<C, Empty<Bytes>>,
    uri: &Uri,
) -> Result<f64, Box<dyn Error>> {
    runtime.block_on(async {
        let begun = Instant::now();
        let mut requests = 0_u32;
        while begun.elapsed() < TRIAL {
            let response = client.get(uri.clone()).await?;
            if response.into_body().collect().await?.to_bytes() != "hello" {
                return Err("another response".into());
            }
            requests += 1;
        }
        Ok(f64::from(requests) / begun.elapsed().as_secs_f64())
    })
}
