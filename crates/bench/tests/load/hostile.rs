//! Peers and clients that violate the protocol: servers against both engines of `load`, clients against both modes of `serve`.
//! Each row of a table is a peer, and the counts of `load` or `serve` must equal the log of the peer.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use Act::{Drip, Flood, HalfClose, Read, Reset, Send, Wait};
use Outcome::{Done, DoneAgain, Fail, Status};
use fourtuple::listen::AcceptPolicy;
use fourtuple_bench::load::{Arrival, EngineChoice, Load, Trust, Workload};
use fourtuple_bench::serve::{Protocol, Serve};
use fourtuple_syscalls::option;
use fourtuple_testing::{each_in_namespace, in_namespace};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection};

use crate::{ENGINES, RunOutcome, answer, get, load, run, sum, until, until_expected, with_each_engine};

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
    let mut buffer = [0; 1000];
    let is_whole = |bytes: &[u8]| {
        let head = bytes.windows(4).position(|four| four == b"\r\n\r\n");
        head.is_some_and(|head| bytes.len() >= head + 4 + BODY)
    };
    while !is_whole(&bytes) {
        let count = stream.read(&mut buffer).unwrap();
        assert!(count > 0, "{bytes:?}");
        bytes.extend_from_slice(&buffer[..count]);
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
        let mut serve = crate::serve(Protocol::Http { body: BODY });
        serve.policy = policy;
        serve
    };
    [None, Some(AcceptPolicy::Exclusive), Some(AcceptPolicy::Reuseport)].into_iter().map(with).collect()
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
                    let sum = sum(running.counts());
                    let failed = sum.errors.values().sum::<u64>();
                    failed >= expected && sum.sent_bytes >= read && sum.accepted >= 2 * TIMES
                });
                let sum = sum(running.counts());
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
            let what = format!("{:?}", server.policy);
            let error = if server.policy.is_some() { "unread-response" } else { "idle-closed" };
            server.protocol = Protocol::Http { body: LARGE };
            server.idle = Duration::from_secs(2);
            let once = || {
                let (running, begun) = (server.start().unwrap(), Instant::now());
                let mut stream = TcpStream::connect(running.address().inet().unwrap()).unwrap();
                let is_sent = stream.write_all(GET.repeat(50).as_bytes()).is_ok();
                Some((running, stream, is_sent && begun.elapsed() < server.idle / 2))
            };
            // The idle limit may pass while the client waits for a CPU before its requests.
            let (running, mut stream, is_in_time) =
                until_expected(once, |(_, _, is_in_time)| *is_in_time).unwrap();
            assert!(is_in_time, "{what}: the requests were too late");
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            until(|| sum(running.counts()).errors.contains_key(error));
            let sum = sum(running.counts());
            // The server has read all requests: its close() sends the bytes that the kernel has taken, and then FIN.
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).unwrap();
            let whole = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4 + LARGE;
            let what = format!("{what}: {sum:?}");
            assert_eq!((sum.accepted, sum.errors), (1, BTreeMap::from([(error.to_owned(), 1)])), "{what}");
            assert_eq!(sum.sent_bytes, bytes.len() as u64, "{what}");
            // The last response was begun, and its send() found the buffer full.
            assert_eq!(sum.requests, (bytes.len() / whole) as u64 + 1, "{what}");
            running.stop();
        });
    });
}

const REST_WITH_TEXT: &str = "HTTP/1.1 200 OK\r\n\r\ntext";

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
        let mut buffer = [0; 2000];
        while !head.ends_with(b"\r\n\r\n") {
            match rustls::Stream::new(&mut self.connection, &mut self.socket).read(&mut buffer)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => head.extend_from_slice(&buffer[..count]),
            }
        }
        Ok(())
    }
}

/// The course of a connection after its first request, and the outcome of each operation (`None`: success).
type End = (&'static str, fn(&mut Peer) -> io::Result<()>, Option<&'static str>);

const ENDS: &[End] = &[
    ("body ended by close_notify and FIN", |peer| peer.send_and_close(REST_WITH_TEXT), None),
    (
        "body ended by close_notify, FIN never",
        |peer| {
            peer.send(REST_WITH_TEXT)?;
            peer.close_notify()?;
            peer.wait_for_client()
        },
        None,
    ),
    (
        "bytes after close_notify",
        |peer| {
            peer.send_and_close(REST_WITH_TEXT)?;
            peer.socket.write_all(&[7; 50_000])?;
            peer.wait_for_client()
        },
        None,
    ),
    ("body ended by FIN alone", |peer| peer.send(REST_WITH_TEXT), Some("closed-early")),
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
                assert_eq!(answered, 0, "session tickets and alerts are not a response: {ran:#?}");
            }
            until(|| requests.load(Ordering::Relaxed) >= OPERATIONS);
            assert_eq!(requests.load(Ordering::Relaxed), OPERATIONS, "{name}: {ran:#?}");
        });
    });
}

const MILLISECOND: Duration = Duration::from_millis(1);

const WHOLE: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const HALF: &str = "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok";
const REST: &str = "HTTP/1.1 200 OK\r\n\r\n";
const CHUNKS: &str = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";

/// The expected outcome of all operations of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// All succeed, and no request is sent twice.
    Done,
    /// All succeed; a request that the peer did not read may be sent again.
    DoneAgain,
    /// All fail with this error.
    Fail(&'static str),
    /// All get a response whose status is counted under this name; a request may be sent again.
    Status(&'static str),
}

const PEERS: &[(&str, &[Act], Outcome)] = &[
    // Peers that send without end.
    ("drip of a whole response", &[Read, Drip(WHOLE)], Fail("timeout")),
    ("drip of a head", &[Read, Drip("HTTP/1.1 200 OK\r\nX-A: ")], Fail("timeout")),
    (
        "endless body of a length",
        &[Read, Send("HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n"), Flood("x")],
        Fail("timeout"),
    ),
    ("endless body without a length", &[Read, Send(REST), Flood("x")], Fail("timeout")),
    ("endless chunks", &[Read, Send(CHUNKS), Flood("1\r\nx\r\n")], Fail("timeout")),
    ("endless interim responses", &[Read, Flood("HTTP/1.1 100 Continue\r\n\r\n")], Fail("timeout")),
    ("endless head", &[Read, Send("HTTP/1.1 200 OK\r\nX-A: "), Flood("x")], Fail("malformed")),
    ("endless headers", &[Read, Send("HTTP/1.1 200 OK\r\n"), Flood("X: y\r\n")], Fail("malformed")),
    ("endless size of a chunk", &[Read, Send(CHUNKS), Flood("0")], Fail("malformed")),
    ("nothing at all", &[Read, Wait(10_000)], Fail("timeout")),
    // Cases with a FIN at each point.
    ("close before the request", &[], Fail("closed-early or ECONNRESET or EPIPE")),
    ("close after the request", &[Read], Fail("closed-early")),
    ("close in the status line", &[Read, Send("HTTP/1.1 2")], Fail("closed-early")),
    ("close in the head", &[Read, Send("HTTP/1.1 200 OK\r\nContent-Le")], Fail("closed-early")),
    ("close in the body", &[Read, Send(HALF)], Fail("closed-early")),
    ("close in a chunk", &[Read, Send(CHUNKS), Send("5\r\nab")], Fail("closed-early")),
    ("close before the last chunk", &[Read, Send(CHUNKS), Send("2\r\nab\r\n")], Fail("closed-early")),
    ("close after an interim response", &[Read, Send("HTTP/1.1 103 Early\r\n\r\n")], Fail("closed-early")),
    ("close as the end of the body", &[Read, Send(REST), Send("text")], Done),
    // The peer closes one direction only; the opposite direction stays open.
    ("half-close without a response", &[Read, HalfClose], Fail("closed-early")),
    ("half-close in the body", &[Read, Send(HALF), HalfClose], Fail("closed-early")),
    ("half-close as the end of the body", &[Read, Send(REST), Send("text"), HalfClose], Done),
    ("half-close after a whole response", &[Read, Send(WHOLE), HalfClose], DoneAgain),
    // Cases with a RST at each point.
    ("reset before the request", &[Reset], Fail("closed-early or ECONNRESET or EPIPE")),
    ("reset after the request", &[Read, Reset], Fail("ECONNRESET")),
    ("reset in the head", &[Read, Send("HTTP/1.1 200 OK\r\nContent-Le"), Reset], Fail("ECONNRESET")),
    ("reset in the body", &[Read, Send(HALF), Reset], Fail("ECONNRESET")),
    ("reset as the end of the body", &[Read, Send(REST), Reset], Fail("ECONNRESET")),
    // A kept connection that ends without a response.
    ("close after a whole response", &[Read, Send(WHOLE)], DoneAgain),
    ("reset after a whole response", &[Read, Send(WHOLE), Reset], DoneAgain),
    ("close after two", &[Read, Send(WHOLE), Read, Send(WHOLE)], DoneAgain),
    // Cases of status lines.
    ("another protocol", &[Read, Send("SSH-2.0-OpenSSH_9.2\r\n")], Fail("malformed")),
    ("no status", &[Read, Send("HTTP/1.1 OK\r\n\r\n")], Fail("malformed")),
    ("status 000", &[Read, Send("HTTP/1.1 000 Nothing\r\nContent-Length: 0\r\n\r\n")], Fail("malformed")),
    ("status 999", &[Read, Send("HTTP/1.1 999 Much\r\nContent-Length: 0\r\n\r\n")], Status("status-999")),
    ("another version", &[Read, Send("HTTP/2 200 OK\r\n\r\n")], Fail("malformed")),
    ("more than the response", &[Read, Send("HTTP/1.1 204 No\r\n\r\nmore")], Fail("malformed")),
];

const OPERATIONS: u64 = 12;

fn against(engine: EngineChoice, name: &str, address: std::net::SocketAddr) -> Load {
    let target = format!("http://{address}/");
    let mut load = load(engine, &target, get(&target));
    (load.connections, load.operations) = (3, Some(OPERATIONS));
    let ends_by_timeout = PEERS.iter().any(|(peer, _, outcome)| *peer == name && *outcome == Fail("timeout"));
    if ends_by_timeout {
        load.timeout = 600 * MILLISECOND;
    }
    load
}

/// Checks that each operation has the expected outcome.
fn require(name: &str, outcome: Outcome, ran: &RunOutcome) {
    let (done, failed) = (ran.results.operations, ran.results.errors.values().sum::<u64>());
    match outcome {
        Done | DoneAgain => assert_eq!((done, failed), (OPERATIONS, 0), "{name}: {ran:#?}"),
        Fail(names) => {
            assert_eq!((done, failed), (0, OPERATIONS), "{name}: {ran:#?}");
            assert!(
                ran.errors().iter().all(|error| names.split(" or ").any(|one| one == *error)),
                "{name}: {ran:#?}"
            );
        }
        Status(status) => assert_eq!((done, ran.error(status)), (OPERATIONS, OPERATIONS), "{name}: {ran:#?}"),
    }
    if matches!(outcome, Done | Fail(_)) {
        assert_eq!(ran.results.retried, 0, "{name}: {ran:#?}");
    }
}

#[test]
fn every_engine_counts_what_the_peer_logged() {
    in_namespace(|| {
        let cases = PEERS.iter().flat_map(|peer| ENGINES.into_iter().map(move |engine| (peer, engine)));
        each_in_namespace(cases, |(&(name, script, outcome), engine)| {
            // Captured output, which is shown if the test fails.
            eprintln!("{name} with {engine:?}");
            let once = || {
                let (address, log) = peer(script);
                let load = against(engine, name, address);
                run("hostile::peers", &load).map(|ran| (ran, log))
            };
            // On a busy host the timeout may pass before a connection is established.
            let is_connected = |(ran, _): &(RunOutcome, Arc<Log>)| {
                outcome != Fail("timeout") || ran.results.connections == OPERATIONS
            };
            let Some((ran, log)) = until_expected(once, is_connected) else { return };
            require(name, outcome, &ran);
            if !matches!(script.first(), Some(Read)) {
                // connect() may or may not succeed before the peer closes the connection.
                return;
            }
            until(|| log.requests() >= OPERATIONS);
            assert_eq!(
                (log.requests(), log.connections()),
                (OPERATIONS, ran.results.connections),
                "{name} with {engine:?}: {ran:#?}"
            );
        });
    });
}

/// The peer reads the second request of a connection and closes the connection without a response.
const UNANSWERED: &[Act] = &[Read, Send(WHOLE), Read];

#[test]
fn a_request_on_a_closed_connection_is_sent_again_once() {
    with_each_engine(|engine| {
        let (address, log) = peer(UNANSWERED);
        let load = against(engine, "", address);
        let Some(ran) = run("hostile::again", &load) else { return };
        let results = &ran.results;
        assert_eq!((results.operations, ran.errors()), (OPERATIONS, vec![]), "{ran:#?}");
        assert!(results.retried >= OPERATIONS - 3, "all but the first of three connections: {ran:#?}");
        until(|| log.requests() >= OPERATIONS + results.retried);
        assert_eq!(log.requests(), OPERATIONS + results.retried, "{ran:#?}");
        assert_eq!((log.connections(), results.connections), (3 + results.retried, 3 + results.retried));
    });
}

#[test]
fn a_request_that_is_not_idempotent_is_not_sent_again() {
    with_each_engine(|engine| {
        let (address, log) = peer(UNANSWERED);
        let mut load = against(engine, "", address);
        let Workload::Http(request) = &mut load.workload else { unreachable!() };
        request.method = "POST".into();
        let Some(ran) = run("hostile::post", &load) else { return };
        let results = &ran.results;
        assert_eq!((results.retried, ran.errors()), (0, vec!["closed-early"]), "{ran:#?}");
        assert_eq!(results.operations + ran.error("closed-early"), OPERATIONS);
        until(|| log.requests() >= OPERATIONS);
        assert_eq!((log.requests(), log.connections()), (OPERATIONS, results.connections), "{ran:#?}");
    });
}

#[test]
fn a_connection_that_was_closed_while_idle_is_not_used() {
    const IDLE: &[(&str, &[Act])] = &[
        ("closed", &[Read, Send(WHOLE)]),
        ("half-closed", &[Read, Send(WHOLE), HalfClose]),
        (
            "told why",
            &[
                Read,
                Send(WHOLE),
                Wait(200),
                Send("HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"),
            ],
        ),
    ];
    in_namespace(|| {
        let cases = IDLE.iter().flat_map(|peer| ENGINES.into_iter().map(move |engine| (peer, engine)));
        each_in_namespace(cases, |(&(name, script), engine)| {
            let once = || {
                let (address, log) = peer(script);
                let mut load = against(engine, "", address);
                (load.pause, load.operations) = (2500 * MILLISECOND, Some(6));
                // A request sent too early would have to be sent again, which is not permitted for this request.
                let Workload::Http(request) = &mut load.workload else { unreachable!() };
                request.method = "POST".into();
                run("hostile::idle", &load).map(|ran| (ran, log))
            };
            // A peer may wait for a CPU before it closes, even for so long.
            let is_closed = |(ran, _): &(RunOutcome, Arc<Log>)| ran.errors().is_empty();
            let Some((ran, log)) = until_expected(once, is_closed) else { return };
            assert_eq!((ran.results.operations, ran.errors()), (6, vec![]), "{name}: {ran:#?}");
            assert_eq!((ran.results.retried, ran.results.connections), (0, 6), "{name}: {ran:#?}");
            assert_eq!((log.requests(), log.connections()), (6, 6), "{name}: {ran:#?}");
        });
    });
}

#[test]
fn an_idle_connection_that_is_still_open_is_reused() {
    with_each_engine(|engine| {
        // The peer closes no connection, however many of the operations it gets.
        let (address, log) = peer([Read, Send(WHOLE)].repeat(OPERATIONS as usize).leak());
        let mut load = against(engine, "", address);
        load.pause = 20 * MILLISECOND;
        let Some(ran) = run("hostile::open", &load) else { return };
        assert_eq!((ran.results.operations, ran.errors()), (OPERATIONS, vec![]), "{ran:#?}");
        assert_eq!((ran.results.retried, log.requests()), (0, OPERATIONS), "{ran:#?}");
        assert_eq!(ran.results.connections, log.connections());
        assert!(ran.results.connections < OPERATIONS, "they were used again: {ran:#?}");
    });
}

#[test]
fn a_run_ends_though_bytes_keep_coming() {
    const FLOOD: &[Act] = &[Read, Send(REST), Flood("x")];
    with_each_engine(|engine| {
        let (address, _) = peer(FLOOD);
        let mut load = against(engine, "", address);
        // The run ends by --for: no operation has reached its timeout.
        (load.operations, load.length) = (None, Some(300 * MILLISECOND));
        let Some(ran) = run("hostile::length", &load) else { return };
        assert_eq!((ran.results.operations, ran.error("unanswered")), (0, 3), "{ran:#?}");
        // The run ends by the stop flag.
        let (address, log) = peer(FLOOD);
        let mut load = against(engine, "", address);
        load.operations = None;
        let flag = AtomicBool::new(false);
        let ran = thread::scope(|scope| {
            scope.spawn(|| {
                until(|| log.requests() == 3);
                flag.store(true, Ordering::Relaxed);
            });
            crate::run_until("hostile::stop", &load, &flag)
        })
        .unwrap();
        assert_eq!(ran.remarks()[0], "interrupted");
        assert_eq!((ran.results.operations, ran.error("unanswered")), (0, 3), "{ran:#?}");
    });
}

#[test]
fn an_impossible_rate_does_not_lengthen_the_run() {
    in_namespace(|| {
        let (address, _) = peer(&[Read, Wait(10_000)]);
        for engine in ENGINES {
            let mut load = against(engine, "", address);
            load.arrival = Arrival::Poisson(1e9);
            (load.operations, load.length, load.timeout) = (None, Some(500 * MILLISECOND), 100 * MILLISECOND);
            let Some(ran) = run("hostile::rate", &load) else { continue };
            assert_eq!(ran.results.operations, 0, "{ran:#?}");
            // On a busy host the last ones may begin so late that the run ends before their timeout.
            let known = ["timeout", "unanswered"];
            assert!(
                !ran.errors().is_empty() && ran.errors().iter().all(|error| known.contains(error)),
                "{ran:#?}"
            );
            assert!(ran.remarks().contains(&"offered-rate-not-reached"), "{ran:#?}");
        }
    });
}

/// A step of a peer on one connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    /// Reads a request to the end of its head, and logs it.
    Read,
    Send(&'static str),
    /// Sends byte by byte, 50 ms apart.
    Drip(&'static str),
    /// Sends the same bytes repeatedly until the client closes.
    Flood(&'static str),
    /// Sends nothing for this many milliseconds.
    Wait(u64),
    /// Sends FIN, and reads on until the client closes.
    HalfClose,
    /// Sends RST.
    Reset,
}

/// Maximum length of a flood: a run that never ends then fails its test.
const MAX_FLOOD: Duration = Duration::from_secs(150);

/// The counts of a peer.
#[derive(Debug, Default)]
pub(crate) struct Log {
    connections: AtomicU64,
    requests: AtomicU64,
}

impl Log {
    pub(crate) fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}

/// Starts a peer that executes `script` on each connection and then closes it.
pub(crate) fn peer(script: &'static [Act]) -> (SocketAddr, Arc<Log>) {
    let log = Arc::new(Log::default());
    let counted = Arc::clone(&log);
    let address = crate::answer(move |stream| {
        counted.connections.fetch_add(1, Ordering::Relaxed);
        script.iter().try_for_each(|act| play(*act, &stream, &counted))
    });
    (address, log)
}

fn play(act: Act, mut stream: &TcpStream, log: &Log) -> io::Result<()> {
    match act {
        Act::Read => {
            read_head(stream)?;
            log.requests.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
        Act::Send(text) => stream.write_all(text.as_bytes()),
        Act::Drip(text) => text.bytes().try_for_each(|byte| {
            thread::sleep(Duration::from_millis(50));
            stream.write_all(&[byte])
        }),
        Act::Flood(text) => {
            let (piece, begun) = (text.repeat(65_536 / text.len()), Instant::now());
            while begun.elapsed() < MAX_FLOOD {
                stream.write_all(piece.as_bytes())?;
            }
            Ok(())
        }
        Act::Wait(milliseconds) => {
            thread::sleep(Duration::from_millis(milliseconds));
            Ok(())
        }
        Act::HalfClose => {
            stream.shutdown(Shutdown::Write)?;
            stream.read_to_end(&mut Vec::new()).map(drop)
        }
        // The RST goes out when the connection is closed, at the end of the script.
        Act::Reset => option::set_reset_on_close(stream.as_fd()),
    }
}

/// Reads to the empty line; requests of these tests have no body, and are not pipelined.
fn read_head(mut stream: &TcpStream) -> io::Result<()> {
    let mut head = Vec::new();
    let mut buffer = [0; 2000];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut buffer)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => head.extend_from_slice(&buffer[..count]),
        }
    }
    Ok(())
}
