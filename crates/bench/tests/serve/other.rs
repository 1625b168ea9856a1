//! Tests of UDP, sink, service times, CPU affinity, idle limits and namespaces.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::client::{connect, errors, exchange, serve, sum, until};
use fourtuple::listen::AcceptPolicy;
use fourtuple_bench::serve::{Protocol, Running, Service, Shape};
use fourtuple_syscalls::Errno;
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::seccomp::{self, FailingCall};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::{in_namespace, open_descriptors, print, set_sysctl};

const SMALL: Protocol = Protocol::Crr { request: 1, response: 1 };

#[test]
fn datagrams_are_echoed_except_short_ones() {
    in_namespace(|| {
        let running = serve(Protocol::Udp { request: 2 }).start().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(running.address().inet().unwrap()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        socket.send(b"a").unwrap();
        socket.send(b"abc").unwrap();
        let mut room = [0; 8];
        assert_eq!(socket.recv(&mut room).unwrap(), 3);
        let results = running.stop();
        assert_eq!(errors(&results), [("short-datagram".to_owned(), 1)]);
        assert_eq!(sum(&results.workers).requests, 1);
    });
}

/// SO_REUSEPORT would let bind(2) choose the port of another server.
#[test]
fn servers_at_port_0_share_no_port() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "40000 40003");
        let servers: Vec<Running> =
            (0..4).map(|_| serve(Protocol::Udp { request: 1 }).start().unwrap()).collect();
        let ports: BTreeSet<u16> =
            servers.iter().map(|server| server.address().inet().unwrap().port()).collect();
        assert_eq!(ports.len(), 4, "{ports:?}");
    });
}

/// Without a decreasing TTL, one datagram with a forged source would loop between two servers endlessly.
#[test]
fn two_servers_do_not_answer_each_other_for_ever() {
    in_namespace(|| {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let server = || {
                let mut serve = serve(Protocol::Udp { request: 1 });
                (serve.listen, serve.workers) = (address.parse::<SocketAddr>().unwrap().into(), 1);
                serve.start().unwrap()
            };
            let (first, second) = (server(), server());
            let (one, other) = (first.address().inet().unwrap(), second.address().inet().unwrap());
            // The datagram has the second server's port as its source: SO_REUSEPORT lets the test bind this port for a
            // moment.
            let forged = socket::open(Transport::Udp, other, true).unwrap();
            assert_eq!(option::set_reuse_port(forged.as_fd()).unwrap(), Answer::Done);
            socket::bind(forged.as_fd(), other).unwrap();
            socket::send_to(forged.as_fd(), b"forged", one).unwrap();
            drop(forged);
            // The reply may have gone to the test's socket; then the second server got no datagram.
            until(&first, |sum| sum.requests >= 1);
            let before = std::time::Instant::now();
            let quiet = || (sum(&first.counts()).requests, sum(&second.counts()).requests);
            let mut last = quiet();
            loop {
                std::thread::sleep(Duration::from_millis(50));
                let now = quiet();
                if now == last {
                    break;
                }
                last = now;
                assert!(before.elapsed() < Duration::from_secs(60), "it goes on: {now:?}");
            }
            assert!(last.0 + last.1 <= 255, "{last:?}");
        }
    });
}

#[test]
fn datagrams_from_services_and_itself_get_no_reply() {
    in_namespace(|| {
        // A server at the unspecified address has each address of the host; a datagram from the address to itself would reach
        // the more specific socket of the test.
        for (address, other, reflected) in [("127.0.0.1:0", "127.0.0.1", 1), ("0.0.0.0:0", "127.0.0.2", 2)] {
            let mut serve = serve(Protocol::Udp { request: 1 });
            (serve.listen, serve.workers) = (address.parse::<SocketAddr>().unwrap().into(), 1);
            let running = serve.start().unwrap();
            let port = running.address().inet().unwrap().port();
            let (to, own) =
                (SocketAddr::from(([127, 0, 0, 1], port)), SocketAddr::new(other.parse().unwrap(), port));
            let forged = socket::open(Transport::Udp, own, true).unwrap();
            assert_eq!(option::set_reuse_port(forged.as_fd()).unwrap(), Answer::Done);
            socket::bind(forged.as_fd(), own).unwrap();
            socket::send_to(forged.as_fd(), b"to itself", to).unwrap();
            drop(forged);
            let echo = UdpSocket::bind("127.0.0.1:7").unwrap();
            echo.send_to(b"from a service", to).unwrap();
            until(&running, |sum| {
                sum.errors.get("reflected-datagram").is_some_and(|&count| count >= reflected)
            });
            assert_eq!(sum(&running.stop().workers).requests, 0, "{address}");
        }
    });
}

#[test]
fn a_sink_holds_silent_connections() {
    in_namespace(|| {
        let running = serve(Protocol::Sink).start().unwrap();
        let streams: Vec<_> = (0..50).map(|_| connect(&running)).collect();
        // The clients have sent nothing, and their connections are accepted nevertheless.
        until(&running, |sum| sum.accepted == 50);
        for mut stream in streams {
            stream.write_all(b"words").unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        }
        let results = running.stop();
        assert_eq!((sum(&results.workers).received_bytes, results.max_over_mean.is_some()), (250, true));
    });
}

#[test]
fn an_endless_sender_does_not_block_other_connections() {
    in_namespace(|| {
        const MUCH: usize = 64 << 20;
        let mut server = serve(Protocol::Http { body: 0 });
        server.workers = 1;
        let running = server.start().unwrap();
        let mut flood = connect(&running);
        write!(flood, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {MUCH}\r\n\r\n").unwrap();
        let mut writer = flood.try_clone().unwrap();
        let sender = std::thread::spawn(move || writer.write_all(&vec![0; MUCH]).unwrap());
        let mut other = connect(&running);
        for _ in 0..100 {
            other.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
            assert!(other.read(&mut [0; 1024]).unwrap() > 0);
        }
        sender.join().unwrap();
        assert!(flood.read(&mut [0; 1024]).unwrap() > 0, "all of it was read, in however many turns");
        let results = running.stop();
        assert_eq!((sum(&results.workers).requests, errors(&results)), (101, Vec::new()));
    });
}

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
            // Long enough for a client that waits for a CPU before its request.
            (server.idle, server.policy) = (Duration::from_millis(1500), policy);
            let running = server.start().unwrap();
            let mut silent = connect(&running);
            exchange(&mut silent, b"a", 1);
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
            // The only worker serves the next client after the limit.
            exchange(&mut connect(&running), b"a", 1_000_000);
            let results = running.stop();
            assert_eq!(errors(&results), [("unread-response".to_owned(), 1)], "{policy:?}");
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
