//! A contention that is made is seen in its class, and is gone after what removes it. No time decides: what decides is whether
//! there were waits, in as many rounds as it takes.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use fourtuple_bpf::BpfError;
use fourtuple_record::TraceLocksResults;
use fourtuple_syscalls::option::Answer;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{option, socket};
use fourtuple_testing::{in_namespace, set_sysctl, skip};
use fourtuple_trace::{Locks, LocksOutcome, TraceError};

const THREADS: u16 = 4;
/// Ports that all threads look through, or that each has to itself.
const PORTS: u16 = 30;
const FIRST_PORT: u16 = 20_000;
/// A contention is a matter of chance: so many rounds of as many connections until there is one.
const ROUNDS: u32 = 60;
const CONNECTIONS: u64 = 2_000;

/// What the threads share, and what they have for themselves.
#[derive(Clone, Copy)]
struct Manner {
    /// Name of all threads, by which they are traced; no other test has it.
    name: &'static str,
    own_ports: bool,
    own_listeners: bool,
}

fn listen(group: bool, port: u16) -> OwnedFd {
    let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
    let listener = socket::open(Transport::Tcp, address, false).unwrap();
    if group {
        assert_eq!(option::set_reuse_port(listener.as_fd()).unwrap(), Answer::Done);
    }
    // Who accepts looks whether it is over.
    option::set_receive_timeout(listener.as_fd(), Duration::from_millis(20)).unwrap();
    socket::bind(listener.as_fd(), address).unwrap();
    socket::listen(listener.as_fd(), 4096).unwrap();
    listener
}

/// One connection, closed with RST, so that nothing of it stays; `None`: this kernel has no port range for a socket.
fn connect_once(to: SocketAddr, ports: Option<(u16, u16)>) -> Option<()> {
    let client = socket::open(Transport::Tcp, to, false).unwrap();
    if let Some((low, high)) = ports {
        match option::set_local_port_range(client.as_fd(), low, high).unwrap() {
            Answer::Done => {}
            Answer::Absent => return None,
        }
    }
    option::set_reset_on_close(client.as_fd()).unwrap();
    // A port that the other side has not let go of yet is a dial in vain.
    let _ = socket::connect(client.as_fd(), to);
    Some(())
}

/// `CONNECTIONS` by threads that accept and threads that connect, all at the same time; false: no ranges to be had.
fn round(manner: Manner) -> bool {
    let port = 9_000;
    let to = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
    let group = manner.own_listeners;
    let listeners: Vec<OwnedFd> = (0..if group { THREADS } else { 1 }).map(|_| listen(group, port)).collect();
    let (left, over, absent) = (AtomicU64::new(CONNECTIONS), AtomicBool::new(false), AtomicBool::new(false));
    let thread = || thread::Builder::new().name(manner.name.to_owned());
    thread::scope(|scope| {
        for at in 0..usize::from(THREADS) {
            let (listener, over) = (&listeners[at % listeners.len()], &over);
            let accepts = move || {
                while !over.load(Ordering::Relaxed) {
                    // EAGAIN when nobody comes; ECONNABORTED is of one who has gone again.
                    drop(socket::accept(listener.as_fd()));
                }
            };
            thread().spawn_scoped(scope, accepts).unwrap();
        }
        let clients: Vec<_> = (0..THREADS)
            .map(|at| {
                let low = FIRST_PORT + at * PORTS;
                let ports = manner.own_ports.then_some((low, low + PORTS - 1));
                let (left, absent) = (&left, &absent);
                let connects = move || {
                    let take = |left: u64| left.checked_sub(1);
                    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                        if connect_once(to, ports).is_none() {
                            absent.store(true, Ordering::Relaxed);
                            break;
                        }
                    }
                };
                thread().spawn_scoped(scope, connects).unwrap()
            })
            .collect();
        clients.into_iter().for_each(|client| client.join().unwrap());
        over.store(true, Ordering::Relaxed);
    });
    !absent.load(Ordering::Relaxed)
}

/// Traces `rounds` in this manner; `None`, aloud, where BPF or a port range is not to be had.
fn traced(test: &str, manner: Manner, rounds: u32) -> Option<LocksOutcome> {
    let locks = Locks { name: Some(manner.name.to_owned()), ..Locks::default() };
    let stop = AtomicBool::new(false);
    let (attached, ready) = mpsc::channel();
    thread::scope(|scope| {
        let tracer = scope.spawn(|| locks.run(&stop, || attached.send(()).unwrap(), |_| ()));
        // Nothing comes from a tracer that has failed: then it has ended, or is about to.
        while ready.recv_timeout(Duration::from_millis(20)).is_err() {
            if tracer.is_finished() {
                match tracer.join().unwrap() {
                    Err(TraceError::Locks(
                        error @ (BpfError::NotPermitted { .. } | BpfError::Absent { .. }),
                    )) => {
                        skip(test, "bpf", &error.to_string());
                        return None;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        let whole = (0..rounds).all(|_| round(manner));
        stop.store(true, Ordering::Relaxed);
        let outcome = tracer.join().unwrap().unwrap();
        if !whole {
            skip(test, "port-range", "this kernel has no IP_LOCAL_PORT_RANGE");
            return None;
        }
        Some(outcome)
    })
}

/// Waits of `counted` in this manner, over as many rounds as give `enough`: rounds and waits. `None`, aloud, where there are
/// none because the host does not show them.
fn contention(
    test: &str,
    manner: Manner,
    enough: u64,
    counted: impl Fn(&TraceLocksResults) -> u64,
) -> Option<(u32, u64)> {
    let (mut rounds, mut waits, mut blind) = (0, 0, Vec::new());
    while waits < enough && rounds < ROUNDS {
        let results = traced(test, manner, 4)?.results;
        rounds += 4;
        waits += counted(&results);
        agree(&results);
        blind = results.blind_spots;
    }
    if waits < enough {
        let unseen = blind.iter().any(|spot| spot.contains("pending bit") || spot.contains("virt_spin_lock"));
        assert!(unseen, "{waits} waits in {rounds} rounds, and no blind spot says why: {blind:?}");
        skip(test, "lock-waits", &blind.join("; "));
        return None;
    }
    Some((rounds, waits))
}

/// The sums are those of the classes, and each class has its paths.
fn agree(results: &TraceLocksResults) {
    assert_eq!(results.waits, results.classes.iter().map(|class| class.waits).sum::<u64>());
    assert_eq!(results.wait_ns, results.classes.iter().map(|class| class.wait_ns).sum::<u64>());
    for class in &results.classes {
        let of_class = results.paths.iter().filter(|path| path.class == class.class);
        assert!(of_class.map(|path| path.waits).sum::<u64>() <= class.waits, "{class:?}");
        assert!(class.sleeps <= class.waits && !class.remedy.is_empty(), "{class:?}");
    }
}

fn waits_on_path(results: &TraceLocksResults, class: &str, kind: &str, function: &str) -> u64 {
    let paths = results.paths.iter().filter(|path| path.class == class && path.kind == kind);
    paths.filter(|path| path.frames.iter().any(|frame| frame == function)).map(|path| path.waits).sum()
}

/// Threads that accept on one socket sleep until the one that has it lets go. A socket that one thread alone accepts on has no
/// other owner, so that there is nobody to sleep for.
#[test]
fn accepting_on_one_listener_is_seen_and_a_listener_each_removes_it() {
    in_namespace(|| {
        let test = "accepting_on_one_listener_is_seen_and_a_listener_each_removes_it";
        let sleeps =
            |results: &TraceLocksResults| waits_on_path(results, "listener", "sleep", "inet_csk_accept");
        let manner = Manner { name: "locks-accept", own_ports: false, own_listeners: false };
        let Some((rounds, before)) = contention(test, manner, 1, sleeps) else { return };
        let manner = Manner { own_listeners: true, ..manner };
        let Some(outcome) = traced(test, manner, rounds) else { return };
        assert!(before > 0);
        assert_eq!(sleeps(&outcome.results), 0, "{:?}", outcome.results.paths);
    });
}

/// Threads that look for a port in one range look into the same buckets. With a range each there is nobody to wait for, but for
/// another namespace whose bucket is the same by chance.
#[test]
fn looking_for_ports_in_one_range_is_seen_and_a_range_each_removes_it() {
    in_namespace(|| {
        let test = "looking_for_ports_in_one_range_is_seen_and_a_range_each_removes_it";
        set_sysctl("net.ipv4.ip_local_port_range", &format!("{FIRST_PORT} {}", FIRST_PORT + PORTS - 1));
        let searches =
            |results: &TraceLocksResults| waits_on_path(results, "bhash", "spin", "__inet_hash_connect");
        let manner = Manner { name: "locks-search", own_ports: false, own_listeners: false };
        let Some((rounds, before)) = contention(test, manner, 40, searches) else { return };
        set_sysctl(
            "net.ipv4.ip_local_port_range",
            &format!("{FIRST_PORT} {}", FIRST_PORT + THREADS * PORTS - 1),
        );
        let manner = Manner { own_ports: true, ..manner };
        let Some(outcome) = traced(test, manner, rounds) else { return };
        let after = searches(&outcome.results);
        assert!(after * 4 <= before, "{before} waits, then {after}: {:?}", outcome.results.paths);
    });
}

/// The bucket of the port that all connect to is waited for, and goes by that port.
#[test]
fn a_bucket_goes_by_its_port() {
    in_namespace(|| {
        let test = "a_bucket_goes_by_its_port";
        let of_server = |results: &TraceLocksResults| {
            results.ports.iter().filter(|port| port.port == 9_000).map(|port| port.waits).sum()
        };
        let manner = Manner { name: "locks-bucket", own_ports: false, own_listeners: false };
        contention(test, manner, 1, of_server);
    });
}

#[test]
fn a_stack_is_folded_from_its_root() {
    in_namespace(|| {
        let test = "a_stack_is_folded_from_its_root";
        let manner = Manner { name: "locks-folded", own_ports: false, own_listeners: false };
        let Some(outcome) = traced(test, manner, 4) else { return };
        let folded: u64 = outcome.folded.iter().map(|(_, ns)| ns).sum();
        assert_eq!(folded, outcome.results.wait_ns);
        for (stack, _) in &outcome.folded {
            assert!(stack.ends_with(']') && !stack.contains("slowpath"), "{stack}");
        }
    });
}
