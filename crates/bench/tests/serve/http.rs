//! Tests of HTTP over sockets: persistent connections, refused requests, pipelining.

use std::io::{Read, Write};

use crate::client::{connect, errors, exchange, in_every_way, serve, sum, to_the_end};
use fourtuple_bench::serve::{Close, Protocol};
use fourtuple_testing::in_namespace;

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
