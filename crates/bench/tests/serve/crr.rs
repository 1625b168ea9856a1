//! Connect, request, response: responses, the side that closes, and counts.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use crate::client::{connect, errors, exchange, serve, sum, to_the_end, until};
use fourtuple_bench::serve::{Close, Protocol, Stall};
use fourtuple_syscalls::Endpoint;
use fourtuple_testing::in_namespace;

const SMALL: Protocol = Protocol::Crr { request: 1, response: 1 };

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
        use std::time::{Duration, Instant};
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
