//! Requests and responses of each protocol, the side that closes, and counts.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use fourtuple_bench::serve::{Close, Protocol, Running, Stall};
use fourtuple_syscalls::Endpoint;
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::{in_namespace, set_sysctl};

use crate::{SMALL, connect, errors, exchange, in_every_way, serve, sum, to_the_end, until};

#[test]
fn requests_are_answered_until_the_client_closes() {
    in_namespace(|| {
        let running = serve(Protocol::Crr { request: 3, response: 5 }).start().unwrap();
        for _ in 0..20 {
            let mut stream = connect(&running);
            for _ in 0..3 {
                assert_eq!(exchange(&mut stream, b"abc", 5), b"xxxxx");
            }
        }
        let mut stream = connect(&running);
        exchange(&mut stream, b"abcde", 5);
        drop(stream);
        until(&running, |sum| sum.errors.get("request-cut") == Some(&1));
        let results = running.stop();
        let all = sum(&results.workers);
        assert_eq!((all.accepted, all.requests), (21, 61));
        assert_eq!((all.received_bytes, all.sent_bytes), (61 * 3 + 2, 61 * 5));
        assert_eq!(errors(&results), [("request-cut".to_owned(), 1)]);
        assert_eq!((results.policy.as_str(), results.workers.len()), ("reuseport", 2));
    });
}

#[test]
fn the_server_closes_after_as_many_responses_as_asked() {
    in_namespace(|| {
        let mut server = serve(SMALL);
        server.close = Close::Server { every: 2 };
        let running = server.start().unwrap();
        let mut stream = connect(&running);
        exchange(&mut stream, b"a", 1);
        exchange(&mut stream, b"a", 1);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "FIN");
        // The server reads the excess bytes, so that no RST discards the second response.
        let mut stream = connect(&running);
        stream.write_all(&[b'a'; 100]).unwrap();
        assert_eq!(to_the_end(&mut stream), "xx");
        assert_eq!(sum(&running.stop().workers).requests, 4);
    });
}

#[test]
fn a_reset_is_a_reset() {
    in_namespace(|| {
        let mut server = serve(SMALL);
        server.close = Close::Reset { every: 1 };
        let running = server.start().unwrap();
        let mut stream = connect(&running);
        exchange(&mut stream, b"a", 1);
        assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert_eq!(errors(&running.stop()), []);
    });
}

/// The response exceeds the socket buffers: the worker must wait for buffer space, and serve other connections meanwhile.
#[test]
fn a_slow_reader_does_not_block_other_connections() {
    in_namespace(|| {
        const LARGE: usize = 16 << 20;
        let mut server = serve(Protocol::Crr { request: 1, response: LARGE });
        server.workers = 1;
        let running = server.start().unwrap();
        let mut slow = connect(&running);
        // The second request waits until the first response is sent.
        slow.write_all(b"aa").unwrap();
        let mut quick = connect(&running);
        exchange(&mut quick, b"a", LARGE);
        let mut responses = vec![0; 2 * LARGE];
        slow.read_exact(&mut responses).unwrap();
        exchange(&mut slow, b"a", LARGE);
        let results = running.stop();
        let all = sum(&results.workers);
        assert_eq!((all.requests, all.sent_bytes), (4, 4 * LARGE as u64));
        assert_eq!(errors(&results), []);
    });
}

#[test]
fn workers_share_the_listener_of_a_unix_socket() {
    in_namespace(|| {
        let path = std::env::temp_dir().join(format!("fourtuple-serve-{}", std::process::id()));
        let mut server = serve(SMALL);
        server.listen = Endpoint::Unix(path.clone());
        let running = server.start().unwrap();
        for _ in 0..10 {
            let mut stream = UnixStream::connect(&path).unwrap();
            exchange(&mut stream, b"a", 1);
        }
        let error = server.start().map(drop).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("another program listens there"), "{error}");
        let results = running.stop();
        assert_eq!((results.policy.as_str(), sum(&results.workers).requests), ("exclusive", 10));
        assert!(!path.exists(), "it goes with the server");
        // A killed server leaves a socket file without a listener: the new server replaces it.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        server.start().unwrap().stop();
        assert!(!path.exists());
        std::fs::write(&path, "precious").unwrap();
        let error = server.start().map(drop).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains("something else than a socket"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(&path).unwrap();
    });
}

#[test]
fn an_address_in_use_is_refused_although_it_could_be_shared() {
    in_namespace(|| {
        let running = serve(SMALL).start().unwrap();
        let mut second = serve(SMALL);
        second.listen = running.address().clone();
        let error = second.start().map(drop).unwrap_err();
        assert!(!error.is_usage() && error.to_string().contains(&running.listen()), "{error}");
        running.stop();
        second.start().unwrap();
    });
}

#[test]
fn the_address_is_free_after_a_server_despite_time_wait() {
    in_namespace(|| {
        let mut server = serve(SMALL);
        server.close = Close::Server { every: 1 };
        let running = server.start().unwrap();
        let mut stream = connect(&running);
        exchange(&mut stream, b"a", 1);
        to_the_end(&mut stream);
        drop(stream);
        server.listen = running.address().clone();
        running.stop();
        server.start().unwrap();
    });
}

#[test]
fn a_stall_keeps_every_worker_from_serving() {
    in_namespace(|| {
        use std::time::Duration;
        let mut server = serve(SMALL);
        server.stall = Some(Stall { at: Duration::ZERO, length: Duration::from_millis(300) });
        let before = Instant::now();
        let running = server.start().unwrap();
        let mut stream = connect(&running);
        exchange(&mut stream, b"a", 1);
        // A lower bound holds on any machine.
        assert!(before.elapsed() >= Duration::from_millis(300));
        exchange(&mut stream, b"a", 1);
        assert_eq!(sum(&running.stop().workers).requests, 2);
    });
}

const KEEP: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
const CLOSE: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
const RESPONSE: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nxx";
const LAST: &str =
    "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\nConnection: close\r\n\r\nxx";

fn http() -> fourtuple_bench::serve::Serve {
    serve(Protocol::Http { body: 2 })
}

#[test]
fn connections_end_as_the_request_demands() {
    in_namespace(|| {
        in_every_way(&http(), |server| {
            let running = server.start().unwrap();
            let mut stream = connect(&running);
            assert_eq!(exchange(&mut stream, KEEP, RESPONSE.len()), RESPONSE.as_bytes());
            stream.write_all(CLOSE).unwrap();
            assert_eq!(to_the_end(&mut stream), LAST);
            let mut old = connect(&running);
            old.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
            assert_eq!(to_the_end(&mut old), LAST);
            let results = running.stop();
            assert_eq!((sum(&results.workers).requests, errors(&results)), (3, Vec::new()));
        })
    });
}

#[test]
fn the_server_announces_the_close() {
    in_namespace(|| {
        let mut server = http();
        server.close = Close::Server { every: 2 };
        in_every_way(&server, |server| {
            let running = server.start().unwrap();
            let mut stream = connect(&running);
            stream.write_all(KEEP).unwrap();
            stream.write_all(KEEP).unwrap();
            assert_eq!(to_the_end(&mut stream), format!("{RESPONSE}{LAST}"));
        });
    });
}

#[test]
fn requests_may_be_pipelined_and_cut() {
    in_namespace(|| {
        in_every_way(&http(), |server| {
            let running = server.start().unwrap();
            let mut stream = connect(&running);
            let mut requests = Vec::new();
            for _ in 0..1000 {
                requests.extend_from_slice(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello");
            }
            requests.extend_from_slice(CLOSE);
            let mut writer = stream.try_clone().unwrap();
            let sender = std::thread::spawn(move || {
                for part in requests.chunks(977) {
                    writer.write_all(part).unwrap();
                }
            });
            assert_eq!(to_the_end(&mut stream), RESPONSE.repeat(1000) + LAST);
            sender.join().unwrap();
            let results = running.stop();
            assert_eq!((sum(&results.workers).requests, errors(&results)), (1001, Vec::new()));
        })
    });
}

#[test]
fn invalid_requests_get_a_response_and_a_close() {
    in_namespace(|| {
        in_every_way(&http(), |server| {
            let running = server.start().unwrap();
            let long = format!("GET / HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "y".repeat(200_000));
            for (request, status) in [
                ("nonsense\r\n\r\n", "400"),
                (long.as_str(), "431"),
                ("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "411"),
            ] {
                let mut stream = connect(&running);
                stream.write_all(request.as_bytes()).unwrap();
                let answer = to_the_end(&mut stream);
                assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
            }
            let results = running.stop();
            assert_eq!(sum(&results.workers).requests, 0);
            let wanted = ["header-too-large", "length-required", "malformed-request"];
            assert_eq!(errors(&results), wanted.map(|name| (name.to_owned(), 1)));
        })
    });
}

#[test]
fn expect_100_continue_is_answered() {
    in_namespace(|| {
        in_every_way(&http(), |server| {
            let running = server.start().unwrap();
            let mut stream = connect(&running);
            let head = b"PUT / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 70000\r\n\r\n";
            let go_on = b"HTTP/1.1 100 Continue\r\n\r\n";
            assert_eq!(exchange(&mut stream, head, go_on.len()), go_on);
            assert_eq!(exchange(&mut stream, &[b'z'; 70_000], RESPONSE.len()), RESPONSE.as_bytes());
            stream.write_all(b"HEAD / HTTP/1.0\r\n\r\n").unwrap();
            let mut head = String::new();
            stream.read_to_string(&mut head).unwrap();
            assert!(head.ends_with("Content-Length: 2\r\nConnection: close\r\n\r\n"), "{head}");
            assert_eq!(sum(&running.stop().workers).requests, 2);
        })
    });
}

#[test]
fn datagrams_are_echoed_except_short_ones() {
    in_namespace(|| {
        let running = serve(Protocol::Udp { request: 2 }).start().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(running.address().inet().unwrap()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        socket.send(b"a").unwrap();
        socket.send(b"abc").unwrap();
        let mut buffer = [0; 8];
        assert_eq!(socket.recv(&mut buffer).unwrap(), 3);
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
            let before = Instant::now();
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
