//! The cost of one client for other clients: silence, slow reading, and missing kernel resources; connections that the server closes
//! where the measurement favours it.

use std::hint;
use std::io::{ErrorKind, Read, Write};
use std::iter;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::listen::{
    AcceptPolicy, BreakEven, Endpoint, Family, ListenError, ListenerGroup, ListenerGroupBuilder, Recycle,
    Workers,
};
use fourtuple_syscalls::signals::IntervalTimer;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{option, seccomp};
use fourtuple_testing::process::until;
use fourtuple_testing::{StopOnDrop, each_in_namespace, in_namespace, set_sysctl};

use crate::policies::{everywhere, is_available};
use crate::{Opened, Stream, Worker, ask, builder, connect, endpoint, serve, try_ask};

const DEADLINE: Option<Duration> = Some(Duration::from_secs(60));

/// Runs workers in threads until `test` returns.
fn beside(group: &ListenerGroup, workers: usize, test: impl FnOnce()) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop = &stop;
        if group.policy() == AcceptPolicy::Dispatcher {
            let mut dispatcher = group.dispatcher().unwrap();
            scope.spawn(move || dispatcher.run(stop).unwrap());
        }
        for _ in 0..workers {
            let mut acceptor = group.join().unwrap();
            scope.spawn(move || {
                while !stop.load(Ordering::Acquire) {
                    if let Some(connection) = acceptor.next(Some(Duration::from_millis(10))).unwrap() {
                        serve(&mut acceptor, connection);
                    }
                }
            });
        }
        let _stopping = StopOnDrop(stop);
        test();
    });
}

/// Sends a request on a new connection, before the idle limit closes it: a client that waits for a CPU may be too late.
fn ask_in_time(group: &ListenerGroup) -> Box<dyn Stream> {
    let ask_one = || {
        let mut stream = connect(group);
        try_ask(&mut *stream, 0).is_ok().then_some(stream)
    };
    (0..100).find_map(|_| ask_one()).expect("one of a hundred requests is in time")
}

#[test]
fn silent_connections_are_closed() {
    in_namespace(|| {
        for (policy, family) in everywhere("silent_connections_are_closed") {
            let listen = builder(policy, family).max_workers(2);
            let group = listen.idle_timeout(Duration::from_millis(100)).open().unwrap();
            beside(&group, 1, || {
                // One client that never sends a byte, and one that sends one request.
                let mut silent = connect(&group);
                assert_eq!(silent.read_to_end(&mut Vec::new()).unwrap(), 0, "{policy} over {family}: closed");
                let mut kept = ask_in_time(&group);
                assert_eq!(kept.read_to_end(&mut Vec::new()).unwrap(), 0, "{policy} over {family}: closed");
                ask_in_time(&group);
            });
            if policy != AcceptPolicy::Dispatcher {
                assert!(group.stats()[0].idle_closed >= 2, "{policy} over {family}: {:?}", group.stats()[0]);
            }
        }
    });
}

/// Each wait of the worker finds a new connection at once.
#[test]
fn silent_connections_are_closed_under_load() {
    in_namespace(|| {
        // A blocking worker serves one connection; the dispatcher has a thread of its own.
        let policies = everywhere("silent_connections_are_closed_under_load").filter(|(policy, family)| {
            *family == Family::Unix && ![AcceptPolicy::Blocking, AcceptPolicy::Dispatcher].contains(policy)
        });
        for (policy, family) in policies {
            let listen = builder(policy, family).max_workers(1);
            let group = listen.idle_timeout(Duration::from_millis(100)).open().unwrap();
            let mut acceptor = group.join().unwrap();
            let _silent = connect(&group);
            let begun = Instant::now();
            while acceptor.stats().idle_closed == 0 {
                connect(&group).write_all(b"x").unwrap();
                acceptor.next(DEADLINE).unwrap().unwrap();
                assert!(begun.elapsed() < Duration::from_secs(30), "{policy}: no idle limit");
            }
        }
    });
}

#[test]
fn active_connections_are_kept() {
    in_namespace(|| {
        for (policy, family) in everywhere("active_connections_are_kept") {
            let listen = builder(policy, family).max_workers(2);
            let group = listen.idle_timeout(Duration::from_secs(60)).open().unwrap();
            beside(&group, 1, || {
                let mut stream = connect(&group);
                for number in 1..=5 {
                    thread::sleep(Duration::from_millis(20));
                    assert_eq!(ask(&mut *stream, 0).1, number, "{policy} over {family}");
                }
            });
        }
    });
}

/// The caller holds a readable connection, as a worker does that serves it in another thread.
#[test]
fn a_held_connection_extends_no_wait() {
    in_namespace(|| {
        for (policy, family) in everywhere("a_held_connection_extends_no_wait") {
            let group = Opened::from(builder(policy, family).open().unwrap());
            let mut acceptor = group.join().unwrap();
            let mut stream = connect(&group);
            stream.write_all(b"x").unwrap();
            let mut connection = acceptor.next(DEADLINE).unwrap().unwrap();
            connection.read_exact(&mut [0]).unwrap();
            // An epoll watches a kept connection.
            acceptor.keep(connection).unwrap();
            stream.write_all(b"yz").unwrap();
            let mut held = acceptor.next(DEADLINE).unwrap().unwrap();
            held.read_exact(&mut [0]).unwrap();
            let before = acceptor.stats().wakeups;
            let found = acceptor.next(Some(Duration::from_millis(50))).unwrap();
            assert!(found.is_none(), "{policy} over {family}");
            assert!(acceptor.stats().wakeups - before < 10, "{policy} over {family}");
            // The unread byte is found again.
            acceptor.keep(held).unwrap();
            let mut found = acceptor.next(DEADLINE).unwrap().unwrap();
            assert_eq!(found.read(&mut [0; 2]).unwrap(), 1, "{policy} over {family}");
        }
    });
}

/// A client that reads slowly: each single wait for space is short.
#[test]
fn a_slow_reader_has_a_write_limit() {
    in_namespace(|| {
        const LIMIT: Duration = Duration::from_millis(200);
        let listen = builder(AcceptPolicy::Exclusive, Family::Tcp4);
        let group = listen.write_timeout(LIMIT).open().unwrap();
        let mut acceptor = group.join().unwrap();
        let mut stream = TcpStream::connect(group.endpoint().inet().unwrap()).unwrap();
        stream.write_all(b"x").unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let over = &over;
            let _over = StopOnDrop(over);
            scope.spawn(move || {
                let mut buffer = vec![0; 64 * 1024];
                while !over.load(Ordering::Acquire) {
                    thread::sleep(Duration::from_millis(5));
                    if !matches!(stream.read(&mut buffer), Ok(1..)) {
                        return;
                    }
                }
            });
            let mut connection = acceptor.next(DEADLINE).unwrap().unwrap();
            connection.read_exact(&mut [0]).unwrap();
            // The response is larger than all buffers, and than the client reads within the limit.
            let error = connection.write_all(&vec![0; 256 << 20]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut);
        });
    });
}

/// Prints how long an honest client waits beside two clients that do not read; FOURTUPLE_WRITE_LIMIT_MS sets the limit.
#[test]
fn slow_readers_delay_an_honest_client_up_to_the_limit() {
    in_namespace(|| {
        let limit = std::env::var("FOURTUPLE_WRITE_LIMIT_MS").map_or(100, |limit| limit.parse().unwrap());
        let listen = builder(AcceptPolicy::SharedOneshot, Family::Tcp4);
        let group = listen.write_timeout(Duration::from_millis(limit)).open().unwrap();
        let (group, stop) = (&group, &AtomicBool::new(false));
        thread::scope(|scope| {
            let _stop = StopOnDrop(stop);
            for _ in 0..2 {
                let mut acceptor = group.join().unwrap();
                scope.spawn(move || {
                    while !stop.load(Ordering::Acquire) {
                        let Some(mut connection) = acceptor.next(Some(Duration::from_millis(10))).unwrap()
                        else {
                            continue;
                        };
                        let mut request = [0];
                        if !matches!(connection.read(&mut request), Ok(1..)) {
                            continue;
                        }
                        let response = if request == *b"m" { 64 << 20 } else { 1 };
                        let _ = connection.write_all(&vec![0; response]);
                    }
                });
            }
            let mut readers: Vec<_> = (0..2).map(|_| connect(group)).collect();
            readers.iter_mut().for_each(|stream| stream.write_all(b"m").unwrap());
            // Waits until both workers have accepted a connection.
            while group.stats().iter().map(|seat| seat.accepts).sum::<u64>() < 2 {
                thread::yield_now();
            }
            let begun = Instant::now();
            let mut honest = connect(group);
            honest.write_all(b"s").unwrap();
            honest.read_exact(&mut [0]).unwrap();
            eprintln!("write limit {limit} ms: the honest client waited {:?}", begun.elapsed());
        });
    });
}

#[test]
fn only_the_unwatched_connection_is_dropped() {
    in_namespace(|| {
        for policy in [AcceptPolicy::Exclusive, AcceptPolicy::SharedOneshot, AcceptPolicy::Plain] {
            let group = builder(policy, Family::Tcp4).max_workers(1).open().unwrap();
            let group = &group;
            thread::scope(|scope| {
                let mut acceptor = group.join().unwrap();
                let worker = scope.spawn(move || {
                    // The seccomp filter applies to this thread only and cannot be removed.
                    seccomp::exhaust_watches().unwrap();
                    while group.stats()[0].unwatched < 4 {
                        let Some(connection) = acceptor.next(Some(Duration::from_millis(10))).unwrap() else {
                            continue;
                        };
                        serve(&mut acceptor, connection);
                    }
                });
                for _ in 0..2 {
                    // One connection is silent when it is accepted; the other one is answered and then kept.
                    assert_eq!(connect(group).read_to_end(&mut Vec::new()).unwrap(), 0, "{policy}");
                    let before = group.stats()[0].unwatched;
                    let mut stream = connect(group);
                    // A request that the worker reads after the accept is answered; a later one finds the connection closed.
                    let _ = try_ask(&mut *stream, 0);
                    while group.stats()[0].unwatched == before {
                        thread::yield_now();
                    }
                }
                worker.join().unwrap();
            });
            assert_eq!(group.stats()[0].unwatched, 4, "{policy}");
        }
    });
}

#[test]
fn a_dispatcher_without_watches_continues() {
    in_namespace(|| {
        let group = builder(AcceptPolicy::Dispatcher, Family::Tcp4).open().unwrap();
        let mut dispatcher = group.dispatcher().unwrap();
        let (waker, stop) = (dispatcher.waker(), &AtomicBool::new(false));
        thread::scope(|scope| {
            let runs = scope.spawn(move || {
                seccomp::exhaust_watches().unwrap();
                dispatcher.run(stop).unwrap();
                dispatcher.stats()
            });
            for _ in 0..3 {
                assert_eq!(connect(&group).read_to_end(&mut Vec::new()).unwrap(), 0);
            }
            stop.store(true, Ordering::Release);
            waker.wake();
            assert_eq!(runs.join().unwrap().unwatched, 3);
        });
    });
}

#[test]
fn a_listener_without_watches_is_added_again() {
    in_namespace(|| {
        let group = builder(AcceptPolicy::ROTATE, Family::Tcp4).open().unwrap();
        let mut acceptor = group.join().unwrap();
        let ready = || {
            let mut stream = connect(&group);
            stream.write_all(b"?").unwrap();
            stream
        };
        let _first = ready();
        // The seccomp filter applies to this thread only and cannot be removed.
        let on_thread = thread::spawn(move || {
            seccomp::exhaust_watches().unwrap();
            // After this accept the worker cannot add the listener again.
            let first = acceptor.next(DEADLINE).unwrap();
            (acceptor, first.is_some())
        });
        let (mut acceptor, has_first) = on_thread.join().unwrap();
        assert!(has_first);
        let _second = ready();
        // A thread with watches retries after the pause.
        assert!(acceptor.next(DEADLINE).unwrap().is_some());
    });
}

#[test]
fn the_address_is_reserved_before_workers_join() {
    in_namespace(|| {
        for port in [0, 4321] {
            let at = Endpoint::Inet(([127, 0, 0, 1], port).into());
            let group = ListenerGroupBuilder::at(at).policy(AcceptPolicy::Reuseport).open().unwrap();
            let address = group.endpoint().inet().unwrap();
            let held = |while_what: &str| {
                let other =
                    ListenerGroupBuilder::at(group.endpoint().clone()).policy(AcceptPolicy::Reuseport).open();
                let error = other.err().map(|error| error.to_string()).unwrap_or_default();
                assert!(error.contains("EADDRINUSE"), "{while_what}: another group got it: {error}");
                assert!(TcpListener::bind(address).is_err(), "{while_what}: bind() with SO_REUSEADDR got it");
                let plain = socket::open(Transport::Tcp, address, true).unwrap();
                assert!(socket::bind(plain.as_fd(), address).is_err(), "{while_what}: a plain bind() got it");
            };
            held("before the first join");
            // The first worker serves a connection that arrives before it joins.
            let mut early = connect(&group);
            early.write_all(&0_u32.to_ne_bytes()).unwrap();
            let mut acceptors = [group.join().unwrap(), group.join().unwrap()];
            held("while workers listen");
            let connection = acceptors[0].next(DEADLINE).unwrap().unwrap();
            serve(&mut acceptors[0], connection);
            early.read_exact(&mut [0; 8]).unwrap();
            // Every connection reaches a worker, and none the holder of the address.
            let mut streams: Vec<_> = (0..40).map(|_| connect(&group)).collect();
            streams.iter_mut().for_each(|stream| stream.write_all(&0_u32.to_ne_bytes()).unwrap());
            while group.stats().iter().map(|seat| seat.requests).sum::<u64>() < 41 {
                for acceptor in &mut acceptors {
                    if let Some(connection) = acceptor.next(Some(Duration::ZERO)).unwrap() {
                        serve(acceptor, connection);
                    }
                }
            }
            for stream in &mut streams {
                stream.read_exact(&mut [0; 8]).unwrap();
            }
            for acceptor in acceptors {
                acceptor.leave().unwrap();
            }
            held("after the last worker left");
        }
    });
}

#[test]
fn processes_have_separate_listeners() {
    in_namespace(|| {
        let listen = builder(AcceptPolicy::Reuseport, Family::Tcp4).workers(Workers::Processes);
        let group = listen.open().unwrap();
        let _acceptors = [group.join().unwrap(), group.join().unwrap(), group.join().unwrap()];
        let mut listeners = 0;
        fourtuple_syscalls::sock_diag::each_listener(|_| listeners += 1).unwrap();
        assert_eq!(listeners, 3);
    });
}

#[test]
fn signals_interrupt_no_wait() {
    in_namespace(|| {
        each_in_namespace(everywhere("signals_interrupt_no_wait"), |(policy, family)| {
            // A slow host needs longer than the default limit for the response.
            let listen = builder(policy, family).max_workers(2);
            let group = listen.write_timeout(Duration::from_secs(60)).open().unwrap();
            let (group, stop, waited) = (&group, &AtomicBool::new(false), &AtomicBool::new(false));
            thread::scope(|scope| {
                let _stopping = StopOnDrop(stop);
                if policy == AcceptPolicy::Dispatcher {
                    let mut dispatcher = group.dispatcher().unwrap();
                    scope.spawn(move || {
                        let _timer = IntervalTimer::for_this_thread(Duration::from_millis(1)).unwrap();
                        dispatcher.run(stop).unwrap();
                    });
                }
                scope.spawn(move || {
                    let mut acceptor = group.join().unwrap();
                    let _timer = IntervalTimer::for_this_thread(Duration::from_millis(1)).unwrap();
                    let begun = Instant::now();
                    assert!(acceptor.next(Some(Duration::from_millis(100))).unwrap().is_none(), "{policy}");
                    assert!(
                        begun.elapsed() >= Duration::from_millis(100),
                        "{policy} over {family}: it gave up"
                    );
                    waited.store(true, Ordering::Release);
                    let mut answered = 0;
                    while answered < 2 {
                        let Some(mut connection) = acceptor.next(None).unwrap() else {
                            panic!("{policy} over {family}: no wakeup ended the wait");
                        };
                        let mut request = [0];
                        match connection.read(&mut request) {
                            Ok(1) => {}
                            Ok(_) => continue,
                            Err(_) => {
                                acceptor.keep(connection).unwrap();
                                continue;
                            }
                        }
                        // The response is larger than all buffers, so the worker waits for a client that begins to read after 100 ms.
                        connection.write_all(&vec![7; 16 << 20]).unwrap();
                        connection.response_sent();
                        answered += 1;
                        acceptor.keep(connection).unwrap();
                    }
                    acceptor.leave().unwrap();
                });
                while !waited.load(Ordering::Acquire) {
                    thread::sleep(Duration::from_millis(1));
                }
                let mut stream = connect(group);
                for _ in 0..2 {
                    thread::sleep(Duration::from_millis(20));
                    stream.write_all(b"x").unwrap();
                    thread::sleep(Duration::from_millis(100));
                    let mut response = vec![0; 16 << 20];
                    stream.read_exact(&mut response).unwrap();
                }
            });
        });
        assert!(IntervalTimer::signals() > 100);
    });
}

#[test]
fn silent_clients_hide_neither_the_timeout_nor_a_wakeup() {
    /// Only a failing test opens as many.
    const MOST: usize = 2000;
    in_namespace(|| {
        for (policy, family) in everywhere("silent_clients_hide_neither_the_timeout_nor_a_wakeup") {
            for timeout in [Some(Duration::from_millis(50)), None] {
                let group = crate::open(policy, family);
                let mut acceptor = group.join().unwrap();
                let waker = acceptor.waker();
                let worker = thread::spawn(move || acceptor.next(timeout).unwrap().is_none());
                let mut clients = Vec::new();
                while !worker.is_finished() && clients.len() < MOST {
                    clients.push(connect(&group));
                    if timeout.is_none() && clients.len() == 3 {
                        waker.wake();
                    }
                    thread::sleep(Duration::from_millis(5));
                }
                assert!(clients.len() < MOST, "{policy} over {family}, {timeout:?}: it waits on");
                assert!(worker.join().unwrap(), "{policy} over {family}, {timeout:?}: a silent connection");
            }
        }
    });
}

/// A least busy worker waits in pieces of 500 ms. On a full host its thread runs some time after the end of a piece, and finds the wakeup
/// that came meanwhile.
#[test]
fn a_wakeup_at_the_end_of_a_wait_is_not_lost() {
    const WORKERS: usize = 64;
    in_namespace(|| {
        let policy = AcceptPolicy::ReuseportLeastBusy;
        if !is_available(policy, "a_wakeup_at_the_end_of_a_wait_is_not_lost") {
            return;
        }
        let group = builder(policy, Family::Tcp4).max_workers(WORKERS).open().unwrap();
        let (begins, begun) = mpsc::channel();
        let ended = Arc::new(AtomicUsize::new(0));
        for _ in 0..WORKERS {
            let (mut acceptor, begins, ended) = (group.join().unwrap(), begins.clone(), Arc::clone(&ended));
            thread::spawn(move || {
                begins.send((Instant::now(), acceptor.waker())).unwrap();
                assert!(acceptor.next(None).unwrap().is_none());
                ended.fetch_add(1, Ordering::AcqRel);
            });
        }
        for (begin, waker) in begun.iter().take(WORKERS) {
            while begin.elapsed() < Duration::from_millis(500) {
                hint::spin_loop();
            }
            waker.wake();
        }
        until("each worker has seen its wakeup", || ended.load(Ordering::Acquire) == WORKERS);
    });
}

#[test]
fn settings_out_of_range_are_refused() {
    in_namespace(|| {
        let at = || builder(AcceptPolicy::Dispatcher, Family::Tcp4);
        let age = |jitter| Recycle::Age { limit: Duration::from_secs(1), jitter };
        for (listen, setting) in [
            (at().max_workers(0), "max_workers is 0"),
            (at().idle_timeout(Duration::ZERO), "idle_timeout is 0s"),
            (at().recycle(age(f64::NAN)), "jitter is NaN"),
            (at().recycle(age(1.5)), "jitter is 1.5"),
        ] {
            let error = listen.open().unwrap_err();
            assert!(error.is_usage() && error.to_string().starts_with(setting), "{error}");
        }
        for seats in [1 << 59, usize::MAX] {
            let error = at().max_workers(seats).open().unwrap_err().to_string();
            assert!(error.contains("ENOMEM"), "{error}");
        }
        let error = at().open().unwrap().dispatcher().unwrap().depth(0).unwrap_err();
        assert!(matches!(error, ListenError::Setting { setting: "depth", .. }), "{error}");
    });
}

#[test]
fn a_group_without_a_free_port_is_exhausted() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20001");
        let open = |port| ListenerGroupBuilder::at((Ipv4Addr::LOCALHOST, port)).open();
        let held = [open(20_000).unwrap(), open(20_001).unwrap()];
        for (port, is_exhausted) in [(0, true), (20_000, false)] {
            let error = open(port).unwrap_err();
            assert!(error.is_retryable() && error.is_exhausted() == is_exhausted, "{error}");
        }
        drop(held);
        // A process that another test starts holds copies of both listeners until its exec().
        let begun = Instant::now();
        let group = loop {
            match ListenerGroupBuilder::at((Ipv4Addr::LOCALHOST, 0)).max_workers(1).open() {
                Ok(group) => break group,
                Err(error) => assert!(begun.elapsed() < Duration::from_secs(60), "{error}"),
            }
            thread::yield_now();
        };
        let acceptor = group.join().unwrap();
        let error = group.join().unwrap_err();
        assert!(error.is_retryable() && error.is_exhausted(), "{error}");
        drop(acceptor);
        group.join().unwrap();
    });
}

#[test]
fn limits_are_60_s_idle_and_2_s_of_writes_by_default() {
    in_namespace(|| {
        let opened = |builder: ListenerGroupBuilder| format!("{:?}", builder.open().unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let adopted = ListenerGroupBuilder::from_listeners([listener]).unwrap();
        for builder in [ListenerGroupBuilder::at(endpoint(Family::Tcp4)), adopted] {
            let group = opened(builder);
            assert!(group.contains("idle: 60s, write_timeout: 2s"), "{group}");
        }
        let builder = ListenerGroupBuilder::at(endpoint(Family::Tcp4)).idle_timeout(Duration::from_secs(7));
        let group = opened(builder.write_timeout(Duration::from_secs(3)));
        assert!(group.contains("idle: 7s, write_timeout: 3s"), "{group}");
    });
}

#[test]
fn backlog_reports_the_somaxconn_limit() {
    in_namespace(|| {
        set_sysctl("net.core.somaxconn", "10");
        let group = ListenerGroupBuilder::at(endpoint(Family::Tcp4)).backlog(4096).open().unwrap();
        assert_eq!(group.backlog(), Some(10));
        let group = ListenerGroupBuilder::at(endpoint(Family::Tcp4)).backlog(7).open().unwrap();
        assert_eq!(group.backlog(), Some(7));
    });
}

#[test]
fn client_resets_do_not_end_a_worker() {
    in_namespace(|| {
        for (policy, family) in everywhere("client_resets_do_not_end_a_worker") {
            let group = builder(policy, family).max_workers(2).open().unwrap();
            let Some(address) = group.endpoint().inet() else { continue };
            beside(&group, 2, || {
                for number in 0..100 {
                    let mut stream = TcpStream::connect(address).unwrap();
                    if number % 2 == 0 {
                        let _ = stream.write_all(&0_u32.to_ne_bytes());
                    }
                    option::set_reset_on_close(stream.as_fd()).unwrap();
                }
                ask(&mut *connect(&group), 0);
            });
        }
    });
}

fn open(policy: AcceptPolicy) -> ListenerGroup {
    let listen = builder(policy, Family::Unix).max_workers(16);
    listen.recycle(Recycle::Measured).open().unwrap()
}

/// Runs clients that reconnect when they are closed, until `enough`, and returns the measurement that was enough. One request in
/// `long_every` takes 20 ms.
fn load(
    group: &ListenerGroup,
    clients: u32,
    long_every: u32,
    pause: Duration,
    enough: fn(&BreakEven) -> bool,
) -> BreakEven {
    let workers = Worker::start_many(group, 4);
    let over = AtomicBool::new(false);
    let found = thread::scope(|scope| {
        let _over = StopOnDrop(&over);
        for client in 0..clients {
            let over = &over;
            scope.spawn(move || {
                let mut stream = connect(group);
                let mut number = client;
                while !over.load(Ordering::Relaxed) {
                    number += 1;
                    let work = if number.is_multiple_of(long_every) { 20_000 } else { 0 };
                    if try_ask(&mut *stream, work).is_err() {
                        stream = connect(group);
                    }
                    thread::sleep(pause);
                }
            });
        }
        let begun = Instant::now();
        // If the condition never holds, the caller's assertion fails.
        loop {
            let found = group.break_even().unwrap();
            if enough(&found) || begun.elapsed() >= Duration::from_secs(60) {
                break found;
            }
            thread::sleep(Duration::from_millis(1));
        }
    });
    workers.into_iter().for_each(Worker::stop);
    found
}

#[test]
fn measured_closes_connections_that_wait() {
    in_namespace(|| {
        let uring = is_available(AcceptPolicy::UringOneshot, "measured_closes_connections_that_wait");
        for policy in [AcceptPolicy::Exclusive].into_iter().chain(uring.then_some(AcceptPolicy::UringOneshot))
        {
            let found = load(&open(policy), 16, 8, Duration::ZERO, |found| found.closes);
            assert!(found.closes, "{policy}: {found}");
            assert!(found.misplaced_wait > found.fresh_connection, "{policy}: {found}");
        }
    });
}

/// Runs one client and workers that sleep before each request. While other tests load the host a request may really wait; an
/// error of the measurement would appear in every group until the deadline.
fn keeps(policy: AcceptPolicy) {
    let enough = |found: &BreakEven| found.samples >= 400 || found.closes;
    let once = || load(&open(policy), 1, u32::MAX, Duration::from_millis(1), enough);
    let begun = Instant::now();
    let mut groups = iter::from_fn(|| (begun.elapsed() < Duration::from_secs(120)).then(once));
    let kept = groups.find(|found| !found.closes);
    assert!(kept.is_some_and(|found| found.samples >= 400), "{policy}: {kept:?}");
}

#[test]
fn kept_connections_that_do_not_wait_are_kept() {
    in_namespace(|| {
        let enough = |found: &BreakEven| found.samples >= 400 || found.closes;
        keeps(AcceptPolicy::Exclusive);
        if is_available(AcceptPolicy::UringOneshot, "kept_connections_that_do_not_wait_are_kept") {
            keeps(AcceptPolicy::UringOneshot);
        }
        // Any idle worker serves the next request, so closing gains nothing, however long requests take.
        let found = load(&open(AcceptPolicy::SharedOneshot), 16, 8, Duration::ZERO, enough);
        assert!(!found.closes && found.samples >= 400 && found.misplaced_wait.is_zero(), "{found}");
        let kept = ListenerGroupBuilder::at(endpoint(Family::Tcp4)).open().unwrap();
        assert_eq!(kept.break_even(), None);
    });
}
