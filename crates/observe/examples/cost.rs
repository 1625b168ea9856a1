//! Measures the overhead of tracing: CPU time per connection with and without a trace, in interleaved trials of a second.
//!
//! `cargo run --release -p fourtuple-observe --example cost -- [any|dst|dst6|accept|locks] [fin|rst|getppid] [QUADS] [RATE]`
//!
//! One process dials its own server over loopback in a new network namespace, at RATE connections per second (20,000), to one of
//! 128 destinations per trial (IPv6: one), and closes each connection at once: with a FIN, or with a RST, which is the cheapest
//! and leaves no TIME_WAIT socket. The CPU time of the process covers both ends, the softirqs that run in their context (without
//! IRQ_TIME_ACCOUNTING), and the thread that reads the trace, but not attaching and detaching. `any` traces connect() without a
//! filter, `dst` filters an IPv4 address without connects, `dst6` filters the dialed IPv6 address; `accept` and `locks` run the
//! other traces. `getppid` opens no connections: it measures the CPU time of a thread per call of getppid(2), the cheapest system call.

use std::env;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::parent_id;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_observe::trace::{Accept, Connect, Instrument, Locks, TraceError};
use fourtuple_record::measure::Comparison;
use fourtuple_syscalls::resource::{process_cpu_time, raise_descriptor_limit, thread_cpu_time};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{netns, option, schedule};
use fourtuple_testing::set_sysctl;

const TRIAL: Duration = Duration::from_secs(1);
const PORT: u16 = 4000;
const ADDRESSES: u32 = 128;
/// Number of connections in all trials.
static REACHED: AtomicU64 = AtomicU64::new(0);

fn main() {
    let words: Vec<String> = env::args().skip(1).collect();
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
    netns::enter_new().expect("a network namespace, which takes root");
    set_sysctl("net.ipv4.ip_local_port_range", "10000 65000");
    raise_descriptor_limit().expect("descriptors");
    let any: IpAddr = if six { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let listener = socket::open(Transport::Tcp, SocketAddr::new(any, PORT), false).expect("a socket");
    socket::bind(listener.as_fd(), SocketAddr::new(any, PORT)).expect("its port");
    socket::listen(listener.as_fd(), 4096).expect("a listening socket");
    thread::spawn(move || serve(&listener));
    let trial = |traced: bool, round: u32| {
        let run = || if is_call { call() } else { dial(rate, six, reset, round) };
        if traced { with_trace(&trace, run) } else { run() }
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

fn with_trace<T>(trace: &Trace, run: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    let (attached, ready) = mpsc::channel();
    thread::scope(|scope| {
        let tracer = scope.spawn(|| trace.run(&stop, move || attached.send(()).expect("the receiver")));
        ready.recv().expect("a trace, which takes BPF");
        let result = run();
        stop.store(true, Ordering::Relaxed);
        let lost = tracer.join().expect("no panic").expect("a trace");
        if lost > 0 {
            eprintln!("{lost} lost");
        }
        result
    })
}
