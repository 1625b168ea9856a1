//! Compares the listener of tokio with `AsyncAcceptor` under `axum::serve`: how long requests on kept connections wait for one of four
//! workers whose handlers block: `cargo bench -p fourtuple --bench axum`. Needs root, for a network namespace.
//!
//! Each worker is a thread with a current-thread runtime. 24 clients keep a connection each and send their requests in sequence; 5% of
//! the requests block their worker for 10 ms, the rest for 0.1 ms. The wait of a request is its latency without this time. Trials of 2 s
//! alternate in the order A B B A, each with new workers and connections. Two listeners of tokio are compared: one that the runtimes
//! share, and one for each runtime (SO_REUSEPORT). `AsyncAcceptor` places connections, and with `by_request` requests.
#![forbid(unsafe_code)]

mod measurement;

use std::error::Error;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use fourtuple::listen::{AcceptPolicy, AsyncAcceptor, ListenerGroupBuilder, Workers, by_request};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{netns, option};
use measurement::{load, quartiles};
use tokio::runtime::Builder;
use tokio::sync::watch;

const WORKERS: usize = 4;
const CLIENTS: usize = 24;
const BLOCKS: usize = 5;
const TRIAL: Duration = Duration::from_secs(2);
const SHORT: Duration = Duration::from_micros(100);
const LONG: Duration = Duration::from_millis(10);

#[derive(Clone, Copy)]
enum Kind {
    Shared,
    Reuseport,
    Acceptor,
    ByRequest,
}

fn main() -> Result<(), Box<dyn Error>> {
    netns::enter_new()?;
    for (name, reference, kind) in [
        ("AsyncAcceptor / tokio with one listener", Kind::Shared, Kind::Acceptor),
        ("by_request / tokio with one listener", Kind::Shared, Kind::ByRequest),
        ("by_request / tokio with SO_REUSEPORT", Kind::Reuseport, Kind::ByRequest),
    ] {
        let (mut waits, mut rates) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for _ in 0..BLOCKS {
            let mut block = [Vec::new(), Vec::new()];
            for side in [0, 1, 1, 0] {
                block[side].extend(trial([reference, kind][side])?);
            }
            for (side, mut samples) in block.into_iter().enumerate() {
                rates[side].push(samples.len() as f64 / TRIAL.as_secs_f64() / 2e3);
                waits[side].push(tail(&mut samples));
            }
        }
        println!("{name}:");
        for (what, [theirs, ours]) in [("p99.9 of the wait, ms", waits), ("requests, k/s", rates)] {
            let ratios: Vec<f64> = ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs).collect();
            println!("  {what}: {} / {} = {}", quartiles(&ours), quartiles(&theirs), quartiles(&ratios));
        }
    }
    println!("load average {}", load());
    Ok(())
}

/// Returns the p99.9 of waits in milliseconds.
fn tail(waits: &mut [Duration]) -> f64 {
    waits.sort_unstable();
    waits[waits.len() * 999 / 1000].as_secs_f64() * 1e3
}

/// Serves the clients for a while. Returns the wait of each request.
fn trial(kind: Kind) -> Result<Vec<Duration>, Box<dyn Error>> {
    let app = Router::new().route("/short", get(|| block(SHORT))).route("/long", get(|| block(LONG)));
    let (stop, stopped) = watch::channel(false);
    let shutdown = move || {
        let mut stopped = stopped.clone();
        async move { drop(stopped.changed().await) }
    };
    let group = ListenerGroupBuilder::at((Ipv4Addr::LOCALHOST, 0)).workers(Workers::Runtimes);
    let group = match kind {
        Kind::ByRequest => group.policy(AcceptPolicy::SharedOneshot).open()?,
        _ => group.open()?,
    };
    let (mut listeners, mut address) = (vec![listener((Ipv4Addr::LOCALHOST, 0).into())?], None);
    if matches!(kind, Kind::Acceptor | Kind::ByRequest) {
        address = group.endpoint().inet();
    }
    let address = address.map_or_else(|| listeners[0].local_addr(), Ok)?;
    while listeners.len() < WORKERS {
        let next = match kind {
            Kind::Reuseport => listener(address)?,
            Kind::Shared | Kind::Acceptor | Kind::ByRequest => listeners[0].try_clone()?,
        };
        listeners.push(next);
    }
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let mut workers = Vec::new();
        for listener in listeners {
            let (app, shutdown, group) = (app.clone(), shutdown(), &group);
            let serve = move || -> std::io::Result<()> {
                let runtime = Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(async {
                    match kind {
                        Kind::Shared | Kind::Reuseport => {
                            let listener = tokio::net::TcpListener::from_std(listener)?;
                            axum::serve(listener, app).with_graceful_shutdown(shutdown).await
                        }
                        Kind::Acceptor => {
                            let acceptor = AsyncAcceptor::new(group.join()?)?;
                            axum::serve(acceptor, app).with_graceful_shutdown(shutdown).await
                        }
                        Kind::ByRequest => {
                            let acceptor = AsyncAcceptor::new(group.join()?)?;
                            axum::serve(acceptor, by_request(app)).with_graceful_shutdown(shutdown).await
                        }
                    }
                })
            };
            workers.push(thread::Builder::new().spawn_scoped(scope, serve)?);
        }
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            let done = &done;
            let client = move || client(address, number, done);
            clients.push(thread::Builder::new().spawn_scoped(scope, client)?);
        }
        thread::sleep(TRIAL);
        done.store(true, Ordering::Release);
        let mut waits = Vec::new();
        for client in clients {
            waits.extend(client.join().expect("no client panics")?);
        }
        stop.send(true)?;
        for worker in workers {
            worker.join().expect("no worker panics")?;
        }
        Ok(waits)
    })
}

/// Blocks the thread of the runtime, as a handler without an await point does.
async fn block(time: Duration) -> &'static str {
    thread::sleep(time);
    "ok"
}

fn listener(address: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = socket::open(Transport::Tcp, address, true)?;
    if option::set_reuse_port(listener.as_fd())? == option::Answer::Absent {
        return Err(std::io::ErrorKind::Unsupported.into());
    }
    socket::bind(listener.as_fd(), address)?;
    socket::listen(listener.as_fd(), 4096)?;
    Ok(listener.into())
}

/// Sends requests on one connection until `done`. Returns the wait of each.
fn client(address: SocketAddr, number: usize, done: &AtomicBool) -> std::io::Result<Vec<Duration>> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let mut random = fastrand::Rng::with_seed(number as u64);
    let (mut waits, mut buffer) = (Vec::new(), [0; 1024]);
    while !done.load(Ordering::Acquire) {
        let (path, time) = if random.u32(..20) == 0 { ("long", LONG) } else { ("short", SHORT) };
        let begun = Instant::now();
        stream.write_all(format!("GET /{path} HTTP/1.1\r\nhost: bench\r\n\r\n").as_bytes())?;
        let mut filled = 0;
        while !buffer[..filled].ends_with(b"\r\n\r\nok") {
            match stream.read(&mut buffer[filled..])? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                count => filled += count,
            }
        }
        waits.push(begun.elapsed().saturating_sub(time));
    }
    Ok(waits)
}
