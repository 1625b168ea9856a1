//! Compares `HttpConnector` of hyper-util with `Connector`: new connections per second of a hyper client to a local server, while 95%
//! of 56,512 ports to the server are in use. `cargo bench -p fourtuple --bench hyper`. Needs root, for a network namespace.
//!
//! `-- nginx` uses nginx as the server, and then opens 100,000 connections with `Connector` and prints the longest time for which they keep
//! the thread of the runtime from a second task. An error ends the program.
//!
//! Connections without a bind by number hold all ports of one parity and 90% of the ports of the other parity, as after many connect()
//! calls of an unmodified program. The server closes each connection first, so that the use stays at 95%. Trials of 0.5 s alternate in the order A B B A.
#![forbid(unsafe_code)]

mod measurement;

use std::env;
use std::error::Error;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::dial::Connector;
use fourtuple_syscalls::{child, netns};
use http_body_util::{BodyExt, Empty};
use hyper::Uri;
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connect, HttpConnector};
use hyper_util::rt::TokioExecutor;
use tokio::runtime::{Builder, Runtime};
use tokio::task;

const LOW: u16 = 9_000;
const HIGH: u16 = 65_511;
const BLOCKS: usize = 6;
const TRIAL: Duration = Duration::from_millis(500);
/// Number of connections after the comparison, with nginx.
const CONNECTS: u32 = 100_000;

fn main() -> Result<(), Box<dyn Error>> {
    netns::enter_new()?;
    fs::write("/proc/sys/net/ipv4/ip_local_port_range", format!("{LOW} {HIGH}"))?;
    let listener = TcpListener::bind("127.0.0.1:4000")?;
    let address = listener.local_addr()?;
    let held = measurement::hold((LOW..=HIGH).filter(|port| port % 20 != 1), &listener)?;
    println!("{} sockets hold 95% of the ports {LOW} to {HIGH} to {address}", held.len());
    let nginx = if env::args().any(|argument| argument == "nginx") {
        drop(listener);
        Some(Nginx::start(address)?)
    } else {
        thread::Builder::new().name("server".to_owned()).spawn(move || serve(&listener))?;
        None
    };

    let runtime = Builder::new_current_thread().enable_all().build()?;
    let uri: Uri = format!("http://{address}/").parse()?;
    let theirs = client(HttpConnector::new());
    let ours_client = client(Connector::new());
    let mut rates = [Vec::new(), Vec::new()];
    let mut ratios = Vec::new();
    for _ in 0..BLOCKS {
        let mut block = [0.0, 0.0];
        for side in [0, 1, 1, 0] {
            let rate = if side == 0 {
                trial(&runtime, &theirs, &uri)?
            } else {
                trial(&runtime, &ours_client, &uri)?
            };
            rates[side].push(rate);
            block[side] += rate;
        }
        ratios.push(block[1] / block[0]);
    }
    let [theirs, ours] = rates;
    for (name, samples) in
        [("HttpConnector, connections/s", theirs), ("Connector, connections/s", ours), ("ratio", ratios)]
    {
        println!("{name}: {}", measurement::quartiles(&samples));
    }
    if nginx.is_some() {
        let begun = Instant::now();
        let connects = async {
            for _ in 0..CONNECTS {
                request(&ours_client, &uri).await?;
            }
            Ok(())
        };
        let stall = runtime.block_on(measurement::stall(connects))?;
        let time = begun.elapsed();
        println!("{CONNECTS} connects with Connector in {:.1} s, none failed", time.as_secs_f64());
        let until = Instant::now() + time;
        let nothing = async {
            while Instant::now() < until {
                task::yield_now().await;
            }
            Ok(())
        };
        let idle = runtime.block_on(measurement::stall(nothing))?;
        for (what, stall) in [("with these connects", stall), ("in the same time without connects", idle)] {
            let [clock, cpu, asleep] =
                [stall.clock, stall.cpu, stall.asleep].map(|time| time.as_secs_f64() * 1e6);
            println!(
                "longest stall {what}: {clock:.0} us by the clock, {cpu:.0} us CPU time, {asleep:.0} us asleep"
            );
        }
    }
    println!("load average {}", measurement::load());
    Ok(())
}

/// nginx, which closes each connection after its response.
struct Nginx(Child);

impl Nginx {
    fn start(address: SocketAddr) -> Result<Nginx, Box<dyn Error>> {
        let directory = env::temp_dir().join(format!("fourtuple-bench-nginx-{}", std::process::id()));
        fs::create_dir_all(&directory)?;
        let configuration = directory.join("nginx.conf");
        let text = format!(
            "daemon off; pid {0}/pid; error_log {0}/error.log; worker_processes 1; events {{ worker_connections 1024; }}\n\
             http {{ access_log off; keepalive_timeout 0; server {{ listen {address} backlog=4096; return 200 hello; }} }}\n",
            directory.display()
        );
        fs::write(&configuration, text)?;
        let mut command = Command::new("nginx");
        child::end_with_this_thread(&mut command);
        let nginx = Nginx(command.arg("-c").arg(&configuration).spawn()?);
        let begun = Instant::now();
        while TcpStream::connect(address).is_err() {
            if begun.elapsed() > Duration::from_secs(30) {
                return Err("nginx does not listen".into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        // Read by nginx at its start.
        fs::remove_file(configuration)?;
        Ok(nginx)
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // SIGTERM also ends the worker of nginx, and removes its pid file.
        let _ = child::terminate(self.0.id());
        let _ = self.0.wait();
        let _ =
            fs::remove_dir_all(env::temp_dir().join(format!("fourtuple-bench-nginx-{}", std::process::id())));
    }
}

/// Answers each request and closes the connection.
fn serve(listener: &TcpListener) {
    while let Ok((mut stream, _)) = listener.accept() {
        // A client that closes its connection early is not a failure of the server.
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
            request(client, uri).await?;
            requests += 1;
        }
        Ok(f64::from(requests) / begun.elapsed().as_secs_f64())
    })
}

async fn request<C: Connect + Clone + Send + Sync + 'static>(
    client: &Client<C, Empty<Bytes>>,
    uri: &Uri,
) -> Result<(), Box<dyn Error>> {
    let response = client.get(uri.clone()).await?;
    if response.into_body().collect().await?.to_bytes() != "hello" {
        return Err("another response".into());
    }
    Ok(())
}
