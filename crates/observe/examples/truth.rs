//! Compares the trace with the counts and the clock of the program that dials.
//!
//! `cargo run --release -p fourtuple-observe --example truth -- [CONNECTS]`
//!
//! In a new network namespace the program connects CONNECTS times (1,000,000) without pauses, from four addresses to four, reads
//! the port of each socket, and closes it with a RST, so that ports do not run out. Every second socket sets
//! IP_LOCAL_PORT_RANGE, which makes the kernel choose even and odd ports alike. Then the program takes all even ports of a range of
//! 15,000 and connects 1,000 times, so that each search visits all even ports. That listener has no accepting thread, which would
//! otherwise run during the call. The clock measures the whole call: system call entry, first route lookup, search, and the rest
//! up to the SYN and, over loopback, its reply. The exit code is 1 if a count differs.

use std::env;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use fourtuple_observe::trace::{Connect, Instrument};
use fourtuple_record::TraceConnectResults;
use fourtuple_syscalls::option::Answer;
use fourtuple_syscalls::resource::raise_descriptor_limit;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{netns, option};
use fourtuple_testing::set_sysctl;

const PORT: u16 = 4000;
/// Port of the listener without an accepting thread.
const UNACCEPTED: u16 = 4001;

/// Times of whole calls, in nanoseconds, by the parity of the port.
#[derive(Default)]
struct Own([Vec<u64>; 2]);

fn main() -> ExitCode {
    let connects: u32 =
        env::args().nth(1).map_or(1_000_000, |word| word.parse().expect("a number of connects"));
    netns::enter_new().expect("a network namespace, which takes root");
    raise_descriptor_limit().expect("descriptors");
    let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), PORT);
    let listener = socket::open(Transport::Tcp, any, false).expect("a socket");
    socket::bind(listener.as_fd(), any).expect("its port");
    socket::listen(listener.as_fd(), 4096).expect("a listening socket");
    let for_server = listener.try_clone().expect("a descriptor");
    thread::spawn(move || while socket::accept(for_server.as_fd()).is_ok() {});

    set_sysctl("net.core.somaxconn", "16384");
    let unaccepted = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), UNACCEPTED);
    let queue = socket::open(Transport::Tcp, unaccepted, false).expect("a socket");
    socket::bind(queue.as_fd(), unaccepted).expect("its port");
    socket::listen(queue.as_fd(), 16_384).expect("a listening socket");

    set_sysctl("net.ipv4.ip_local_port_range", "20000 59999");
    let begun = Instant::now();
    let (own, traced) = with_trace(PORT, || {
        let mut own = Own::default();
        for number in 0..connects {
            let stream = dial(PORT, number, &mut own);
            option::set_reset_on_close(stream.as_fd()).expect("SO_LINGER");
        }
        own
    });
    println!("{:.0} connects/s", f64::from(connects) / begun.elapsed().as_secs_f64());
    let mut same = compare("ports free", own, &traced);

    set_sysctl("net.ipv4.ip_local_port_range", "20000 34999");
    let mut held = Vec::new();
    while held.len() < 7_500 {
        held.push(dial(UNACCEPTED, 0, &mut Own::default()));
    }
    let (own, traced) = with_trace(UNACCEPTED, || {
        let mut own = Own::default();
        for _ in 0..1_000 {
            let stream = dial(UNACCEPTED, 0, &mut own);
            option::set_reset_on_close(stream.as_fd()).expect("SO_LINGER");
        }
        own
    });
    same &= compare("even ports taken", own, &traced);
    if same { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn dial(port: u16, number: u32, own: &mut Own) -> OwnedFd {
    let address = |number: u32| Ipv4Addr::from(0x7f00_0101 + number % 4);
    let to = SocketAddr::new(address(number).into(), port);
    let stream = socket::open(Transport::Tcp, to, true).expect("a socket");
    let answer = option::set_bind_address_no_port(stream.as_fd()).expect("IP_BIND_ADDRESS_NO_PORT");
    assert_eq!(answer, Answer::Done);
    socket::bind(stream.as_fd(), SocketAddr::new(address(number / 4).into(), 0)).expect("an address");
    if number / 16 % 2 == 1 {
        let answer =
            option::set_local_port_range(stream.as_fd(), 20_000, 59_999).expect("IP_LOCAL_PORT_RANGE");
        assert_eq!(answer, Answer::Done);
    }
    let begun = Instant::now();
    let result = socket::connect(stream.as_fd(), to);
    let took = begun.elapsed().as_nanos() as u64;
    result.expect("a connection, or one under way");
    let port = socket::local_address(stream.as_fd()).expect("an address").port();
    own.0[usize::from(port % 2)].push(took);
    stream
}

fn compare(when: &str, own: Own, traced: &TraceConnectResults) -> bool {
    let mut same = traced.lost == 0;
    for (parity, mut own, search) in ["even", "odd"]
        .into_iter()
        .zip(own.0)
        .zip([traced.search_ns.even, traced.search_ns.odd])
        .map(|((a, b), c)| (a, b, c))
    {
        own.sort_unstable();
        let count = search.map_or(0, |search| search.count);
        same &= count == own.len() as u64;
        let median = |own: &[u64]| own.get(own.len() / 2).map_or(0.0, |&ns| ns as f64 / 1000.0);
        let p50 = search.map_or(0.0, |search| search.p50 as f64 / 1000.0);
        println!(
            "{when}, {parity}: {} calls, {count} searches traced; median of a call {:.2} us, of a search {p50:.2} us",
            own.len(),
            median(&own),
        );
    }
    println!("{when}: {} lost", traced.lost);
    same
}

fn with_trace<T>(port: u16, run: impl FnOnce() -> T) -> (T, TraceConnectResults) {
    let connect = Connect { process: Some(std::process::id()), port: Some(port), ..Connect::default() };
    let stop = AtomicBool::new(false);
    let (attached, ready) = mpsc::channel();
    thread::scope(|scope| {
        let tracer =
            scope.spawn(|| connect.run(&stop, move || attached.send(()).expect("the receiver"), |_| ()));
        ready.recv().expect("a trace, which takes BPF");
        let result = run();
        stop.store(true, Ordering::Relaxed);
        (result, tracer.join().expect("no panic").expect("a trace").results)
    })
}
