//! `serve` against hostile clients, in both of its modes.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use fourtuple::listen::AcceptPolicy;
use fourtuple_record::ServeWorker;
use fourtuple_serve::{Protocol, Running, Serve};
use fourtuple_syscalls::option;
use fourtuple_testing::{each_in_namespace, in_namespace};

use crate::run::{self, until};

const GET: &str = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
const BODY: usize = 100;

/// A client that acts on its connection and returns the number of response bytes that it read.
type Client = fn(&mut TcpStream) -> u64;

/// Name, client, number of requests that the server processes, and the error that the server counts.
const CLIENTS: &[(&str, Client, u64, Option<&str>)] = &[
    ("says nothing", |_| 0, 0, None),
    ("sends half a head", |stream| say(stream, "GET / HT"), 0, Some("request-cut")),
    (
        "sends half a body",
        |stream| say(stream, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab"),
        0,
        Some("request-cut"),
    ),
    (
        "resets in the head",
        |stream| {
            say(stream, "GET / HT");
            reset(stream)
        },
        0,
        Some("ECONNRESET"),
    ),
    (
        "drips a request",
        |stream| {
            for byte in GET.bytes() {
                stream.write_all(&[byte]).unwrap();
                thread::sleep(Duration::from_millis(2));
            }
            response(stream)
        },
        1,
        None,
    ),
    (
        "half-closes after a request",
        |stream| {
            say(stream, GET);
            stream.shutdown(Shutdown::Write).unwrap();
            to_the_end(stream)
        },
        1,
        None,
    ),
    (
        "resets after the response",
        |stream| {
            say(stream, GET);
            let read = response(stream);
            reset(stream);
            read
        },
        1,
        Some("ECONNRESET"),
    ),
    (
        "pipelines, and half-closes in the last request",
        |stream| {
            say(stream, &GET.repeat(50));
            say(stream, "GET / HT");
            stream.shutdown(Shutdown::Write).unwrap();
            to_the_end(stream)
        },
        50,
        Some("request-cut"),
    ),
    ("sends no HTTP", |stream| refused(stream, "\0\r\n\r\n", "400"), 0, Some("malformed-request")),
    (
        "sends an endless head",
        |stream| refused(stream, &format!("GET / HTTP/1.1\r\nX: {}", "x".repeat(17_000)), "431"),
        0,
        Some("header-too-large"),
    ),
    (
        "sends chunks",
        |stream| refused(stream, "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", "411"),
        0,
        Some("length-required"),
    ),
];

fn say(stream: &mut TcpStream, text: &str) -> u64 {
    stream.write_all(text.as_bytes()).unwrap();
    0
}

/// Sends a RST when the connection is closed.
fn reset(stream: &mut TcpStream) -> u64 {
    option::set_reset_on_close(stream.as_fd()).unwrap();
    0
}

/// Reads one response.
fn response(stream: &mut TcpStream) -> u64 {
    let mut bytes = Vec::new();
    let mut room = [0; 1000];
    let is_whole = |bytes: &[u8]| {
        let head = bytes.windows(4).position(|four| four == b"\r\n\r\n");
        head.is_some_and(|head| bytes.len() >= head + 4 + BODY)
    };
    while !is_whole(&bytes) {
        let count = stream.read(&mut room).unwrap();
        assert!(count > 0, "{bytes:?}");
        bytes.extend_from_slice(&room[..count]);
    }
    bytes.len() as u64
}

fn to_the_end(stream: &mut TcpStream) -> u64 {
    stream.read_to_end(&mut Vec::new()).unwrap() as u64
}

fn refused(stream: &mut TcpStream, text: &str, status: &str) -> u64 {
    say(stream, text);
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    assert!(bytes.starts_with(format!("HTTP/1.1 {status} ").as_bytes()), "{bytes:?}");
    bytes.len() as u64
}

/// Returns servers without an accept policy and with two policies.
fn modes() -> Vec<Serve> {
    let with = |policy| {
        let mut serve = run::serve(Protocol::Http { body: BODY });
        serve.policy = policy;
        serve
    };
    [None, Some(AcceptPolicy::Exclusive), Some(AcceptPolicy::Reuseport)].into_iter().map(with).collect()
}

fn total(running: &Running) -> ServeWorker {
    let mut sum = ServeWorker::default();
    for worker in running.counts() {
        sum.accepted += worker.accepted;
        sum.requests += worker.requests;
        sum.sent_bytes += worker.sent_bytes;
        for (name, count) in worker.errors {
            *sum.errors.entry(name).or_default() += count;
        }
    }
    sum
}

#[test]
fn serve_counts_what_the_clients_logged() {
    const TIMES: u64 = 5;
    in_namespace(|| {
        for server in modes() {
            for &(name, client, requests, error) in CLIENTS {
                eprintln!("{name} with {:?}", server.policy);
                let running = server.start().unwrap();
                let address = running.address().inet().unwrap();
                let mut read = 0;
                for _ in 0..TIMES {
                    let mut stream = TcpStream::connect(address).unwrap();
                    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                    read += client(&mut stream);
                    // The server still serves an honest client.
                    drop(stream);
                    let mut honest = TcpStream::connect(address).unwrap();
                    honest.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                    say(&mut honest, GET);
                    read += response(&mut honest);
                }
                let what = format!("{name} with {:?}", server.policy);
                let expected = error.map_or(0, |_| TIMES);
                // A worker counts sent bytes after send(), and it may accept a client after that client has closed.
                until(|| {
                    let sum = total(&running);
                    let failed = sum.errors.values().sum::<u64>();
                    failed >= expected && sum.sent_bytes >= read && sum.accepted >= 2 * TIMES
                });
                let sum = total(&running);
                let counted: Vec<_> =
                    sum.errors.iter().map(|(name, count)| (name.as_str(), *count)).collect();
                assert_eq!(
                    counted,
                    error.map(|error| (error, TIMES)).into_iter().collect::<Vec<_>>(),
                    "{what}"
                );
                assert_eq!((sum.accepted, sum.requests), (2 * TIMES, (requests + 1) * TIMES), "{what}");
                assert_eq!(sum.sent_bytes, read, "{what}");
                running.stop();
            }
        }
    });
}

/// The client sends 50 requests and reads no response, until the server closes the connection: without a policy at the idle limit,
/// with a policy at the write limit of the library.
#[test]
fn serve_counts_what_a_client_that_never_reads_got() {
    const LARGE: usize = 1_000_000;
    in_namespace(|| {
        each_in_namespace(modes(), |mut server| {
            let error = if server.policy.is_some() { "unread-response" } else { "idle-closed" };
            server.protocol = Protocol::Http { body: LARGE };
            server.idle = Duration::from_secs(2);
            let running = server.start().unwrap();
            let mut stream = TcpStream::connect(running.address().inet().unwrap()).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            say(&mut stream, &GET.repeat(50));
            until(|| total(&running).errors.contains_key(error));
            let sum = total(&running);
            // The server has read all requests: its close() sends the bytes that the kernel has taken, and then FIN.
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).unwrap();
            let whole = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4 + LARGE;
            let what = format!("{:?}: {sum:?}", server.policy);
            assert_eq!((sum.accepted, sum.errors), (1, BTreeMap::from([(error.to_owned(), 1)])), "{what}");
            assert_eq!(sum.sent_bytes, bytes.len() as u64, "{what}");
            // The last response was begun, and its send() found no room.
            assert_eq!(sum.requests, (bytes.len() / whole) as u64 + 1, "{what}");
            running.stop();
        });
    });
}
