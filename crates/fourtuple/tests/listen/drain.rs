//! Drains of a whole server, and of workers that join and leave, under load: no request of an established connection is lost.

use std::collections::VecDeque;
use std::env;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::listen::{
    AcceptPolicy, Acceptor, DrainReport, Endpoint, Family, ListenerGroup, ListenerGroupBuilder, Workers,
};
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_syscalls::signals::IntervalTimer;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{option, privileges, sock_diag};
use fourtuple_testing::process::until_others_sleep;
use fourtuple_testing::{StopOnDrop, each_in_namespace, in_namespace};

use crate::policies::everywhere;
use crate::{Stream, Worker, builder, connect, open, try_ask};

/// A timeout that only a failing test reaches.
const DEADLINE: Duration = Duration::from_secs(60);

/// Returns the number of drains per policy and family; FOURTUPLE_DRAINS overrides it.
fn drains() -> u32 {
    env::var("FOURTUPLE_DRAINS").map_or(5, |count| count.parse().expect("FOURTUPLE_DRAINS is a number"))
}

/// Answers each byte with 1 if the response is the last of its connection, otherwise 0, until the group is drained.
fn work(mut acceptor: Acceptor) {
    while !acceptor.group().is_drained() {
        let Some(mut connection) = acceptor.next(None).unwrap() else { continue };
        let mut request = [0];
        match connection.read(&mut request) {
            Ok(1) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                acceptor.keep(connection).unwrap();
                continue;
            }
            _ => continue,
        }
        // Read before the request is counted, because the drain may begin in between.
        let last = connection.should_close();
        connection.response_sent();
        if connection.write_all(&[u8::from(last)]).is_ok() && !last {
            acceptor.keep(connection).unwrap();
        }
    }
    let report = acceptor.leave().unwrap();
    assert_eq!(report.handed_over + report.waiting, 0);
}

/// Connects to the group; `None` if the server accepts no new connection, or not soon enough.
fn try_connect(group: &ListenerGroup) -> Option<Box<dyn Stream>> {
    match group.endpoint() {
        Endpoint::Unix(path) => {
            let stream = UnixStream::connect(path).ok()?;
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            Some(Box::new(stream))
        }
        Endpoint::Inet(address) => {
            // The kernel retransmits a dropped SYN after a second; the client gives up before.
            let stream = TcpStream::connect_timeout(address, Duration::from_millis(300)).ok()?;
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            stream.set_nodelay(true).unwrap();
            Some(Box::new(stream))
        }
    }
}

/// Opens connections of `requests` requests each until `stop` is set. Returns the first failed request.
fn ask(group: &ListenerGroup, requests: u32, answers: &AtomicU64, stop: &AtomicBool) -> Result<(), String> {
    while !stop.load(Ordering::Acquire) {
        let Some(mut stream) = try_connect(group) else {
            thread::sleep(Duration::from_millis(1));
            continue;
        };
        for number in 1..=requests {
            let failed = |error: std::io::Error| format!("request {number} of {requests}: {error}");
            stream.write_all(b"?").map_err(failed)?;
            let mut answer = [0];
            stream.read_exact(&mut answer).map_err(failed)?;
            answers.fetch_add(1, Ordering::Relaxed);
            if answer == [1] {
                break;
            }
        }
    }
    Ok(())
}

fn drain_under_load(policy: AcceptPolicy, family: Family) -> DrainReport {
    let group = builder(policy, family).max_workers(8).open().unwrap();
    let (answers, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let (group, answers, stop) = (&group, &answers, &stop);
    let never = AtomicBool::new(false);
    thread::scope(|scope| {
        let stopping = StopOnDrop(stop);
        if policy == AcceptPolicy::Dispatcher {
            let mut dispatcher = group.dispatcher().unwrap();
            let never = &never;
            scope.spawn(move || dispatcher.run(never).unwrap());
        }
        let workers: Vec<_> = (0..3)
            .map(|_| {
                let acceptor = group.join().unwrap();
                scope.spawn(move || work(acceptor))
            })
            .collect();
        let clients: Vec<_> =
            [1, 1, 1, 20].map(|requests| scope.spawn(move || ask(group, requests, answers, stop))).into();
        while answers.load(Ordering::Relaxed) < 30 {
            thread::sleep(Duration::from_millis(1));
        }
        let report = group.drain(DEADLINE).unwrap();
        drop(stopping);
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        // Joined after the drain, because a client that waits for a SYN-ACK gives up by itself.
        let failures: Vec<_> =
            clients.into_iter().filter_map(|client| client.join().unwrap().err()).collect();
        assert_eq!(failures, Vec::<String>::new(), "{policy} over {family}: {report:?}");
        assert!(report.is_complete(), "{policy} over {family}: {report:?}");
        let requests: u64 = group.stats().iter().map(|seat| seat.requests).sum();
        assert_eq!(requests, answers.load(Ordering::Relaxed), "{policy} over {family}");
        report
    })
}

#[test]
fn a_drain_under_load_resets_no_connection() {
    in_namespace(|| {
        each_in_namespace(everywhere("a_drain_under_load_resets_no_connection"), |(policy, family)| {
            let (mut accepted, mut longest) = (0, Duration::ZERO);
            for _ in 0..drains() {
                let report = drain_under_load(policy, family);
                accepted += report.accepted;
                longest = longest.max(report.elapsed);
            }
            eprintln!(
                "{policy} over {family}: {} drains, {accepted} connections accepted meanwhile, none reset; longest {longest:?}",
                drains()
            );
        });
    });
}

#[test]
fn a_full_queue_is_served_before_the_end() {
    in_namespace(|| {
        each_in_namespace(everywhere("a_full_queue_is_served_before_the_end"), |(policy, family)| {
            let group = builder(policy, family).max_workers(4).open().unwrap();
            // A listener of the group queues the connections until a worker joins.
            let mut streams: Vec<_> = (0..16).map(|_| connect(&group)).collect();
            for stream in &mut streams {
                stream.write_all(b"?").unwrap();
            }
            let never = AtomicBool::new(false);
            thread::scope(|scope| {
                let (group, never) = (&group, &never);
                let drain = scope.spawn(move || group.drain(DEADLINE).unwrap());
                while !refuses(group) {
                    // The listener queues these connections too, and a full queue looks like a refusal: the drain may begin seconds later.
                    thread::sleep(Duration::from_millis(10));
                }
                if policy == AcceptPolicy::Dispatcher {
                    let mut dispatcher = group.dispatcher().unwrap();
                    scope.spawn(move || dispatcher.run(never).unwrap());
                }
                let acceptor = group.join().unwrap();
                scope.spawn(move || work(acceptor));
                for stream in &mut streams {
                    let mut answer = [0];
                    stream.read_exact(&mut answer).unwrap();
                    assert_eq!(answer, [1], "{policy} over {family}: the last answer");
                    assert_eq!(
                        stream.read_to_end(&mut Vec::new()).unwrap(),
                        0,
                        "{policy} over {family}: closed"
                    );
                }
                let report = drain.join().unwrap();
                assert!(report.is_complete(), "{policy} over {family}: {report:?}");
                // The count may include silent connections that arrived while the drain began.
                assert!(report.accepted >= 16 && report.answered == 16, "{policy} over {family}: {report:?}");
            });
            // No connection counts as open any more.
            let again = group.drain(Duration::ZERO).unwrap();
            assert!(again.is_complete() && group.join().unwrap().next(None).unwrap().is_none());
        });
    });
}

/// Returns whether the kernel queues no new connection.
fn refuses(group: &ListenerGroup) -> bool {
    let refuses_one = || match group.endpoint() {
        Endpoint::Unix(path) => !path.exists(),
        Endpoint::Inet(address) => TcpStream::connect_timeout(address, Duration::from_millis(500)).is_err(),
    };
    // A thread that waits for a CPU may exceed one of the timeouts.
    refuses_one() && refuses_one()
}

/// Waits until connections are in the accept queue: on a busy machine the kernel handles the last ACK of a handshake after connect().
fn until_queued(group: &ListenerGroup, connections: u32) {
    let length = |listener: &OwnedFd| option::accept_queue(listener.as_fd()).unwrap();
    while group.listeners().unwrap().iter().map(length).sum::<u32>() < connections {
        thread::yield_now();
    }
}

/// Begins a handshake that never completes. Returns its client.
fn half_open(address: SocketAddr) -> OwnedFd {
    const DROP: [option::Instruction; 1] = [(6, 0, 0, 0)]; // BPF_RET | BPF_K: drops the SYN-ACK
    let client = socket::open(Transport::Tcp, address, true).unwrap();
    option::attach_filter(client.as_fd(), &DROP).unwrap();
    socket::connect(client.as_fd(), address).unwrap();
    while sock_diag::handshakes(address).unwrap() == 0 {
        thread::yield_now();
    }
    client
}

/// The other server has the same port at another address.
#[test]
fn a_drain_waits_for_no_other_server() {
    in_namespace(|| {
        let open = |address: [u8; 4], port: u16| {
            let at = ListenerGroupBuilder::at((address, port));
            at.policy(AcceptPolicy::Exclusive).open().unwrap()
        };
        let group = open([127, 0, 0, 1], 0);
        let other = open([127, 0, 0, 2], group.endpoint().inet().unwrap().port());
        let _client = half_open(other.endpoint().inet().unwrap());
        let report = group.drain(Duration::from_secs(1)).unwrap();
        assert!(report.is_complete(), "{report:?}");
        let wildcard = open([0, 0, 0, 0], 0);
        let port = wildcard.endpoint().inet().unwrap().port();
        let _client = half_open(([127, 0, 0, 1], port).into());
        assert_eq!(wildcard.drain(Duration::ZERO).unwrap().handshakes, Some(1));
    });
}

#[test]
fn a_drain_reports_remaining_connections() {
    in_namespace(|| {
        let group = builder(AcceptPolicy::Exclusive, Family::Tcp4).open().unwrap();
        let mut acceptor = group.join().unwrap();
        let mut held = connect(&group);
        held.write_all(b"?").unwrap();
        let connection = acceptor.next(Some(DEADLINE)).unwrap().unwrap();
        // Two connections are in the accept queue, and one handshake never completes.
        let _queued = [connect(&group), connect(&group)];
        until_queued(&group, 2);
        let Some(address) = group.endpoint().inet() else { unreachable!("TCP") };
        let _client = half_open(address);
        let report = group.drain(Duration::from_millis(20)).unwrap();
        assert_eq!((report.open, report.queued, report.handshakes), (1, 2, Some(1)), "{report:?}");
        assert!(!report.is_complete() && connection.should_close());
        assert!(acceptor.next(None).unwrap().is_none());
    });
}

/// A drain that cannot see handshakes gives them a second.
#[test]
fn without_sock_diag_handshakes_are_unknown() {
    in_namespace(|| {
        let group = builder(AcceptPolicy::Exclusive, Family::Tcp4).open().unwrap();
        let Some(address) = group.endpoint().inet() else { unreachable!("TCP") };
        let _client = half_open(address);
        seccomp::refuse(Facility::SocketDiag).unwrap();
        let report = group.drain(DEADLINE).unwrap();
        assert_eq!(report.handshakes, None, "{report:?}");
        assert!((Duration::from_secs(1)..DEADLINE).contains(&report.elapsed), "{report:?}");
    });
}

/// Kernels since June 2026 refuse the filter of a drain.
#[test]
fn a_server_without_privileges_drains() {
    in_namespace(|| {
        let open = || builder(AcceptPolicy::Exclusive, Family::Tcp4).open().unwrap();
        let drain = |group: &ListenerGroup| {
            thread::scope(|scope| {
                let acceptor = group.join().unwrap();
                scope.spawn(move || work(acceptor));
                let mut stream = connect(group);
                stream.write_all(b"?").unwrap();
                stream.read_exact(&mut [9]).unwrap();
                drop(stream);
                group.drain(DEADLINE).unwrap()
            })
        };
        let report = drain(&open());
        assert!(report.is_complete() && !report.still_queued, "{report:?}");
        let group = open();
        privileges::keep_only(&[]).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let is_refused = option::drop_syns(listener.as_fd()).is_err();
        let report = drain(&group);
        assert!(report.is_complete(), "{report:?}");
        assert_eq!(report.still_queued, is_refused, "{report:?}");
    });
}

#[test]
fn a_kept_connection_is_open_until_the_deadline() {
    in_namespace(|| {
        for (policy, family) in everywhere("a_kept_connection_is_open_until_the_deadline") {
            let group = builder(policy, family).max_workers(4).open().unwrap();
            let never = AtomicBool::new(false);
            thread::scope(|scope| {
                let (group, never) = (&group, &never);
                if policy == AcceptPolicy::Dispatcher {
                    let mut dispatcher = group.dispatcher().unwrap();
                    scope.spawn(move || dispatcher.run(never).unwrap());
                }
                let acceptor = group.join().unwrap();
                scope.spawn(move || work(acceptor));
                let mut stream = connect(group);
                let mut answer = [9];
                stream.write_all(b"?").unwrap();
                stream.read_exact(&mut answer).unwrap();
                assert_eq!(answer, [0]);
                // A connection on its way from the worker to the dispatcher counts for both.
                until_others_sleep();
                let report = group.drain(Duration::from_millis(100)).unwrap();
                assert_eq!((report.open, report.queued), (1, 0), "{policy} over {family}: {report:?}");
                assert_eq!(
                    stream.read_to_end(&mut Vec::new()).unwrap(),
                    0,
                    "{policy} over {family}: closed, not reset"
                );
            });
        }
    });
}

#[test]
fn the_last_worker_reports_waiting_connections() {
    in_namespace(|| {
        for policy in [AcceptPolicy::Exclusive, AcceptPolicy::SharedOneshot] {
            let group = builder(policy, Family::Unix).open().unwrap();
            let mut first = group.join().unwrap();
            let second = group.join().unwrap();
            let mut streams = [connect(&group), connect(&group)];
            for stream in &mut streams {
                stream.write_all(b"?").unwrap();
                let mut connection = first.next(Some(DEADLINE)).unwrap().unwrap();
                connection.read_exact(&mut [0]).unwrap();
                first.keep(connection).unwrap();
            }
            let report = first.leave().unwrap();
            // With SharedOneshot the workers share all connections.
            let expected = if policy == AcceptPolicy::SharedOneshot { 0 } else { 2 };
            assert_eq!((report.handed_over, report.waiting), (expected, 0), "{policy}");
            let report = second.leave().unwrap();
            assert_eq!((report.handed_over, report.waiting, report.kept.len()), (0, 2, 0), "{policy}");
        }
    });
}

#[test]
fn leaving_leaves_the_accept_queue_to_other_workers() {
    const QUEUED: usize = 300;
    in_namespace(|| {
        let policies = [AcceptPolicy::Exclusive, AcceptPolicy::Plain, AcceptPolicy::ROTATE];
        for policy in policies {
            let group = builder(policy, Family::Tcp4).open().unwrap();
            let leaving = group.join().unwrap();
            let mut staying = group.join().unwrap();
            let mut streams: Vec<_> = (0..QUEUED).map(|_| connect(&group)).collect();
            streams.iter_mut().for_each(|stream| stream.write_all(b"?").unwrap());
            let report = leaving.leave().unwrap();
            assert_eq!((report.handed_over, report.kept.len()), (0, 0), "{policy}");
            for _ in 0..QUEUED {
                let mut connection = staying.next(Some(DEADLINE)).unwrap().unwrap();
                connection.read_exact(&mut [0]).unwrap();
                connection.write_all(b"!").unwrap();
            }
            streams.iter_mut().for_each(|stream| stream.read_exact(&mut [0]).unwrap());
        }
    });
}

/// The handoff queue has no space for all connections, and no worker takes any.
fn wait_for_space() {
    const IDLE: usize = 400;
    let group = builder(AcceptPolicy::Exclusive, Family::Tcp4).open().unwrap();
    let mut acceptor = group.join().unwrap();
    let mut streams = Vec::new();
    for _ in 0..IDLE {
        let mut stream = connect(&group);
        stream.write_all(b"?").unwrap();
        let mut connection = acceptor.next(Some(DEADLINE)).unwrap().unwrap();
        connection.read_exact(&mut [0]).unwrap();
        acceptor.keep(connection).unwrap();
        streams.push(stream);
    }
    let begun = Instant::now();
    let report = acceptor.leave().unwrap();
    // A second for each connection would be more than a minute.
    assert!((Duration::from_secs(1)..DEADLINE).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    assert!(report.kept.len() > 60 && report.waiting + report.kept.len() == IDLE, "{report:?}");
}

#[test]
fn leaving_waits_for_room_once() {
    in_namespace(wait_for_space);
}

#[test]
fn signals_do_not_shorten_the_wait_for_room() {
    in_namespace(|| {
        let _timer = IntervalTimer::for_this_thread(Duration::from_millis(1)).unwrap();
        let before = IntervalTimer::signals();
        // A thread that waits for a CPU gets several signals as one.
        let is_interrupted = (0..10).any(|_| {
            wait_for_space();
            IntervalTimer::signals() > before + 100
        });
        assert!(is_interrupted, "{} signals", IntervalTimer::signals() - before);
    });
}

/// Returns how often a worker joins while another one leaves; FOURTUPLE_RELOADS overrides it.
fn reloads() -> u32 {
    env::var("FOURTUPLE_RELOADS").map_or(100, |count| count.parse().expect("FOURTUPLE_RELOADS is a number"))
}

/// The outcome of the clients: answers, and failed requests.
struct ClientOutcome {
    answers: u64,
    failures: Vec<String>,
}

/// Runs four clients: two open a connection per request, and two keep a connection for several requests.
fn under_load(group: &ListenerGroup, reload: impl FnOnce()) -> ClientOutcome {
    let stop = AtomicBool::new(false);
    let answers = AtomicU64::new(0);
    thread::scope(|scope| {
        let stopping = StopOnDrop(&stop);
        let client = |requests: u32| {
            let (stop, answers) = (&stop, &answers);
            scope.spawn(move || {
                while !stop.load(Ordering::Acquire) {
                    let mut stream = connect(group);
                    for number in 1..=requests {
                        match try_ask(&mut *stream, 0) {
                            Ok(_) => answers.fetch_add(1, Ordering::Relaxed),
                            Err(error) => return Some(format!("request {number} of {requests}: {error}")),
                        };
                        if requests > 1 {
                            thread::sleep(Duration::from_micros(200));
                        }
                    }
                    // The client closes first and gets the TIME_WAIT socket; the pause prevents that ports run out.
                    thread::sleep(Duration::from_micros(500));
                }
                None
            })
        };
        let clients = [client(1), client(1), client(50), client(50)];
        reload();
        drop(stopping);
        let failures = clients.into_iter().filter_map(|client| client.join().unwrap()).collect();
        ClientOutcome { answers: answers.load(Ordering::Relaxed), failures }
    })
}

fn reload_again_and_again(policy: AcceptPolicy, family: Family) {
    let group = open(policy, family);
    let mut workers: VecDeque<Worker> = Worker::start_many(&group, 3).into();
    let seen = under_load(&group, || {
        for _ in 0..reloads() {
            workers.push_back(Worker::start(&group));
            workers.pop_front().expect("three or four").stop();
        }
    });
    workers.into_iter().for_each(Worker::stop);
    assert_eq!(seen.failures, Vec::<String>::new(), "{policy} over {family}, after {} answers", seen.answers);
    let requests: u64 = group.stats().iter().map(|seat| seat.requests).sum();
    assert_eq!(requests, seen.answers, "{policy} over {family}");
    eprintln!("{policy} over {family}: {} reloads, {} answers, no failure", reloads(), seen.answers);
}

#[test]
fn reloads_lose_no_request() {
    in_namespace(|| {
        // A worker with `blocking` leaves when its connection ends, and no other worker serves that connection.
        let reloadable = |(policy, family): &(AcceptPolicy, Family)| {
            *policy != AcceptPolicy::Blocking && *family != Family::Tcp6
        };
        for (policy, family) in everywhere("reloads_lose_no_request").filter(reloadable) {
            reload_again_and_again(policy, family);
        }
    });
}

#[test]
fn processes_use_tcp_migrate_req() {
    in_namespace(|| {
        // The sysctl belongs to this namespace. It is absent before Linux 5.14; the listener is then handed over.
        let _ = std::fs::write("/proc/sys/net/ipv4/tcp_migrate_req", "1");
        let listen = builder(AcceptPolicy::Reuseport, Family::Tcp4);
        let group = listen.workers(Workers::Processes).open().unwrap();
        let leaving = group.join().unwrap();
        let mut waiting: Vec<_> = (0..5).map(|_| connect(&group)).collect();
        // The kernel may reset a connection whose handshake is in progress.
        until_queued(&group, 5);
        let mut staying = group.join().unwrap();
        leaving.leave().unwrap();
        for stream in &mut waiting {
            stream.write_all(b"x").unwrap();
        }
        let mut served = Vec::new();
        while served.len() < waiting.len() {
            served.extend(staying.next(None).unwrap());
        }
        assert_eq!(group.stats()[1].accepts, 5);
    });
}
