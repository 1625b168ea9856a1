//! Measures the costs of a [`Dialer`] in a network namespace of its own, on loopback.
//!
//! - `cargo bench -p fourtuple --bench dial`: the cost beyond its system calls: dials with it and bare calls. The time of a dial covers the
//!   calls from socket() to getsockname(), and [`Dialer::release`] if the dialer keeps a ledger. It excludes accept() and close().
//! - `cargo bench -p fourtuple --bench dial -- connect`: the cost of a connect on tokio. Needs root.
//! - `cargo bench -p fourtuple --bench dial -- build`: the time of a build. Needs root.
//!
//! Rounds of dials alternate in the order A B B A. Both sides of a comparison close with RST, unlike applications, so that the ports do not
//! run out in TIME_WAIT.
#![forbid(unsafe_code)]

use std::env;
use std::error::Error;
use std::fs;
use std::hint::black_box;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::time::{Duration, Instant};

use fourtuple::dial::{Connector, Dialer, SourcePool, Strategy};
use fourtuple::ports::PortRange;
use fourtuple_record::measure::median_interval;
use fourtuple_syscalls::resource::{CountingAllocator, allocations};
use fourtuple_syscalls::socket::{self, Progress, Transport};
use fourtuple_syscalls::{netns, option, resource};
use measurement::{hold, load, quartiles};
use tokio::net::TcpStream as TokioStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time;

mod measurement;

/// Number of connections that stay open until they are accepted and closed outside of the measured time.
const HELD: usize = 50;
/// Number of blocks of four rounds of `HELD` dials, in the order A B B A or B A A B.
const BLOCKS: usize = 1000;

type Dialed = (OwnedFd, SocketAddr);

/// One side of a comparison.
struct ComparedSide {
    dial: Box<dyn FnMut() -> Dialed>,
    /// Reports the end of a connection to the dialer.
    release: Option<Box<dyn Fn(SocketAddr)>>,
}

/// The same dial with the dialer and with bare calls.
struct Pair {
    name: &'static str,
    dialer: ComparedSide,
    bare: ComparedSide,
}

/// The listener, and the connections of one round.
struct Server {
    listener: OwnedFd,
    held: Vec<Dialed>,
}

impl Server {
    fn listen() -> io::Result<(Self, SocketAddr)> {
        let address = SocketAddr::from(([127, 0, 0, 1], 4000));
        let listener = socket::open(Transport::Tcp, address, false)?;
        socket::bind(listener.as_fd(), address)?;
        socket::listen(listener.as_fd(), 4 * HELD as i32)?;
        Ok((Server { listener, held: Vec::with_capacity(HELD) }, address))
    }

    /// Returns the time of `HELD` dials.
    fn time(&mut self, side_under_test: &mut ComparedSide) -> Duration {
        let begun = Instant::now();
        for _ in 0..HELD {
            self.held.push((side_under_test.dial)());
        }
        if let Some(release) = &side_under_test.release {
            for (_, source) in &self.held {
                release(*source);
            }
        }
        let elapsed = begun.elapsed();
        for (client, _) in self.held.drain(..) {
            let accepted = socket::accept(self.listener.as_fd()).expect("a connection in the queue");
            option::set_reset_on_close(client.as_fd()).expect("SO_LINGER");
            drop((client, accepted));
        }
        elapsed
    }
}

fn through(builder: fourtuple::dial::DialerBuilder) -> ComparedSide {
    let dialer: &'static Dialer = Box::leak(Box::new(builder.build().expect("a dialer")));
    let dial = || {
        let (stream, report) = dialer.dial().expect("a connection");
        let report = black_box(report);
        (OwnedFd::from(stream), report.source)
    };
    let release = |source| dialer.release(source);
    let keeps_book = dialer.choice().steered;
    ComparedSide { dial: Box::new(dial), release: keeps_book.then_some(Box::new(release)) }
}

/// Returns a side that makes the same calls as a dialer, in the same order.
fn by_hand(
    destination: SocketAddr,
    sources: SourcePool,
    timeout: Option<Duration>,
    mut window: impl FnMut() -> Option<PortRange> + 'static,
) -> ComparedSide {
    let mut turn = 0;
    let mut dial = move || {
        let socket = socket::open(Transport::Tcp, destination, timeout.is_some())?;
        if let Some(window) = window() {
            let answer = option::set_local_port_range(socket.as_fd(), window.low(), window.high())?;
            assert_eq!(answer, option::Answer::Done);
        }
        if let Some(source) = sources.addresses().get(turn).copied() {
            turn = (turn + 1) % sources.addresses().len();
            let answer = option::set_bind_address_no_port(socket.as_fd())?;
            assert_eq!(answer, option::Answer::Done);
            socket::bind(socket.as_fd(), SocketAddr::new(source, 0))?;
        }
        socket::connect(socket.as_fd(), destination)?;
        if timeout.is_some() {
            assert_eq!(socket::wait_connected(socket.as_fd(), timeout)?, Progress::Connected);
            socket::set_nonblocking(socket.as_fd(), false)?;
        }
        let local = socket::local_address(socket.as_fd())?;
        io::Result::Ok((socket, local))
    };
    ComparedSide { dial: Box::new(move || dial().expect("a connection")), release: None }
}

/// Returns windows of one port each, like the ports from a dialer's ledger; a port repeats only after thousands of dials.
fn named_ports() -> impl FnMut() -> Option<PortRange> {
    let range = PortRange::KERNEL_DEFAULT;
    let mut offset = 0;
    move || {
        // A prime number, so that the sequence visits all ports.
        offset = (offset + 7919) % range.len();
        Some(PortRange::single(range.low() + offset as u16))
    }
}

fn pairs(destination: SocketAddr) -> Vec<Pair> {
    let source = SourcePool::one(IpAddr::from([127, 0, 0, 2]));
    let network = |text: &str| text.parse::<SourcePool>().expect("a network");
    let timeout = Duration::from_secs(5);
    let to = |strategy| Dialer::builder(destination).strategy(strategy);
    let from = |strategy, sources: &SourcePool| to(strategy).sources(sources.clone());
    let any = SourcePool::any;
    let all = || Some(PortRange::ALL);
    vec![
        Pair {
            name: "Dialer, kernel-default",
            dialer: through(to(Strategy::KernelDefault)),
            bare: by_hand(destination, any(), None, || None),
        },
        Pair {
            name: "Dialer, full-range",
            dialer: through(to(Strategy::FullRange)),
            bare: by_hand(destination, any(), None, all),
        },
        Pair {
            name: "Dialer, full-range, source set",
            dialer: through(from(Strategy::FullRange, &source)),
            bare: by_hand(destination, source.clone(), None, all),
        },
        Pair {
            name: "Dialer, full-range, timeout set",
            dialer: through(to(Strategy::FullRange).timeout(timeout)),
            bare: by_hand(destination, any(), Some(timeout), all),
        },
        Pair {
            name: "Dialer, auto",
            dialer: through(to(Strategy::Auto)),
            bare: by_hand(destination, any(), None, named_ports()),
        },
        Pair {
            name: "Dialer, auto, source set",
            dialer: through(from(Strategy::Auto, &source)),
            bare: by_hand(destination, source.clone(), None, named_ports()),
        },
        Pair {
            name: "Dialer, auto, 14 sources",
            dialer: through(from(Strategy::Auto, &network("127.0.0.0/28"))),
            bare: by_hand(destination, network("127.0.0.0/28"), None, named_ports()),
        },
        Pair {
            name: "Dialer, auto, 4094 sources",
            dialer: through(from(Strategy::Auto, &network("127.0.0.0/20"))),
            bare: by_hand(destination, network("127.0.0.0/20"), None, named_ports()),
        },
        Pair {
            name: "nothing (bare calls twice)",
            dialer: by_hand(destination, any(), None, all),
            bare: by_hand(destination, any(), None, all),
        },
        Pair {
            name: "std::net::TcpStream",
            dialer: ComparedSide {
                dial: Box::new(move || {
                    let stream = TcpStream::connect(destination).expect("a connection");
                    let local = stream.local_addr().expect("an address");
                    (OwnedFd::from(stream), local)
                }),
                release: None,
            },
            bare: by_hand(destination, any(), None, || None),
        },
    ]
}

/// Measures both sides in turn, so that other load on the machine affects both, and prints the ratios of the blocks.
fn overhead(server: &mut Server, pair: &mut Pair) {
    let mut ratios = Vec::with_capacity(BLOCKS);
    let mut bare = Duration::ZERO;
    // The first twentieth of the blocks is warm-up.
    for block in 0..BLOCKS + BLOCKS / 20 {
        let mut times = [Duration::ZERO; 2];
        for turn in [0, 1, 1, 0] {
            // Every second block is B A A B, because the side in the middle has an advantage.
            let side = turn ^ (block % 2);
            let side_under_test = if side == 0 { &mut pair.dialer } else { &mut pair.bare };
            times[side] += server.time(side_under_test);
        }
        if block >= BLOCKS / 20 {
            ratios.push(times[0].as_secs_f64() / times[1].as_secs_f64());
            bare += times[1];
        }
    }
    let ratio = median_interval(&ratios, &mut fastrand::Rng::with_seed(1)).expect("there are blocks");
    let percent = |ratio: f64| (ratio - 1.0) * 100.0;
    println!(
        "overhead of {} over bare calls: {:+.1}% ({:+.1} to {:+.1}) of {:.1} us",
        pair.name,
        percent(ratio.value),
        percent(ratio.low),
        percent(ratio.high),
        bare.as_secs_f64() * 1e6 / (BLOCKS * 2 * HELD) as f64,
    );
}

/// Enters a new network namespace, in a new user namespace if this is necessary.
fn enter_namespace() -> io::Result<()> {
    match netns::enter_new() {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            netns::become_root_of_new_user_namespace()?;
            netns::enter_new()
        }
        result => result,
    }
}

fn overheads() -> Result<(), Box<dyn Error>> {
    if let Err(error) = enter_namespace() {
        println!("nothing measured: no network namespace to be had: {error}");
        return Ok(());
    }
    let (mut server, destination) = Server::listen()?;
    println!("{BLOCKS} blocks of A B B A, {HELD} dials a letter: median and its 95% interval");
    pairs(destination).iter_mut().for_each(|pair| overhead(&mut server, pair));
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    // cargo adds `--bench`.
    match env::args().skip(1).find(|argument| !argument.starts_with("--")).as_deref() {
        None => overheads(),
        Some("connect") => connects(),
        Some("build") => builds(),
        Some(other) => Err(format!("{other:?}: expected connect, build, or nothing").into()),
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The kernel's default range.
const LOW: u16 = 32_768;
const HIGH: u16 = 60_999;
const CONNECT_BLOCKS: usize = 400;
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

/// Measures the cost of a connect on tokio beyond `tokio::net::TcpStream::connect`, while 20% of the ports to the destination are in use. The time
/// excludes accept() and close().
fn connects() -> Result<(), Box<dyn Error>> {
    netns::enter_new()?;
    let listener = TcpListener::bind("127.0.0.1:4000")?;
    let address = listener.local_addr()?;
    let held = hold((LOW..=HIGH).step_by(5), &listener)?;
    println!("{} sockets hold 20% of the ports {LOW} to {HIGH} to {address}", held.len());
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let connector: &'static Connector = Box::leak(Box::new(Connector::new()));
    let dialer: &'static Dialer = Box::leak(Box::new(runtime.block_on(connector.dialers().get(address))?));
    let plain = || {
        let connect = move || -> Connecting {
            Box::pin(async move { Ok(Box::new(TokioStream::connect(address).await?) as Box<dyn AsFd>) })
        };
        Side { name: "TcpStream::connect", connect: Box::new(connect), dialer: None }
    };
    // What a connector does besides: a time limit, and TCP_NODELAY.
    let limited = || {
        let connect = move || -> Connecting {
            Box::pin(async move {
                let stream = time::timeout(LIMIT, TokioStream::connect(address)).await??;
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

fn compare(
    runtime: &Runtime,
    listener: &TcpListener,
    side: &Side,
    reference: &Side,
) -> Result<(), Box<dyn Error>> {
    let mut ratios = [Vec::with_capacity(CONNECT_BLOCKS), Vec::with_capacity(CONNECT_BLOCKS)];
    let mut micros = Vec::with_capacity(CONNECT_BLOCKS);
    let mut allocated = [0; 2];
    // The first twentieth of the blocks is warm-up.
    for block in 0..CONNECT_BLOCKS + CONNECT_BLOCKS / 20 {
        let mut costs = [Costs::default(); 2];
        for turn in [0, 1, 1, 0] {
            // Every second block is B A A B, because the side in the middle has an advantage.
            let index = turn ^ (block % 2);
            let cost = round(runtime, listener, if index == 0 { side } else { reference })?;
            costs[index].clock += cost.clock;
            costs[index].cpu += cost.cpu;
            costs[index].allocations += cost.allocations;
        }
        if block >= CONNECT_BLOCKS / 20 {
            let [ours, theirs] = costs;
            ratios[0].push(ours.clock.as_secs_f64() / theirs.clock.as_secs_f64());
            ratios[1].push(ours.cpu.as_secs_f64() / theirs.cpu.as_secs_f64());
            micros.push(theirs.clock.as_secs_f64() * 1e6 / (2 * HELD) as f64);
            allocated[0] += ours.allocations;
            allocated[1] += theirs.allocations;
        }
    }
    let [clock, cpu] = ratios.map(|ratios| quartiles(&ratios));
    let [ours, theirs] = allocated.map(|count| count as f64 / (CONNECT_BLOCKS * 2 * HELD) as f64);
    println!("{} / {}", side.name, reference.name);
    println!("  time by the clock: {clock}; reference, us: {}", quartiles(&micros));
    println!("  CPU time: {cpu}");
    println!("  allocations per connect: {ours:.2} and {theirs:.2}");
    Ok(())
}

/// Returns the costs of some connects in sequence.
fn round(runtime: &Runtime, listener: &TcpListener, side: &Side) -> Result<Costs, Box<dyn Error>> {
    runtime.block_on(async {
        let mut streams = Vec::with_capacity(HELD);
        let (counted, cpu, begun) = (allocations(), resource::thread_cpu_time(), Instant::now());
        for _ in 0..HELD {
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

/// Sockets in the namespace: both ends of each connection.
const SOCKETS: usize = 9000;
const BUILDS: usize = 101;

/// Measures [`DialerBuilder::build`](fourtuple::dial::DialerBuilder::build) while the namespace has 9,000 TCP sockets to other destinations.
fn builds() -> Result<(), Box<dyn Error>> {
    netns::enter_new()?;
    fs::write("/proc/sys/net/core/somaxconn", "65535")?;
    let destination: SocketAddr = "127.0.0.1:4000".parse()?;
    // Half of the sockets are to the port, and half to the address, of the destination.
    let others = ["127.0.0.2:4000", "127.0.0.1:4001"];
    let (mut listeners, mut held) = (Vec::new(), Vec::new());
    for other in others {
        let other: SocketAddr = other.parse()?;
        let listener = socket::open(Transport::Tcp, other, false)?;
        socket::bind(listener.as_fd(), other)?;
        socket::listen(listener.as_fd(), 65_535)?;
        listeners.push(listener);
        for _ in 0..SOCKETS / 2 / others.len() {
            held.push(TcpStream::connect(other)?);
        }
    }
    // The first build probes the kernel.
    let mut times = Vec::new();
    for _ in 0..=BUILDS {
        let begun = Instant::now();
        Dialer::builder(destination).build()?;
        times.push(begun.elapsed());
    }
    let times = &mut times[1..];
    times.sort_unstable();
    let micros = |quarter: usize| times[BUILDS * quarter / 4].as_secs_f64() * 1e6;
    println!(
        "build() at {SOCKETS} sockets to other destinations: median {:.0} us, quartiles {:.0} and {:.0} us, {BUILDS} builds",
        micros(2),
        micros(1),
        micros(3)
    );
    println!("load average {}", load());
    Ok(())
}
