//! Service times, CPU affinity, idle limits, descriptors and failed calls of workers.

use std::io::{Read, Write};
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use fourtuple::listen::AcceptPolicy;
use fourtuple_bench::serve::{Protocol, Running, Service, Shape};
use fourtuple_syscalls::Errno;
use fourtuple_syscalls::seccomp::{self, FailingCall};
use fourtuple_testing::{in_namespace, open_descriptors, print};

use crate::{SMALL, connect, errors, exchange, serve, sum, until};

/// A worker that sleeps serves no other connection: two requests of one worker take twice as long as one.
#[test]
fn sleeping_blocks_the_worker_and_so_does_spinning() {
    in_namespace(|| {
        const TIME: Duration = Duration::from_millis(40);
        for spin in [false, true] {
            let mut server = serve(SMALL);
            (server.workers, server.spin) = (1, spin);
            server.service = Service::of(Shape::Fixed(TIME));
            let running = server.start().unwrap();
            let mut streams: Vec<_> = (0..4).map(|_| connect(&running)).collect();
            let begun = Instant::now();
            for stream in &mut streams {
                stream.write_all(b"a").unwrap();
            }
            for stream in &mut streams {
                stream.read_exact(&mut [0]).unwrap();
            }
            // A lower bound holds on any machine.
            assert!(begun.elapsed() >= TIME * 4, "spin {spin}: {:?}", begun.elapsed());
        }
    });
}

#[test]
fn a_server_ends_in_the_middle_of_a_long_request() {
    in_namespace(|| {
        for spin in [false, true] {
            let mut server = serve(SMALL);
            server.spin = spin;
            server.service = Service::of(Shape::Fixed(Duration::from_secs(3600)));
            let running = server.start().unwrap();
            connect(&running).write_all(b"a").unwrap();
            until(&running, |sum| sum.requests == 1);
            // The call must return.
            assert_eq!(sum(&running.stop().workers).requests, 1);
        }
    });
}

#[test]
fn idle_connections_are_closed_and_counted() {
    in_namespace(|| {
        let policies = [None, Some(AcceptPolicy::Exclusive), Some(AcceptPolicy::Dispatcher)];
        for policy in policies {
            let mut server = serve(SMALL);
            (server.idle, server.policy) = (Duration::from_millis(1500), policy);
            // The limit may pass while the client waits for a CPU before its request.
            let mut attempts = (0..20).map(|_| {
                let running = server.start().unwrap();
                let mut silent = connect(&running);
                let is_answered = silent.write_all(b"a").is_ok() && silent.read_exact(&mut [0]).is_ok();
                (running, silent, is_answered)
            });
            let found = attempts.find(|(_, _, is_answered)| *is_answered);
            let (running, mut silent, _) = found.expect("an answer before the limit");
            // The server closes: the client sees a FIN after the response.
            assert_eq!(silent.read(&mut [0]).unwrap(), 0, "{policy:?}");
            let results = running.stop();
            assert_eq!(errors(&results), [("idle-closed".to_owned(), 1)], "{policy:?}");
            assert_eq!(sum(&results.workers).requests, 1, "{policy:?}");
        }
        // A client that pipelines requests and does not read leaves bytes in the server's receive queue.
        let mut server = serve(Protocol::Crr { request: 1, response: 1_000_000 });
        server.idle = Duration::from_millis(500);
        let running = server.start().unwrap();
        let mut pipelining = connect(&running);
        pipelining.set_nonblocking(true).unwrap();
        let ended = |running: &Running| sum(&running.counts()).errors.contains_key("idle-closed");
        let begun = Instant::now();
        while !ended(&running) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", running.counts());
            let _ = pipelining.write(&[b'a'; 65536]);
            std::thread::sleep(Duration::from_millis(10));
        }
        running.stop();
        let mut server = serve(SMALL);
        server.idle = Duration::ZERO;
        assert!(server.start().is_err_and(|error| error.is_usage()));
    });
}

/// With a policy the worker itself waits for a client that does not read, up to the write limit.
#[test]
fn a_client_that_never_reads_is_closed_under_a_policy() {
    in_namespace(|| {
        for policy in [AcceptPolicy::Exclusive, AcceptPolicy::SharedOneshot, AcceptPolicy::Dispatcher] {
            let mut server = serve(Protocol::Crr { request: 1, response: 1_000_000 });
            (server.policy, server.workers) = (Some(policy), 1);
            let running = server.start().unwrap();
            let mut pipelining = connect(&running);
            pipelining.write_all(&[b'a'; 64]).unwrap();
            let is_served = || {
                let mut client = connect(&running);
                client.write_all(b"a").is_ok() && client.read_exact(&mut vec![0; 1_000_000]).is_ok()
            };
            // The only worker serves the next client after the limit. A client that waits for a CPU while it reads is closed as well.
            let unread = (1..=20_u64).find(|_| is_served()).expect("a client that reads is served");
            let results = running.stop();
            assert_eq!(errors(&results), [("unread-response".to_owned(), unread)], "{policy:?}");
        }
    });
}

#[test]
fn pinned_workers_serve() {
    in_namespace(|| {
        let mut server = serve(SMALL);
        (server.pin, server.workers) = (true, 3);
        let running = server.start().unwrap();
        for _ in 0..20 {
            exchange(&mut connect(&running), b"a", 1);
        }
        assert_eq!(sum(&running.stop().workers).requests, 20);
    });
}

#[test]
fn a_stopped_server_leaves_no_descriptors() {
    in_namespace(|| {
        // Other tests of this program open descriptors at the same time: a leak of a thousand stands out.
        let before = open_descriptors();
        for _ in 0..5 {
            let running = serve(SMALL).start().unwrap();
            let open: Vec<_> = (0..200)
                .map(|_| {
                    let mut stream = connect(&running);
                    exchange(&mut stream, b"a", 1);
                    stream
                })
                .collect();
            drop(open);
            running.stop();
        }
        let after = open_descriptors();
        assert!(after < before + 500, "{before} before, {after} after");
    });
}

/// The policies have a test of their own: `every_errno_of_accept_leaves_the_worker_alive`.
#[test]
fn every_errno_is_counted_and_the_server_goes_on() {
    const ACCEPT: [Errno; 18] = [
        Errno::EAGAIN,
        Errno::EINTR,
        Errno::ECONNABORTED,
        Errno::EPROTO,
        Errno::ENOPROTOOPT,
        Errno::EOPNOTSUPP,
        Errno::ENETDOWN,
        Errno::ENETUNREACH,
        Errno::EHOSTDOWN,
        Errno::EHOSTUNREACH,
        Errno::ENONET,
        Errno::ETIMEDOUT,
        Errno::EMFILE,
        Errno::ENFILE,
        Errno::ENOBUFS,
        Errno::ENOMEM,
        Errno::EPERM,
        Errno::EACCES,
    ];
    const RECEIVE: [Errno; 11] = [
        Errno::EAGAIN,
        Errno::EINTR,
        Errno::EPERM,
        Errno::EBADF,
        Errno::ECONNREFUSED,
        Errno::EFAULT,
        Errno::EINVAL,
        Errno::ENETDOWN,
        Errno::ENOBUFS,
        Errno::ENOMEM,
        Errno::ENOTSOCK,
    ];
    let case = |call, errno: Errno| {
        seccomp::fail(call, errno).unwrap();
        let is_udp = call == FailingCall::ReceiveMessages;
        let mut serve = serve(if is_udp { Protocol::Udp { request: 1 } } else { SMALL });
        serve.workers = 1;
        let running = serve.start().unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut tcp = None;
        if is_udp {
            udp.send_to(b"x", running.address().inet().unwrap()).unwrap();
        } else {
            tcp.insert(connect(&running)).write_all(b"x").unwrap();
        }
        let name = if is_udp { errno.to_string() } else { format!("accept: {errno}") };
        if !matches!(errno, Errno::EAGAIN | Errno::EINTR) {
            // The second failure shows that the first one has ended nothing.
            until(&running, |sum| sum.errors.get(&name).is_some_and(|count| *count >= 2));
        }
        assert!(!running.has_failed(), "{errno}");
        let names: Vec<_> = errors(&running.stop()).into_iter().map(|(name, _)| name).collect();
        assert!(names.iter().all(|other| *other == name), "{names:?}");
    };
    in_namespace(move || {
        for (call, errnos) in [(FailingCall::Accept, &ACCEPT[..]), (FailingCall::ReceiveMessages, &RECEIVE)] {
            let mut rows = ["Waits:", " Counted:"].map(str::to_owned);
            for errno in errnos {
                // The filter applies to the threads of the server too, and cannot be removed.
                std::thread::scope(|scope| scope.spawn(|| case(call, *errno)).join().unwrap());
                let is_counted = !matches!(*errno, Errno::EAGAIN | Errno::EINTR);
                rows[usize::from(is_counted)] += &format!(" {errno}");
            }
            print(&format!("MATRIX {call:?} serve: {}", rows.concat()));
        }
    });
}
