//! What the trace counts is what the server itself knows. No time decides but between two bounds that cannot be missed.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::listen::{Acceptor, Connection, Endpoint, Listen, ListenError, Policy, SeatStats};
use fourtuple_bpf::BpfError;
use fourtuple_measure::balance;
use fourtuple_record::{TraceAcceptResults, TraceListener};
use fourtuple_testing::{in_namespace, listener, skip};
use fourtuple_trace::{Accept, AcceptOutcome, TraceError};

/// Nothing is decided by it but that a test has failed.
const DEADLINE: Duration = Duration::from_secs(60);

/// Of this process, whose tests run at the same time: each has an address of its own.
fn at(address: SocketAddr) -> Accept {
    Accept {
        process: Some(process::id()),
        address: Some(address.ip()),
        port: Some(address.port()),
        ..Accept::default()
    }
}

/// Tells others to stop, also when the one who has it fails: nobody is to wait for ever.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Traces while `program` runs in the same namespace; `None`, aloud, where BPF is not to be had.
fn traced<T>(test: &str, accept: &Accept, program: impl FnOnce() -> T) -> Option<(T, AcceptOutcome)> {
    let stop = AtomicBool::new(false);
    let (attached, ready) = mpsc::channel();
    thread::scope(|scope| {
        let tracer = scope.spawn(|| accept.run(&stop, || attached.send(()).unwrap(), |_| ()));
        // Nothing comes from a tracer that has failed: then it has ended, or is about to.
        while ready.recv_timeout(Duration::from_millis(20)).is_err() {
            if tracer.is_finished() {
                match tracer.join().unwrap() {
                    Err(TraceError::Accept(error @ BpfError::NotPermitted { .. })) => {
                        skip(test, "bpf", &error.to_string());
                        return None;
                    }
                    // Before Linux 6.3, on which this cannot be traced.
                    Err(TraceError::Accept(error @ BpfError::Absent { .. })) => {
                        skip(test, "sk_data_ready", &error.to_string());
                        return None;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        let stops = Stops(&stop);
        let known = program();
        drop(stops);
        Some((known, tracer.join().unwrap().unwrap()))
    })
}

fn only(results: &TraceAcceptResults) -> &TraceListener {
    let [listener] = &results.listeners[..] else { panic!("{results:?}") };
    listener
}

fn count(spread: Option<fourtuple_record::Spread>) -> u64 {
    spread.map_or(0, |spread| spread.count)
}

/// A std listener on a port and an address that no other test of this process has.
fn std_listener(address: &str, backlog: i32) -> (TcpListener, SocketAddr) {
    let (socket, address) = listener(address, backlog);
    (TcpListener::from(socket), address)
}

/// Connections come one after the other, and each waits for as long as the server sleeps.
fn waits(test: &str, address: &'static str) {
    const NUMBER: u32 = 10;
    const DELAY: Duration = Duration::from_millis(50);
    /// The client may be back from connect() before its ACK has come to the other side.
    const SLACK: Duration = Duration::from_millis(20);
    let (listener, address) = std_listener(address, 16);
    let serve = || {
        let (mut least, mut most) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..NUMBER {
            let before = Instant::now();
            let client = TcpStream::connect(address).unwrap();
            let there = Instant::now();
            thread::sleep(DELAY);
            least += there.elapsed();
            let _server = listener.accept().unwrap();
            most += before.elapsed();
            drop(client);
        }
        (least, most)
    };
    let Some(((least, most), outcome)) = traced(test, &at(address), serve) else { return };
    let results = outcome.results;
    assert_eq!(outcome.validity, [], "{results:?}");
    let wait = results.wait_ns.expect("waits");
    assert_eq!((results.accepts, wait.count, results.lost), (NUMBER.into(), NUMBER.into(), 0));
    let mean = Duration::from_nanos(wait.mean);
    assert!(mean + SLACK >= least / NUMBER, "{mean:?} of at least {least:?} together");
    assert!(mean <= most / NUMBER, "{mean:?} of at most {most:?} together");
    let listener = only(&results);
    assert_eq!(listener.address, address.to_string());
    assert_eq!((listener.wait_ns, listener.queued), (Some(wait), NUMBER.into()));
    assert_eq!((listener.depth.max, listener.depth.mean, listener.depth.full), (1, 1.0, 0));
    assert_eq!(results.histogram.iter().map(|step| step.count).sum::<u64>(), u64::from(NUMBER));
    // Of a SYN-ACK that had to be sent twice there is no time.
    assert_eq!(count(results.handshake_ns) + listener.retried_handshakes, u64::from(NUMBER));
    let [worker] = &listener.workers[..] else { panic!("{listener:?}") };
    assert_eq!((worker.process, worker.accepts), (process::id(), u64::from(NUMBER)));
    assert_eq!((worker.empty, worker.open), (0, 0));
}

#[test]
fn the_wait_is_the_servers_own() {
    in_namespace(|| waits("the_wait_is_the_servers_own", "127.0.1.1"));
}

#[test]
fn ipv6_waits_as_well() {
    in_namespace(|| waits("ipv6_waits_as_well", "::1"));
}

/// Answers a byte with a byte until the peer closes.
fn serve(mut acceptor: Acceptor, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let Some(mut connection) = acceptor.next(Some(Duration::from_millis(20))).unwrap() else { continue };
        if answer(&mut connection) {
            acceptor.keep(connection).unwrap();
        }
    }
}

/// Whether the connection goes on.
fn answer(connection: &mut Connection) -> bool {
    let mut byte = [0];
    match connection.read(&mut byte) {
        Ok(1) => {
            connection.write_all(&byte).unwrap();
            connection.answered();
            true
        }
        Ok(_) => false,
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => true,
        Err(error) => panic!("{error}"),
    }
}

const WORKERS: usize = 4;
const CONNECTIONS: u64 = 48;
const REQUESTS: u64 = 3;

/// Clients one after the other, each with so many requests.
fn ask(address: SocketAddr) {
    for _ in 0..CONNECTIONS {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        for _ in 0..REQUESTS {
            stream.write_all(b"?").unwrap();
            stream.read_exact(&mut [0]).unwrap();
        }
    }
}

/// What the workers of a group say of themselves, and what the trace says.
fn policy(test: &str, policy: Policy, address: &str) -> Option<(Vec<SeatStats>, TraceAcceptResults)> {
    let address: SocketAddr = SocketAddr::new(address.parse::<IpAddr>().unwrap(), 0);
    let group = match Listen::at(Endpoint::Inet(address)).policy(policy).seats(WORKERS).open() {
        Err(error @ (ListenError::Absent { .. } | ListenError::NotPermitted { .. })) => {
            skip(test, "io_uring", &error.to_string());
            return None;
        }
        group => group.unwrap(),
    };
    let address = group.endpoint().inet().unwrap();
    let run = || {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            // Before the first client comes: some have no listener until then.
            let acceptors: Vec<_> = (0..WORKERS).map(|_| group.join().unwrap()).collect();
            for acceptor in acceptors {
                scope.spawn(|| serve(acceptor, &stop));
            }
            let _stops = Stops(&stop);
            ask(address);
            let begun = Instant::now();
            // The last is still to be closed.
            while group.stats().iter().any(|seat| seat.open > 0) {
                assert!(begun.elapsed() < DEADLINE, "{:?}", group.stats());
                thread::sleep(Duration::from_millis(5));
            }
        });
        group.stats()
    };
    let (stats, outcome) = traced(test, &at(address), run)?;
    let results = outcome.results;
    if let ([remark], true) = (&outcome.validity[..], policy == Policy::UringOneshot)
        && remark.id == "accepts-unseen"
    {
        // Before io_uring_complete had the completion itself among its arguments (6.12 has not). That it is said is what counts.
        assert_eq!(results.accepts, 0, "{results:?}");
        skip(test, "io_uring_complete", &remark.message);
        return None;
    }
    assert_eq!(outcome.validity, [], "{results:?}");
    assert_eq!((results.accepts, results.lost, results.overflows), (CONNECTIONS, 0, 0), "{results:?}");
    assert_eq!(count(results.wait_ns), CONNECTIONS);
    // Worker for worker: what each accepted.
    let mut known: Vec<u64> = stats.iter().map(|seat| seat.accepts).filter(|&accepts| accepts > 0).collect();
    let workers = || results.listeners.iter().flat_map(|listener| &listener.workers);
    let mut seen: Vec<u64> = workers().map(|worker| worker.accepts).filter(|&accepts| accepts > 0).collect();
    known.sort_unstable();
    seen.sort_unstable();
    assert_eq!(seen, known, "{results:?}");
    assert_eq!(workers().map(|worker| worker.open).sum::<u64>(), 0);
    assert_eq!(workers().map(|worker| worker.reads).sum::<u64>(), CONNECTIONS * REQUESTS);
    let closed_by_peer: u64 = results.listeners.iter().map(|listener| listener.closed_by_peer).sum();
    assert_eq!(closed_by_peer, CONNECTIONS, "{results:?}");
    Some((stats, results))
}

#[test]
fn blocking_accepts_are_counted() {
    in_namespace(|| {
        policy("blocking_accepts_are_counted", Policy::Blocking, "127.0.1.2");
    });
}

#[test]
fn io_uring_accepts_are_counted() {
    in_namespace(|| {
        policy("io_uring_accepts_are_counted", Policy::UringOneshot, "127.0.1.3");
    });
}

#[test]
fn shared_epoll_accepts_are_counted() {
    in_namespace(|| {
        policy("shared_epoll_accepts_are_counted", Policy::SharedOneshot, "127.0.1.4");
    });
}

#[test]
fn members_of_a_group_are_apart() {
    in_namespace(|| {
        let Some((_, results)) = policy("members_of_a_group_are_apart", Policy::Reuseport, "127.0.1.5")
        else {
            return;
        };
        assert!(!results.listeners.is_empty() && results.listeners.len() <= WORKERS, "{results:?}");
        for listener in &results.listeners {
            assert!(listener.group >= 1, "{listener:?}");
            assert_eq!(listener.workers.len(), 1, "{listener:?}");
        }
    });
}

/// Jain's index of all workers, those included that the trace has never seen.
fn agrees_on_the_ladder(test: &str, waits: Policy, address: &str) {
    let Some((stats, results)) = policy(test, waits, address) else { return };
    let listener = only(&results);
    let mut shares: Vec<u64> = listener.workers.iter().map(|worker| worker.accepts).collect();
    assert!(shares.is_sorted_by(|one, other| one >= other), "{shares:?}");
    assert_eq!(listener.jain, balance::jain(&shares));
    shares.resize(WORKERS, 0);
    let known: Vec<u64> = stats.iter().map(|seat| seat.accepts).collect();
    let known = balance::jain(&known).unwrap();
    assert!((balance::jain(&shares).unwrap() - known).abs() < 1e-9);
    // Whoever finds nobody says so too.
    assert_eq!(results.empty, stats.iter().map(|seat| seat.empty_accepts).sum::<u64>(), "{results:?}");
    assert!(results.woken_for_nothing <= results.empty);
}

#[test]
fn the_ladder_of_exclusive_waiters_is_seen() {
    in_namespace(|| {
        agrees_on_the_ladder("the_ladder_of_exclusive_waiters_is_seen", Policy::Exclusive, "127.0.1.6");
    });
}

#[test]
fn workers_that_take_turns_are_seen() {
    in_namespace(|| {
        agrees_on_the_ladder("workers_that_take_turns_are_seen", Policy::ROTATE, "127.0.1.7");
    });
}

#[test]
fn all_that_are_woken_are_seen() {
    in_namespace(|| {
        agrees_on_the_ladder("all_that_are_woken_are_seen", Policy::Plain, "127.0.1.8");
    });
}

/// ListenOverflows of this namespace, which the kernel counts itself.
fn kernels_overflows() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/net/netstat").unwrap();
    let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let place = names.split(' ').position(|name| name == "ListenOverflows").unwrap();
    values.split(' ').nth(place).unwrap().parse().unwrap()
}

/// Until the only listener of this namespace has so many in its queue: the client may be back from connect() before its ACK
/// has come to the other side.
fn wait_for_queue(depth: u32) {
    let queue = || {
        let text = fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
        // Of a listener (0A) the receive queue is the accept queue.
        let line = text.lines().find(|line| line.split_whitespace().nth(3) == Some("0A")).unwrap();
        let queues = line.split_whitespace().nth(4).unwrap();
        u32::from_str_radix(queues.split_once(':').unwrap().1, 16).unwrap()
    };
    let begun = Instant::now();
    while queue() != depth {
        assert!(begun.elapsed() < DEADLINE, "{}", queue());
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_full_queue_is_seen() {
    in_namespace(|| {
        let (listener, address) = std_listener("127.0.1.9", 1);
        let run = || {
            let clients = [(); 2].map(|()| TcpStream::connect(address).unwrap());
            wait_for_queue(2);
            for _ in 0..3 {
                TcpStream::connect_timeout(&address, Duration::from_millis(50)).unwrap_err();
            }
            let overflows = kernels_overflows();
            let accepted = [(); 2].map(|()| listener.accept().unwrap());
            drop((clients, accepted, listener));
            overflows
        };
        let Some((overflows, outcome)) = traced("a_full_queue_is_seen", &at(address), run) else { return };
        let results = outcome.results;
        assert!(overflows >= 3);
        assert_eq!((results.accepts, results.overflows, results.lost), (2, overflows, 0), "{results:?}");
        let listener = only(&results);
        assert_eq!((listener.overflow_acks, listener.other_drops, listener.never_accepted), (0, 0, 0));
        assert_eq!((listener.depth.max, listener.depth.backlog, listener.depth.full), (2, 1, 1));
        assert!(listener.closed);
    });
}

/// As many as FOURTUPLE_TIME_WAITS says.
fn time_waits() -> u64 {
    std::env::var("FOURTUPLE_TIME_WAITS").map_or(500, |number| number.parse().unwrap())
}

#[test]
fn time_wait_is_blamed_on_who_closes() {
    in_namespace(|| {
        let (listener, address) = std_listener("127.0.1.10", 64);
        let number = time_waits();
        let run = || {
            thread::scope(|scope| {
                let server = scope.spawn(|| {
                    for turn in 0..number {
                        let (mut stream, _) = listener.accept().unwrap();
                        if turn % 5 == 4 {
                            // The client does.
                            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
                        }
                    }
                });
                for turn in 0..number {
                    let mut stream = TcpStream::connect(address).unwrap();
                    if turn % 5 != 4 {
                        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
                    }
                }
                server.join().unwrap();
            });
        };
        let Some(((), outcome)) = traced("time_wait_is_blamed_on_who_closes", &at(address), run) else {
            return;
        };
        let results = outcome.results;
        let listener = only(&results);
        let by_peer = number / 5;
        assert_eq!((results.accepts, results.lost), (number, 0));
        assert_eq!((listener.closed_first, listener.closed_by_peer), (number - by_peer, by_peer));
        let [worker] = &listener.workers[..] else { panic!("{listener:?}") };
        assert_eq!((worker.process, worker.closed_first), (process::id(), number - by_peer));
        assert_eq!(worker.open, 0);
    });
}

#[test]
fn what_nobody_accepts_is_told() {
    in_namespace(|| {
        let (listener, address) = std_listener("127.0.1.11", 16);
        let run = || {
            let clients = [(); 5].map(|()| TcpStream::connect(address).unwrap());
            wait_for_queue(5);
            let first = listener.accept().unwrap();
            // The others go with the listener.
            drop(listener);
            drop((first, clients));
        };
        let Some(((), outcome)) = traced("what_nobody_accepts_is_told", &at(address), run) else { return };
        let listener = only(&outcome.results);
        assert_eq!((listener.queued, listener.accepts, listener.never_accepted), (5, 1, 4), "{listener:?}");
    });
}
