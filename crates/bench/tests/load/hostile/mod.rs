//! Peers and clients that violate the protocol: servers against both engines of `load`, clients against both modes of `serve`.
//! Each row of a table is a peer, and the counts of `load` or `serve` must equal the log of the peer.

mod peers;

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple::listen::AcceptPolicy;
use fourtuple_bench::load::Trust;
use fourtuple_bench::serve::{Protocol, Running, Serve};
use fourtuple_record::ServeWorker;
use fourtuple_syscalls::option;
use fourtuple_testing::{each_in_namespace, in_namespace};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection};

use crate::run::{self, ENGINES, answer, get, load, run, until};

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

const WHOLE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

const HALF: &str = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok";
const REST: &str = "HTTP/1.1 200 OK\r\n\r\ntext";

/// A connection of the peer, whose handshake is over and whose first request is read.
struct Peer {
    connection: ServerConnection,
    socket: TcpStream,
}

impl Peer {
    fn send(&mut self, text: &str) -> io::Result<()> {
        self.connection.writer().write_all(text.as_bytes())?;
        self.flush()
    }

    fn close_notify(&mut self) -> io::Result<()> {
        self.connection.send_close_notify();
        self.flush()
    }

    /// Sends the response and close_notify in one segment.
    fn send_and_close(&mut self, text: &str) -> io::Result<()> {
        self.connection.writer().write_all(text.as_bytes())?;
        self.close_notify()
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut bytes = Vec::new();
        while self.connection.wants_write() {
            self.connection.write_tls(&mut bytes)?;
        }
        self.socket.write_all(&bytes)
    }

    /// Leaves the connection open until the client closes it.
    fn wait_for_client(&mut self) -> io::Result<()> {
        self.socket.read_to_end(&mut Vec::new()).map(drop)
    }

    fn read_head(&mut self) -> io::Result<()> {
        let mut head = Vec::new();
        let mut room = [0; 2000];
        while !head.ends_with(b"\r\n\r\n") {
            match rustls::Stream::new(&mut self.connection, &mut self.socket).read(&mut room)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => head.extend_from_slice(&room[..count]),
            }
        }
        Ok(())
    }
}

/// The course of a connection after its first request, and the outcome of each operation (`None`: success).
type End = (&'static str, fn(&mut Peer) -> io::Result<()>, Option<&'static str>);

const ENDS: &[End] = &[
    ("body ended by close_notify and FIN", |peer| peer.send_and_close(REST), None),
    (
        "body ended by close_notify, FIN never",
        |peer| {
            peer.send(REST)?;
            peer.close_notify()?;
            peer.wait_for_client()
        },
        None,
    ),
    (
        "bytes after close_notify",
        |peer| {
            peer.send_and_close(REST)?;
            peer.socket.write_all(&[7; 50_000])?;
            peer.wait_for_client()
        },
        None,
    ),
    ("body ended by FIN alone", |peer| peer.send(REST), Some("closed-early")),
    (
        "close_notify in the middle of a body",
        |peer| {
            peer.send_and_close(HALF)?;
            peer.wait_for_client()
        },
        Some("closed-early"),
    ),
    ("FIN in the middle of a body", |peer| peer.send(HALF), Some("closed-early")),
    (
        "close_notify instead of a response",
        |peer| {
            peer.close_notify()?;
            peer.wait_for_client()
        },
        Some("closed-early"),
    ),
    (
        "whole response with close_notify",
        |peer| {
            peer.send_and_close(WHOLE)?;
            peer.wait_for_client()
        },
        None,
    ),
    (
        "close_notify while idle",
        |peer| {
            peer.send(WHOLE)?;
            thread::sleep(Duration::from_millis(5));
            peer.close_notify()?;
            peer.wait_for_client()
        },
        None,
    ),
    (
        "no record in the middle of a body",
        |peer| {
            peer.send(HALF)?;
            peer.socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
            peer.wait_for_client()
        },
        Some("tls"),
    ),
    (
        "reset in the middle of a body",
        |peer| {
            peer.send(HALF)?;
            option::set_reset_on_close(peer.socket.as_fd())
        },
        Some("ECONNRESET"),
    ),
    (
        "half-close in the middle of a body",
        |peer| {
            peer.send(HALF)?;
            peer.socket.shutdown(Shutdown::Write)?;
            peer.wait_for_client()
        },
        Some("closed-early"),
    ),
];

/// Starts a server that plays `end` after the first request of each connection; returns its address and the number
/// of requests read.
fn server(end: fn(&mut Peer) -> io::Result<()>) -> (SocketAddr, Arc<AtomicU64>) {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate =
        rcgen::CertificateParams::new(["localhost".to_owned()]).unwrap().self_signed(&key).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    let (config, requests) = (Arc::new(config), Arc::new(AtomicU64::new(0)));
    let counted = Arc::clone(&requests);
    let address = answer(move |socket| {
        let connection = ServerConnection::new(Arc::clone(&config)).unwrap();
        let mut peer = Peer { connection, socket };
        peer.read_head()?;
        counted.fetch_add(1, Ordering::Relaxed);
        end(&mut peer)
    });
    (address, requests)
}

#[test]
fn tls_connections_end_as_the_peer_ends_them() {
    const OPERATIONS: u64 = 9;
    in_namespace(|| {
        let cases = ENDS.iter().flat_map(|end| ENGINES.into_iter().map(move |engine| (end, engine)));
        each_in_namespace(cases, |(&(name, end, error), engine)| {
            let (address, requests) = server(end);
            let target = format!("https://{address}/");
            let mut load = load(engine, &target, get(&target));
            (load.connections, load.operations, load.trust) = (3, Some(OPERATIONS), Trust::AnyCertificate);
            // The pause makes the connection idle, for the row of the table that needs it, until a peer that waits for a CPU has closed.
            load.pause = Duration::from_millis(if name == "close_notify while idle" { 2500 } else { 50 });
            let Some(ran) = run("hostile::tls", &load) else { return };
            match error {
                None => assert_eq!(
                    (ran.results.operations, ran.errors()),
                    (OPERATIONS, vec![]),
                    "{name}: {ran:#?}"
                ),
                Some(error) => {
                    assert_eq!(
                        (ran.error(error), ran.errors()),
                        (OPERATIONS, vec![error]),
                        "{name}: {ran:#?}"
                    );
                }
            }
            assert_eq!(ran.results.connections, OPERATIONS, "{name}: no connection is used again: {ran:#?}");
            let answered = ran.results.latency_ns.first_byte.samples;
            if error.is_none() {
                assert_eq!(answered, OPERATIONS, "{name}: {ran:#?}");
            } else if name == "close_notify instead of a response" {
                assert_eq!(answered, 0, "session tickets and alerts are no response: {ran:#?}");
            }
            until(|| requests.load(Ordering::Relaxed) >= OPERATIONS);
            assert_eq!(requests.load(Ordering::Relaxed), OPERATIONS, "{name}: {ran:#?}");
        });
    });
}
