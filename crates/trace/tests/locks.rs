//! A contention that is made is seen in its class, and is gone after what removes it. No time decides: what decides is whether
//! there were waits, in as many rounds as it takes.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::{self, Scope, ScopedJoinHandle};
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
/// Where is listened, or nobody listens.
const PORT: u16 = 9_000;
const FIRST_PORT: u16 = 20_000;
/// A contention is a matter of chance: so many rounds of as many connections, or dials in vain, until there is one.
const ROUNDS: u32 = 30;
const CONNECTIONS: u64 = 8_000;
const DIALS: u64 = 40_000;

fn listen(group: bool) -> OwnedFd {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
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

/// The threads of a test have a name that no others have, by which they are traced.
fn spawn<'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() + Send + 'scope,
) -> ScopedJoinHandle<'scope, ()> {
    thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, work).unwrap()
}

/// Calls `work` so many times, by several threads at the same time. It is told which thread it is.
fn by_threads(name: &str, times: u64, work: impl Fn(u16) + Sync) {
    let left = AtomicU64::new(times);
    thread::scope(|scope| {
        for at in 0..THREADS {
            let (left, work) = (&left, &work);
            let take = |left: u64| left.checked_sub(1);
            spawn(scope, name, move || {
                while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                    work(at);
                }
            });
        }
    });
}

/// Connections that threads accept on one listener, or each on its own.
fn connections(name: &str, own_listeners: bool) {
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    let listeners: Vec<OwnedFd> =
        (0..if own_listeners { THREADS } else { 1 }).map(|_| listen(own_listeners)).collect();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for at in 0..usize::from(THREADS) {
            let (listener, over) = (&listeners[at % listeners.len()], &over);
            spawn(scope, name, move || {
                while !over.load(Ordering::Relaxed) {
                    // EAGAIN when nobody comes; ECONNABORTED is of one who has gone again.
                    drop(socket::accept(listener.as_fd()));
                }
            });
        }
        by_threads(name, CONNECTIONS, |_| {
            let client = socket::open(Transport::Tcp, to, false).unwrap();
            // So that nothing of it stays.
            option::set_reset_on_close(client.as_fd()).unwrap();
            // A port that the other side has not let go of yet is a dial in vain.
            let _ = socket::connect(client.as_fd(), to);
        });
        over.store(true, Ordering::Relaxed);
    });
}

/// Dials to where nobody listens: the port is looked for and is free again at once. From one range, or each thread from its own;
/// false: this kernel has no ranges for sockets.
fn dials(name: &str, own_ports: bool) -> bool {
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    let absent = AtomicBool::new(false);
    by_threads(name, DIALS, |at| {
        let client = socket::open(Transport::Tcp, to, false).unwrap();
        if own_ports {
            let low = FIRST_PORT + at * PORTS;
            let answer = option::set_local_port_range(client.as_fd(), low, low + PORTS - 1).unwrap();
            absent.fetch_or(answer == Answer::Absent, Ordering::Relaxed);
        }
        // ECONNREFUSED, or EADDRNOTAVAIL where all ports are just in use.
        let _ = socket::connect(client.as_fd(), to);
    });
    !absent.load(Ordering::Relaxed)
}

/// Traces threads of this name while there is work; `None`, aloud, where BPF is not to be had.
fn traced(test: &str, name: &str, work: impl FnOnce()) -> Option<LocksOutcome> {
    let locks = Locks { name: Some(name.to_owned()), ..Locks::default() };
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
        work();
        stop.store(true, Ordering::Relaxed);
        Some(tracer.join().unwrap().unwrap())
    })
}

/// Waits of `counted` in as many rounds of work as give `enough`: rounds and waits. `None`, aloud, where there are none because
/// the host does not show them.
fn contention(
    test: &str,
    name: &str,
    enough: u64,
    work: impl Fn(),
    counted: impl Fn(&TraceLocksResults) -> u64,
) -> Option<(u32, u64)> {
    let (mut rounds, mut waits, mut blind) = (0, 0, Vec::new());
    while waits < enough && rounds < ROUNDS {
        let results = traced(test, name, &work)?.results;
        rounds += 1;
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
        let name = "locks-accept";
        let sleeps =
            |results: &TraceLocksResults| waits_on_path(results, "listener", "sleep", "inet_csk_accept");
        let Some((rounds, _)) = contention(test, name, 1, || connections(name, false), sleeps) else {
            return;
        };
        let again = || (0..rounds).for_each(|_| connections(name, true));
        let Some(outcome) = traced(test, name, again) else { return };
        assert_eq!(sleeps(&outcome.results), 0, "{:?}", outcome.results.paths);
        assert!(outcome.results.connections > 0);
    });
}

/// Threads that look for a port in one range look into the same buckets. With a range each there is nobody to wait for, but for
/// another namespace whose bucket is the same by chance.
#[test]
fn looking_for_ports_in_one_range_is_seen_and_a_range_each_removes_it() {
    in_namespace(|| {
        let test = "looking_for_ports_in_one_range_is_seen_and_a_range_each_removes_it";
        let name = "locks-search";
        let range = |ports: u16| {
            set_sysctl("net.ipv4.ip_local_port_range", &format!("{FIRST_PORT} {}", FIRST_PORT + ports - 1));
        };
        let searches =
            |results: &TraceLocksResults| waits_on_path(results, "bhash", "spin", "__inet_hash_connect");
        range(PORTS);
        let work = || assert!(dials(name, false));
        let Some((rounds, before)) = contention(test, name, 20, work, searches) else { return };
        range(THREADS * PORTS);
        let mut ranges = true;
        let again = || ranges = (0..rounds).all(|_| dials(name, true));
        let Some(outcome) = traced(test, name, again) else { return };
        if !ranges {
            skip(test, "port-range", "this kernel has no IP_LOCAL_PORT_RANGE");
            return;
        }
        let after = searches(&outcome.results);
        assert!(after * 4 <= before, "{before} waits, then {after}: {:?}", outcome.results.paths);
    });
}

/// The bucket of the port that all connect to is waited for, and goes by that port.
#[test]
fn a_bucket_goes_by_its_port() {
    in_namespace(|| {
        let test = "a_bucket_goes_by_its_port";
        let name = "locks-bucket";
        let of_server = |results: &TraceLocksResults| {
            results.ports.iter().filter(|port| port.port == PORT).map(|port| port.waits).sum()
        };
        contention(test, name, 1, || connections(name, false), of_server);
    });
}

#[test]
fn a_stack_is_folded_from_its_root() {
    in_namespace(|| {
        let test = "a_stack_is_folded_from_its_root";
        let name = "locks-folded";
        let Some(outcome) = traced(test, name, || connections(name, false)) else { return };
        let folded: u64 = outcome.folded.iter().map(|(_, ns)| ns).sum();
        assert_eq!(folded, outcome.results.wait_ns);
        for (stack, _) in &outcome.folded {
            assert!(stack.ends_with(']') && !stack.contains("slowpath"), "{stack}");
        }
    });
}
