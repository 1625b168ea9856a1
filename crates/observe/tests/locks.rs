//! Contention that a test causes is counted in its class, and disappears with its remedy. Tests assert on the number of waits,
//! never on their time.

mod traced;

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use fourtuple_observe::trace::{Locks, Outcome, Survey};
use fourtuple_record::TraceLocksResults;
use fourtuple_record::snapshot::TracedLocks;
use fourtuple_syscalls::option::Answer;
use fourtuple_syscalls::socket::Transport;
use fourtuple_syscalls::{option, socket};
use fourtuple_testing::{StopOnDrop, set_sysctl, skip};
use traced::{elsewhere, named, own_network};

const THREADS: u16 = 4;
/// Size of the port range that all threads share, or that each thread has.
const PORTS: u16 = 30;
/// Destination port, with or without a listener.
const PORT: u16 = 9_000;
const FIRST_PORT: u16 = 20_000;
/// Contention depends on timing, so a test repeats at most this many rounds of connections, or of refused dials.
const ROUNDS: u32 = 100;
const CONNECTIONS: u64 = 3_000;
const DIALS: u64 = 10_000;

fn listen(group: bool) -> OwnedFd {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    let listener = socket::open(Transport::Tcp, address, false).unwrap();
    // Connections of the round before may still be in TIME_WAIT at this port.
    option::set_reuse_address(listener.as_fd(), true).unwrap();
    if group {
        assert_eq!(option::set_reuse_port(listener.as_fd()).unwrap(), Answer::Done);
    }
    // The accepting thread checks the end of the test this often.
    option::set_receive_timeout(listener.as_fd(), Duration::from_millis(20)).unwrap();
    socket::bind(listener.as_fd(), address).unwrap();
    socket::listen(listener.as_fd(), 4096).unwrap();
    listener
}

/// Spawns a thread with the name by which the test traces it.
fn spawn<'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    work: impl FnOnce() + Send + 'scope,
) -> ScopedJoinHandle<'scope, ()> {
    thread::Builder::new().name(name.to_owned()).spawn_scoped(scope, work).unwrap()
}

/// Calls `work` `times` times from `THREADS` threads, with the index of the thread.
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

/// Opens connections, which threads accept from one listener, or each thread from its own listener.
fn connections(name: &str, own_listeners: bool) {
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
    let listeners: Vec<OwnedFd> =
        (0..if own_listeners { THREADS } else { 1 }).map(|_| listen(own_listeners)).collect();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _over = StopOnDrop(&over);
        for at in 0..usize::from(THREADS) {
            let (listener, over) = (&listeners[at % listeners.len()], &over);
            spawn(scope, name, move || {
                while !over.load(Ordering::Relaxed) {
                    // accept() fails with EAGAIN without a connection, and with ECONNABORTED if the client has already reset it.
                    drop(socket::accept(listener.as_fd()));
                }
            });
        }
        by_threads(name, CONNECTIONS, |_| {
            let client = socket::open(Transport::Tcp, to, true).unwrap();
            // A RST leaves no TIME_WAIT socket.
            option::set_reset_on_close(client.as_fd()).unwrap();
            // A dial fails when the server has not released the port yet. The limit of 50 ms avoids waiting a second for the
            // retransmission of a SYN that a full queue dropped.
            let _ = socket::connect(client.as_fd(), to);
            let _ = socket::wait_connected(client.as_fd(), Some(Duration::from_millis(50)));
        });
    });
}

/// Dials a port without a listener: each dial searches for a source port and releases it at once. All threads share one range,
/// or each has its own. Returns false if this kernel has no IP_LOCAL_PORT_RANGE.
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
        // connect() fails with ECONNREFUSED, or with EADDRNOTAVAIL while all ports are in use.
        let _ = socket::connect(client.as_fd(), to);
    });
    !absent.load(Ordering::Relaxed)
}

/// Traces threads of this process named `name` while `work` runs.
fn traced(test: &str, name: &str, work: impl FnOnce()) -> Option<Outcome<TraceLocksResults>> {
    let locks = Locks { process: Some(process::id()), name: Some(name.to_owned()), ..Locks::default() };
    traced::traced(test, &locks, work).map(|((), outcome)| outcome)
}

/// Repeats `work` until `counted` returns `enough` waits in total. Returns the number of rounds and of waits. Returns `None`
/// and reports a skipped test where the host does not show waits.
fn contention(
    test: &str,
    name: &str,
    enough: u64,
    work: impl Fn(),
    counted: impl Fn(&TraceLocksResults) -> u64,
) -> Option<(u32, u64)> {
    if thread::available_parallelism().is_ok_and(|processors| processors.get() < 2) {
        skip(test, "lock-waits", "on one processor no thread spins while another one has the lock");
        return None;
    }
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

/// Asserts that totals equal the sums of the classes, and that paths belong to classes.
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

/// A lock has no network namespace: waits count by the namespace of the thread, connections by their own.
#[test]
fn a_trace_of_a_namespace_counts_its_tasks_and_connections() {
    named(|test| {
        let dials = |number: u32| {
            let _listener = listen(false);
            let to = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
            for _ in 0..number {
                let client = socket::open(Transport::Tcp, to, false).unwrap();
                option::set_reset_on_close(client.as_fd()).unwrap();
                socket::connect(client.as_fd(), to).unwrap();
            }
        };
        let program = || {
            dials(3);
            elsewhere(|| dials(5));
            // Threads of both namespaces wait for the same locks.
            connections("locks-netns", false);
            elsewhere(|| connections("locks-netns", false));
        };
        let own = own_network();
        for network in [Some(own), Some(1)] {
            let trace = Locks { network, ..Locks::default() };
            let Some(((), outcome)) = traced::traced(test, &trace, program) else { return };
            let results = &outcome.results;
            // A dial of `connections` may be given up before it is established.
            let expected = if network == Some(own) { 3..=3 + CONNECTIONS } else { 0..=0 };
            assert!(expected.contains(&results.connections), "{results:?}");
            if network == Some(1) {
                assert_eq!((results.waits, results.elsewhere_waits), (0, 0), "{results:?}");
            }
        }
    });
}

/// Threads that accept on one socket sleep until its owner releases it. A socket on which one thread accepts has no second owner,
/// so no thread sleeps.
#[test]
fn a_listener_per_thread_removes_waits_of_accept() {
    named(|test| {
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

/// Threads that search one range look into the same buckets. With a range per thread they do not wait for each other; another
/// namespace may share a bucket by chance.
#[test]
fn a_range_per_thread_removes_waits_of_the_search() {
    named(|test| {
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

/// Waits for the bucket of the destination port are assigned to that port.
#[test]
fn waits_for_a_bucket_have_its_port() {
    named(|test| {
        let name = "locks-bucket";
        let of_server = |results: &TraceLocksResults| {
            results.ports.iter().filter(|port| port.port == PORT).map(|port| port.waits).sum()
        };
        contention(test, name, 1, || connections(name, false), of_server);
    });
}

/// Waits on hundreds of different paths all keep their path: no path is lost to a hash collision.
#[test]
fn no_path_is_lost_to_a_collision() {
    named(|test| {
        let name = "locks-paths";
        let work = || {
            for _ in 0..4 {
                connections(name, false);
                dials(name, false);
            }
        };
        let Some(((), outcome)) = traced::traced(test, &Locks::default(), work) else { return };
        let remarks = outcome.validity.iter().map(|remark| &remark.message);
        let mut lines = remarks.chain(&outcome.results.notes);
        assert!(!lines.any(|line| line.contains("without their path")), "{outcome:?}");
        // Losses appear either as remarks or as notes.
        assert_eq!(
            outcome.results.lost > 0,
            !outcome.validity.is_empty() || !outcome.results.notes.is_empty()
        );
    });
}

/// The live views read waits in windows. A window that would cost too much CPU time repeats the one before.
#[test]
fn windows_of_a_survey_have_the_waits_of_a_trace() {
    named(|test| {
        let mut survey = Survey::attach(own_network());
        if let Err(reason) = survey.window().locks {
            return skip(test, "bpf", &reason);
        }
        let (mut seen, mut last) = (0, TracedLocks::default());
        let mut look = |survey: &mut Survey| {
            survey.poll();
            let window = survey.window().locks.unwrap();
            let is_new = window != last;
            if is_new {
                seen += window.classes.values().map(|class| class.waits).sum::<u64>();
                last = window;
            }
            (is_new, seen)
        };
        let survey = RefCell::new((survey, &mut look));
        let work = || {
            connections("locks-window", false);
            let mut pair = survey.borrow_mut();
            let (survey, look) = &mut *pair;
            look(survey);
        };
        let all = |results: &TraceLocksResults| results.waits;
        let Some((_, waits)) = contention(test, "locks-window", 20, work, all) else { return };
        let (mut survey, look) = survey.into_inner();
        // The last window may be a repeated one.
        let seen = loop {
            let (is_new, seen) = look(&mut survey);
            if is_new {
                break seen;
            }
            thread::sleep(Duration::from_millis(10));
        };
        // The survey counts all threads of the namespace, but misses waits that are in progress when an idle lock is forgotten.
        assert!(seen * 2 >= waits, "{seen} in windows, {waits} of the threads of this test");
    });
}

#[test]
fn folded_stacks_start_at_the_outermost_function() {
    named(|test| {
        let name = "locks-folded";
        let Some(outcome) = traced(test, name, || connections(name, false)) else { return };
        let folded: u64 = outcome.folded.iter().map(|(_, ns)| ns).sum();
        assert_eq!(folded, outcome.results.wait_ns);
        for (stack, _) in &outcome.folded {
            assert!(stack.ends_with(']') && !stack.contains("slowpath"), "{stack}");
        }
    });
}
