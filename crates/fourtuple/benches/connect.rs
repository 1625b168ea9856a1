//! Measures the cost of a connect on tokio beyond `tokio::net::TcpStream::connect`, while 20% of the ports to the destination are in use:
//! `cargo bench -p fourtuple --bench connect`. Needs root, for a network namespace.
//!
//! Rounds of 50 connects alternate in the order A B B A. The time excludes accept() and close(). Both sides close with RST, unlike
//! applications, so that the ports do not run out in TIME_WAIT.
#![forbid(unsafe_code)]

mod summary;

use std::error::Error;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::time::{Duration, Instant};

use fourtuple::dial::{Connector, Dialer};
use fourtuple_syscalls::allocator::{CountingAllocator, allocations};
use fourtuple_syscalls::parking::Parking;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{netns, option, resource};
use summary::{load, quartiles};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The kernel's default range.
const LOW: u16 = 32_768;
const HIGH: u16 = 60_999;
const CONNECTS: usize = 50;
const BLOCKS: usize = 400;
/// The default of a connector.
const LIMIT: Duration = Duration::from_secs(10);

type Connecting = Pin<Box<dyn Future<Output = Result<Box<dyn AsFd>, Box<dyn Error>>>>>;

/// A way to connect. The boxes of the future and of the stream are an allocation each, in every way.
struct Side {
    name: &'static str,
    connect: Box<dyn Fn() -> Connecting>,
    /// The dialer whose ports are released after each round, as if the server had closed first.
    dialer: Option<&'static Dialer>,
}

/// The costs of one side.
#[derive(Clone, Copy, Default)]
struct Costs {
    clock: Duration,
    cpu: Duration,
    allocations: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    netns::enter_new()?;
    let listener = TcpListener::bind("127.0.0.1:4000")?;
    let address = listener.local_addr()?;
    let held = fill(&listener, address)?;
    println!("{} sockets hold 20% of the ports {LOW} to {HIGH} to {address}", held.len());
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let connector: &'static Connector = Box::leak(Box::new(Connector::new()));
    let dialer: &'static Dialer = Box::leak(Box::new(runtime.block_on(connector.dialers().get(address))?));
    let plain = || {
        let connect = move || -> Connecting {
            Box::pin(async move { Ok(Box::new(TcpStream::connect(address).await?) as Box<dyn AsFd>) })
        };
        Side { name: "TcpStream::connect", connect: Box::new(connect), dialer: None }
    };
    // What a connector does besides: a time limit, and TCP_NODELAY.
    let limited = || {
        let connect = move || -> Connecting {
            Box::pin(async move {
                let stream = time::timeout(LIMIT, TcpStream::connect(address)).await??;
                stream.set_nodelay(true)?;
                Ok(Box::new(stream) as Box<dyn AsFd>)
            })
        };
        Side { name: "timeout(TcpStream::connect), set_nodelay", connect: Box::new(connect), dialer: None }
    };
    let dial = move || -> Connecting {
        Box::pin(async move { Ok(Box::new(dialer.dial_tokio().await?.0) as Box<dyn AsFd>) })
    };
    let dialed = Side { name: "dial_tokio", connect: Box::new(dial), dialer: Some(dialer) };
    let connect = move || -> Connecting {
        Box::pin(async move { Ok(Box::new(connector.connect_to(address).await?) as Box<dyn AsFd>) })
    };
    let connected = Side { name: "Connector::connect_to", connect: Box::new(connect), dialer: Some(dialer) };
    for (side, reference) in [(dialed, plain()), (connected, limited()), (plain(), plain())] {
        compare(&runtime, &listener, &side, &reference)?;
    }
    println!("load average {}", load());
    Ok(())
}

/// Holds every fifth port, without a descriptor for each socket.
fn fill(listener: &TcpListener, address: SocketAddr) -> Result<Parking, Box<dyn Error>> {
    let mut held = Parking::new()?;
    for port in (LOW..=HIGH).step_by(5) {
        let socket = socket::open(Transport::Tcp, address, false)?;
        if option::set_local_port_range(socket.as_fd(), port, port)? == option::Answer::Absent {
            return Err("this kernel has no IP_LOCAL_PORT_RANGE".into());
        }
        socket::connect(socket.as_fd(), address)?;
        for socket in [socket, OwnedFd::from(listener.accept()?.0)] {
            if held.park(socket) {
                held.settle()?;
            }
        }
    }
    Ok(held)
}

fn compare(
    runtime: &Runtime,
    listener: &TcpListener,
    side: &Side,
    reference: &Side,
) -> Result<(), Box<dyn Error>> {
    let mut ratios = [Vec::with_capacity(BLOCKS), Vec::with_capacity(BLOCKS)];
    let mut micros = Vec::with_capacity(BLOCKS);
    let mut allocated = [0; 2];
    // The first twentieth of the blocks is warm-up.
    for block in 0..BLOCKS + BLOCKS / 20 {
        let mut costs = [Costs::default(); 2];
        for turn in [0, 1, 1, 0] {
            // Every second block is B A A B, because the side in the middle has an advantage.
            let index = turn ^ (block % 2);
            let cost = round(runtime, listener, if index == 0 { side } else { reference })?;
            costs[index].clock += cost.clock;
            costs[index].cpu += cost.cpu;
            costs[index].allocations += cost.allocations;
        }
        if block >= BLOCKS / 20 {
            let [ours, theirs] = costs;
            ratios[0].push(ours.clock.as_secs_f64() / theirs.clock.as_secs_f64());
            ratios[1].push(ours.cpu.as_secs_f64() / theirs.cpu.as_secs_f64());
            micros.push(theirs.clock.as_secs_f64() * 1e6 / (2 * CONNECTS) as f64);
            allocated[0] += ours.allocations;
            allocated[1] += theirs.allocations;
        }
    }
    let [clock, cpu] = ratios.map(|ratios| quartiles(&ratios));
    let [ours, theirs] = allocated.map(|count| count as f64 / (BLOCKS * 2 * CONNECTS) as f64);
    println!("{} / {}", side.name, reference.name);
    println!("  time by the clock: {clock}; reference, us: {}", quartiles(&micros));
    println!("  CPU time: {cpu}");
    println!("  allocations per connect: {ours:.2} and {theirs:.2}");
    Ok(())
}

/// Returns the costs of some connects in sequence.
fn round(runtime: &Runtime, listener: &TcpListener, side: &Side) -> Result<Costs, Box<dyn Error>> {
    runtime.block_on(async {
        let mut streams = Vec::with_capacity(CONNECTS);
        let (counted, cpu, begun) = (allocations(), resource::thread_cpu_time(), Instant::now());
        for _ in 0..CONNECTS {
            streams.push((side.connect)().await?);
        }
        let costs = Costs {
            clock: begun.elapsed(),
            cpu: resource::thread_cpu_time() - cpu,
            allocations: allocations() - counted,
        };
        for stream in streams {
            let source = socket::local_address((*stream).as_fd())?;
            option::set_reset_on_close((*stream).as_fd())?;
            drop((stream, listener.accept()?));
            if let Some(dialer) = side.dialer {
                dialer.release(source);
            }
        }
        Ok(costs)
    })
}
