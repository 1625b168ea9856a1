//! Measures traces: what they cost, and whether they agree with the program that they trace.
//!
//! `cargo run --release -p fourtuple-observe --example trace -- cost [any|dst|dst6|accept|locks] [fin|rst|getppid] [QUADS] [RATE]`
//!
//! CPU time per connection with and without a trace, in interleaved trials of a second. One process dials its own server over
//! loopback in a new network namespace, at RATE connections per second (20,000), to one of 128 destinations per trial (IPv6: one),
//! and closes each connection at once: with a FIN, or with a RST, which is the cheapest and leaves no TIME_WAIT socket. The CPU time
//! of the process covers both ends, the softirqs that run in their context (without IRQ_TIME_ACCOUNTING), and the thread that reads
//! the trace, but not attaching and detaching. `any` traces connect() without a filter, `dst` filters an IPv4 address without
//! connects, `dst6` filters the dialed IPv6 address; `accept` and `locks` run the other traces. `getppid` opens no connections: it
//! measures the CPU time of a thread per call of getppid(2), the cheapest system call.
//!
//! `cargo run --release -p fourtuple-observe --example trace -- truth [CONNECTS]`
//!
//! In a new network namespace the program connects CONNECTS times (1,000,000) without pauses, from four addresses to four, reads
//! the port of each socket, and closes it with a RST, so that ports do not run out. Every second socket sets
//! IP_LOCAL_PORT_RANGE, which makes the kernel choose even and odd ports alike. Then the program takes all even ports of a range of
//! 15,000 and connects 1,000 times, so that each search visits all even ports. That listener has no accepting thread, which would
//! otherwise run during the call. The clock measures the whole call: system call entry, first route lookup, search, and the rest
//! up to the SYN and, over loopback, its reply. The exit code is 1 if a count differs.

use std::env;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::parent_id;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_observe::trace::{Accept, Connect, Instrument, Locks, TraceError};
use fourtuple_record::TraceConnectResults;
use fourtuple_record::measure::Comparison;
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::resource::{process_cpu_time, raise_descriptor_limit, thread_cpu_time};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{netns, schedule};
use fourtuple_testing::set_sysctl;

const TRIAL: Duration = Duration::from_secs(1);
const PORT: u16 = 4000;
const ADDRESSES: u32 = 128;
/// Number of connections in all trials.
static REACHED: AtomicU64 = AtomicU64::new(0);

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    match words.first().map(String::as_str) {
        Some("cost") => cost(&words[1..]),
        Some("truth") => return truth(&words[1..]),
        other => panic!("{other:?} is neither cost nor truth"),
    }
    ExitCode::SUCCESS
}

/// Enters a network namespace.
fn enter() {
    netns::enter_new().expect("a network namespace, which takes root");
    raise_descriptor_limit().expect("descriptors");
}

fn listen(address: SocketAddr, backlog: i32) -> OwnedFd {
    let listener = socket::open(Transport::Tcp, address, false).expect("a socket");
    socket::bind(listener.as_fd(), address).expect("its port");
    socket::listen(listener.as_fd(), backlog).expect("a listening socket");
    listener
}

fn cost(words: &[String]) {
    let number = |at: usize, otherwise: u64| {
        words
            .get(at)
            .map_or(otherwise, |word| word.parse().expect("a number of quads, or of connections a second"))
    };
    let (quads, rate) = (number(2, 20), number(3, 20_000));
    let reset = words.get(1).is_some_and(|word| word == "rst");
    let is_call = words.get(1).is_some_and(|word| word == "getppid");
    let six = words.first().is_some_and(|word| word == "dst6");
    let connect_to = |destination: SocketAddr| {
        Trace::Connect(Connect { address: Some(destination.ip()), ..Connect::default() })
    };
    let trace = match words.first().map(String::as_str) {
        None | Some("any") => Trace::Connect(Connect::default()),
        Some("dst") => connect_to(destination(ADDRESSES - 1, six)),
        Some("dst6") => connect_to(destination(0, six)),
        Some("accept") => Trace::Accept(Accept::default()),
        Some("locks") => Trace::Locks(Locks::default()),
        Some(other) => panic!("{other:?} is none of any, dst, dst6, accept, locks"),
    };
    enter();
    set_sysctl("net.ipv4.ip_local_port_range", "10000 65000");
    let any: IpAddr = if six { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let listener = listen(SocketAddr::new(any, PORT), 4096);
    thread::spawn(move || serve(&listener));
    let trial = |traced: bool, round: u32| {
        let run = || if is_call { call() } else { dial(rate, six, reset, round) };
        if !traced {
            return run();
        }
        let (cost, lost) = with_trace(|stop, attached| trace.run(stop, attached), run);
        if lost > 0 {
            eprintln!("{lost} lost");
        }
        cost
    };
    trial(false, 0);
    let mut trials = 0;
    let mut comparison = Comparison::new(0.03);
    let mut both = [Vec::new(), Vec::new()];
    for quad in 0..quads as u32 {
        let order = if quad % 2 == 0 { [false, true, true, false] } else { [true, false, false, true] };
        let costs = order.map(|traced| {
            trials += 1;
            let cost = trial(traced, trials);
            both[usize::from(traced)].push(cost);
            cost
        });
        // `Comparison` takes values of which more is better: connections per CPU second.
        for pair in [(0, 1), (3, 2)] {
            let (without, with) = if order[pair.0] { (pair.1, pair.0) } else { pair };
            comparison.push(1.0 / costs[without], 1.0 / costs[with]);
        }
    }
    let conclusion = comparison.conclude().expect("quads");
    let [without, with] = both.map(|mut costs| {
        costs.sort_by(f64::total_cmp);
        costs[costs.len() / 2]
    });
    let (low, high) = conclusion.interval.unwrap_or((conclusion.ratio, conclusion.ratio));
    let more = |ratio: f64| (1.0 / ratio - 1.0) * 100.0;
    let reached = REACHED.load(Ordering::Relaxed) as f64 / (TRIAL.as_secs_f64() * (4 * quads + 1) as f64);
    let unit = if is_call { "call" } else { "connection" };
    println!(
        "{reached:.0} {unit}s/s, {quads} quads: {without:.3} us of CPU per {unit}, traced {with:.3} us (medians); \
         {:+.1}% ({:+.1} to {:+.1})",
        more(conclusion.ratio),
        more(high),
        more(low),
    );
}

/// Calls getppid() all the time. Returns microseconds of CPU time per call.
fn call() -> f64 {
    const BATCH: u32 = 10_000;
    let (cpu, begun) = (thread_cpu_time(), Instant::now());
    let mut calls = 0;
    while begun.elapsed() < TRIAL {
        for _ in 0..BATCH {
            black_box(parent_id());
        }
        calls += u64::from(BATCH);
    }
    let cost = (thread_cpu_time() - cpu).as_secs_f64() / calls as f64 * 1e6;
    REACHED.fetch_add(calls, Ordering::Relaxed);
    cost
}

fn destination(number: u32, six: bool) -> SocketAddr {
    if six {
        return SocketAddr::new(Ipv6Addr::LOCALHOST.into(), PORT);
    }
    SocketAddr::new(Ipv4Addr::from(0x7f00_0100 + number % ADDRESSES).into(), PORT)
}

fn serve(listener: &OwnedFd) {
    while let Ok(stream) = socket::accept(listener.as_fd()) {
        let _ = socket::receive(stream.as_fd(), &mut [0]);
    }
}

/// Dials in bursts every millisecond. Returns microseconds of CPU time per connection.
fn dial(rate: u64, six: bool, reset: bool, round: u32) -> f64 {
    schedule::sleep_precisely().expect("precise sleep");
    let (cpu, begun) = (process_cpu_time(), Instant::now());
    let mut dialed = 0_u32;
    loop {
        let elapsed = begun.elapsed();
        if elapsed >= TRIAL {
            break;
        }
        let due = (elapsed.as_secs_f64() * rate as f64) as u32;
        while dialed < due {
            let to = destination(round, six);
            let stream = socket::open(Transport::Tcp, to, false).expect("a socket");
            socket::connect(stream.as_fd(), to).expect("a connection");
            if reset {
                option::set_reset_on_close(stream.as_fd()).expect("SO_LINGER");
            }
            dialed += 1;
        }
        thread::sleep(Duration::from_millis(1));
    }
    let cost = (process_cpu_time() - cpu).as_secs_f64() / f64::from(dialed) * 1e6;
    // A busy machine may not reach the offered rate.
    REACHED.fetch_add(dialed.into(), Ordering::Relaxed);
    cost
}

/// The trace of a trial.
enum Trace {
    Connect(Connect),
    Accept(Accept),
    Locks(Locks),
}

impl Trace {
    /// Runs the trace. Returns the number of lost events.
    fn run(&self, stop: &AtomicBool, attached: impl FnOnce()) -> Result<u64, TraceError> {
        Ok(match self {
            Trace::Connect(connect) => connect.run(stop, attached, |_| ())?.results.lost,
            Trace::Accept(accept) => accept.run(stop, attached, |_| ())?.results.lost,
            Trace::Locks(locks) => locks.run(stop, attached, |_| ())?.results.lost,
        })
    }
}

/// Runs `run` while `trace` is attached, which gets the flag that ends it and what to call once it is. Returns the results of both.
fn with_trace<T, R: Send>(
    trace: impl FnOnce(&AtomicBool, Box<dyn FnOnce() + Send>) -> Result<R, TraceError> + Send,
    run: impl FnOnce() -> T,
) -> (T, R) {
    let stop = AtomicBool::new(false);
    let (attached, ready) = mpsc::channel();
    thread::scope(|scope| {
        let attached = Box::new(move || attached.send(()).expect("the receiver"));
        let tracer = scope.spawn(|| trace(&stop, attached));
        ready.recv().expect("a trace, which takes BPF");
        let result = run();
        stop.store(true, Ordering::Relaxed);
        (result, tracer.join().expect("no panic").expect("a trace"))
    })
}

/// Port of the listener without an accepting thread.
const UNACCEPTED: u16 = 4001;

/// Times of whole calls, in nanoseconds, by the parity of the port.
#[derive(Default)]
struct Own([Vec<u64>; 2]);

fn truth(words: &[String]) -> ExitCode {
    let connects: u32 = words.first().map_or(1_000_000, |word| word.parse().expect("a number of connects"));
    enter();
    let any = |port| SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
    let listener = listen(any(PORT), 4096);
    let for_server = listener.try_clone().expect("a descriptor");
    thread::spawn(move || while socket::accept(for_server.as_fd()).is_ok() {});

    set_sysctl("net.core.somaxconn", "16384");
    let _queue = listen(any(UNACCEPTED), 16_384);

    set_sysctl("net.ipv4.ip_local_port_range", "20000 59999");
    let begun = Instant::now();
    let (own, traced) = traced_to(PORT, || {
        let mut own = Own::default();
        for number in 0..connects {
            let stream = timed_dial(PORT, number, &mut own);
            option::set_reset_on_close(stream.as_fd()).expect("SO_LINGER");
        }
        own
    });
    println!("{:.0} connects/s", f64::from(connects) / begun.elapsed().as_secs_f64());
    let mut same = compare("ports free", own, &traced);

    set_sysctl("net.ipv4.ip_local_port_range", "20000 34999");
    let mut held = Vec::new();
    while held.len() < 7_500 {
        held.push(timed_dial(UNACCEPTED, 0, &mut Own::default()));
    }
    let (own, traced) = traced_to(UNACCEPTED, || {
        let mut own = Own::default();
        for _ in 0..1_000 {
            let stream = timed_dial(UNACCEPTED, 0, &mut own);
            option::set_reset_on_close(stream.as_fd()).expect("SO_LINGER");
        }
        own
    });
    same &= compare("even ports taken", own, &traced);
    if same { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn timed_dial(port: u16, number: u32, own: &mut Own) -> OwnedFd {
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

fn traced_to<T>(port: u16, run: impl FnOnce() -> T) -> (T, TraceConnectResults) {
    let connect = Connect { process: Some(std::process::id()), port: Some(port), ..Connect::default() };
    with_trace(|stop, attached| Ok(connect.run(stop, attached, |_| ())?.results), run)
}
