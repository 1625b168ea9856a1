//! Measures the cost of a [`Dialer`] beyond its system calls: dials with it and bare calls, in one network namespace, on loopback.
//!
//! `cargo bench -p fourtuple --bench dial`
//!
//! The time of a dial covers the calls from socket() to getsockname(), and [`Dialer::release`] if the dialer keeps a ledger. It
//! excludes accept() and close(). Both sides of a comparison close with RST, unlike applications, so that the ports do not run
//! out in TIME_WAIT.
#![forbid(unsafe_code)]

use std::hint::black_box;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use fourtuple::dial::{Dialer, SourcePool, Strategy};
use fourtuple::ports::PortRange;
use fourtuple_record::measure::median_interval;
use fourtuple_syscalls::socket::{self, Progress, Transport};
use fourtuple_syscalls::{netns, option};

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

fn main() {
    if let Err(error) = enter_namespace() {
        println!("nothing measured: no network namespace to be had: {error}");
        return;
    }
    let (mut server, destination) = Server::listen().expect("a listener in an empty namespace");
    println!("{BLOCKS} blocks of A B B A, {HELD} dials a letter: median and its 95% interval");
    pairs(destination).iter_mut().for_each(|pair| overhead(&mut server, pair));
}
