//! The acceptor as the listener of `axum::serve`.

use std::future::Future;
use std::io::{BufRead, BufReader, Read, Write};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::accept_tokio::connect;
use axum::extract::{ConnectInfo, Request};
use axum::http::header::{CONNECTION, HeaderValue};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Router, routing::get, routing::post};
use fourtuple::listen::{
    AcceptPolicy, AsyncAcceptor, ConnectionHandle, Endpoint, Family, ListenerGroup, ListenerGroupBuilder,
    Recycle, StreamAddr, by_request,
};
use fourtuple_testing::in_namespace;
use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::sync::oneshot;

/// A timeout that only a failing test reaches.
const DEADLINE: Duration = Duration::from_secs(60);

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(DEADLINE, future).await.expect("an end in time") })
}

fn group() -> ListenerGroupBuilder {
    ListenerGroupBuilder::at(Endpoint::Inet("127.0.0.1:0".parse().unwrap())).max_workers(2)
}

fn open(group: &ListenerGroup) -> u64 {
    group.stats().iter().map(|seat| seat.open).sum()
}

/// Waits until the group counts `expected` connections as open.
async fn until_open(group: &ListenerGroup, expected: u64) {
    while open(group) != expected {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Opens a connection, and returns its sender of requests.
async fn client(group: &ListenerGroup) -> http1::SendRequest<Empty<Bytes>> {
    let (sender, connection) = http1::handshake(TokioIo::new(connect(group).await)).await.unwrap();
    tokio::spawn(connection);
    sender
}

async fn request(sender: &mut http1::SendRequest<Empty<Bytes>>) -> (Bytes, bool) {
    sender.ready().await.unwrap();
    let request = hyper::Request::get("/").header("host", "x").body(Empty::new()).unwrap();
    let response = sender.send_request(request).await.unwrap();
    let is_last = response.headers().get(CONNECTION).is_some_and(|value| value == "close");
    (response.into_body().collect().await.unwrap().to_bytes(), is_last)
}

/// Counts each request, and announces the last one.
async fn count(
    ConnectInfo(session): ConnectInfo<ConnectionHandle>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = next.run(request).await;
    if session.should_close() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    session.response_sent();
    response
}

fn counted() -> Router {
    Router::new().route("/", get(|| async { "hello" })).layer(middleware::from_fn(count))
}

#[test]
fn a_hundred_requests_on_kept_connections_leave_none_open() {
    in_namespace(|| {
        for policy in ["exclusive", "rotate", "shared-oneshot"] {
            let policy: AcceptPolicy = policy.parse().unwrap();
            run(async {
                let group = group().policy(policy).open().unwrap();
                let listener = AsyncAcceptor::new(group.join().unwrap()).unwrap();
                let app = counted().into_make_service_with_connect_info::<ConnectionHandle>();
                let (stop, stopped) = oneshot::channel::<()>();
                let server = axum::serve(listener, app).with_graceful_shutdown(async { drop(stopped.await) });
                let server = tokio::spawn(server.into_future());
                let mut clients = Vec::new();
                for _ in 0..10 {
                    clients.push(client(&group).await);
                }
                for _ in 0..10 {
                    for client in &mut clients {
                        assert_eq!(request(client).await, (Bytes::from_static(b"hello"), false));
                    }
                }
                assert_eq!(open(&group), 10);
                let stats = group.stats();
                assert_eq!(stats.iter().map(|seat| seat.accepts).sum::<u64>(), 10);
                assert_eq!(stats.iter().map(|seat| seat.requests).sum::<u64>(), 100);
                drop(clients);
                until_open(&group, 0).await;
                stop.send(()).unwrap();
                server.await.unwrap().unwrap();
            });
        }
    });
}

#[test]
fn handlers_see_the_address_of_the_client() {
    in_namespace(|| {
        run(async {
            let path = std::env::temp_dir().join(format!("fourtuple-axum-{}.sock", std::process::id()));
            for endpoint in [Endpoint::Inet("127.0.0.1:0".parse().unwrap()), Endpoint::Unix(path)] {
                let group = ListenerGroupBuilder::at(endpoint).open().unwrap();
                let listener = AsyncAcceptor::new(group.join().unwrap()).unwrap();
                let app = Router::new().route(
                    "/",
                    get(|ConnectInfo(address): ConnectInfo<StreamAddr>| async move { address.to_string() }),
                );
                let server = axum::serve(listener, app.into_make_service_with_connect_info::<StreamAddr>());
                let address = server.local_addr().unwrap();
                assert_eq!(address.inet(), group.endpoint().inet());
                let server = tokio::spawn(server.into_future());
                let (text, _) = request(&mut client(&group).await).await;
                match group.family() {
                    Family::Unix => assert_eq!(text, "unnamed unix socket"),
                    Family::Tcp4 | Family::Tcp6 => assert!(text.starts_with(b"127.0.0.1:"), "{text:?}"),
                }
                server.abort();
                // The task drops the listener, which waits for its thread.
                assert!(server.await.unwrap_err().is_cancelled());
            }
        });
    });
}

#[test]
fn a_recycled_connection_is_closed_after_its_last_response() {
    in_namespace(|| {
        run(async {
            let group = group().recycle(Recycle::Requests(3)).open().unwrap();
            let listener = AsyncAcceptor::new(group.join().unwrap()).unwrap();
            let app = counted().into_make_service_with_connect_info::<ConnectionHandle>();
            let server = tokio::spawn(axum::serve(listener, app).into_future());
            let mut client = client(&group).await;
            let mut last = Vec::new();
            for _ in 0..3 {
                last.push(request(&mut client).await.1);
            }
            assert_eq!(last, [false, false, true]);
            until_open(&group, 0).await;
            server.abort();
        });
    });
}

#[test]
fn a_drain_ends_the_server_without_a_reset() {
    in_namespace(|| {
        run(async {
            let group = Arc::new(group().open().unwrap());
            let listener = AsyncAcceptor::new(group.join().unwrap()).unwrap();
            let app = counted().into_make_service_with_connect_info::<ConnectionHandle>();
            let (terminate, terminated) = oneshot::channel::<()>();
            let draining = Arc::clone(&group);
            let server = axum::serve(listener, app).with_graceful_shutdown(async move {
                terminated.await.unwrap();
                assert!(draining.drain_tokio(DEADLINE).await.unwrap().is_complete());
            });
            let server = tokio::spawn(server.into_future());
            let mut client = client(&group).await;
            assert!(!request(&mut client).await.1);
            terminate.send(()).unwrap();
            // The drain may begin later than this request.
            while !request(&mut client).await.1 {}
            server.await.unwrap().unwrap();
            assert!(group.is_drained());
        });
    });
}

#[test]
fn bytes_of_another_worker_are_replayed_first() {
    in_namespace(|| {
        run(async {
            let group = group().open().unwrap();
            let mut other = group.join().unwrap();
            let mut sent = connect(&group).await;
            sent.write_all(b"first second ").await.unwrap();
            let mut connection = other.next(None).unwrap().unwrap();
            let mut read = [0; 20];
            let length = Read::read(&mut connection, &mut read).unwrap();
            connection.carry = read[..length].to_vec();
            other.keep(connection).unwrap();
            let mut acceptor = AsyncAcceptor::new(group.join().unwrap()).unwrap();
            other.leave().unwrap();
            sent.write_all(b"third").await.unwrap();
            let mut stream = acceptor.accept().await.unwrap();
            let handle = stream.handle();
            let mut read = [0; 18];
            // The first read ends within the replayed bytes.
            let length = stream.read(&mut read[..5]).await.unwrap();
            stream.read_exact(&mut read[length..]).await.unwrap();
            assert_eq!(&read, b"first second third");
            stream.write_all(b"back").await.unwrap();
            let mut answer = [0; 4];
            sent.read_exact(&mut answer).await.unwrap();
            assert_eq!(&answer, b"back");

            handle.response_sent();
            assert_eq!((stream.served(), open(&group)), (1, 1));
            assert!(!handle.should_close());
            drop(stream);
            // A handle does not keep the connection open.
            assert_eq!(open(&group), 0);
            assert!(handle.should_close());
            drop(sent);
        });
    });
}

#[test]
fn addresses_of_a_stream_are_those_of_its_socket() {
    in_namespace(|| {
        run(async {
            let group = group().open().unwrap();
            let mut acceptor = AsyncAcceptor::new(group.join().unwrap()).unwrap();
            let mut sent = TcpStream::connect(group.endpoint().inet().unwrap()).await.unwrap();
            sent.write_all(b"x").await.unwrap();
            let stream = acceptor.accept().await.unwrap();
            assert_eq!(stream.peer_addr().unwrap().inet(), Some(sent.local_addr().unwrap()));
            assert_eq!(stream.local_addr().unwrap().inet(), Some(sent.peer_addr().unwrap()));
        });
    });
}

/// Runs workers with a runtime each while `body` runs. An end of the body ends the workers.
fn with_workers(group: &ListenerGroup, apps: Vec<Router>, body: impl FnOnce()) {
    thread::scope(|scope| {
        let mut stops = Vec::new();
        for app in apps {
            let (stop, stopped) = oneshot::channel::<()>();
            stops.push(stop);
            scope.spawn(move || {
                let runtime = Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let listener = AsyncAcceptor::new(group.join().unwrap()).unwrap();
                    let server = axum::serve(listener, by_request(app));
                    server.with_graceful_shutdown(async { drop(stopped.await) }).await.unwrap();
                });
            });
        }
        body();
        // Dropping the senders ends the servers, also after a panic.
    });
}

/// A client that sends bytes and reads whole responses with a Content-Length.
struct Raw(BufReader<std::net::TcpStream>);

impl Raw {
    fn new(group: &ListenerGroup) -> Raw {
        let stream = std::net::TcpStream::connect(group.endpoint().inet().unwrap()).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Raw(BufReader::new(stream))
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).unwrap();
    }

    /// Returns the body of the next response, and whether the connection closes after it.
    fn response(&mut self) -> (String, bool) {
        let (mut length, mut closes) = (0, false);
        loop {
            let mut line = String::new();
            assert_ne!(self.0.read_line(&mut line).unwrap(), 0, "a response, not the end");
            let line = line.trim_end().to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.parse().unwrap();
            }
            closes |= line == "connection: close";
            if line.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body).unwrap();
        (String::from_utf8(body).unwrap(), closes)
    }

    fn get(&mut self, path: &str) -> String {
        self.send(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes());
        self.response().0
    }

    fn is_closed(&mut self) -> bool {
        self.0.read(&mut [0]).unwrap() == 0
    }
}

#[test]
fn a_blocked_worker_delays_no_kept_connection() {
    in_namespace(|| {
        let group = group().policy(AcceptPolicy::SharedOneshot).open().unwrap();
        let (blocked, is_blocked) = mpsc::channel();
        let gate = Arc::new(Mutex::new(()));
        let app = |worker: usize| {
            let (blocked, gate) = (blocked.clone(), Arc::clone(&gate));
            let block = move || {
                blocked.send(worker).unwrap();
                drop(gate.lock());
                worker.to_string()
            };
            let block = get(move || async move { block() });
            Router::new().route("/", get(move || async move { worker.to_string() })).route("/block", block)
        };
        with_workers(&group, vec![app(0), app(1)], || {
            let mut clients: Vec<Raw> = (0..8).map(|_| Raw::new(&group)).collect();
            let mut requests = 0;
            for _ in 0..3 {
                let held = gate.lock().unwrap();
                clients.iter_mut().for_each(|client| drop(client.get("/")));
                clients[0].send(b"GET /block HTTP/1.1\r\nhost: x\r\n\r\n");
                let busy = is_blocked.recv_timeout(DEADLINE).unwrap();
                for client in &mut clients[1..] {
                    assert_eq!(
                        [client.get("/"), client.get("/")],
                        [(1 - busy).to_string(), (1 - busy).to_string()]
                    );
                }
                drop(held);
                assert_eq!(clients[0].response(), (busy.to_string(), false));
                requests += 8 + 1 + 14;
            }
            let stats = group.stats();
            assert_eq!(stats.iter().map(|seat| seat.accepts).sum::<u64>(), 8);
            assert_eq!(stats.iter().map(|seat| seat.requests).sum::<u64>(), requests);
            drop(clients);
            run(until_open(&group, 0));
        });
    });
}

#[test]
fn all_forms_of_requests_are_answered_by_returned_connections() {
    in_namespace(|| {
        let group = group().policy(AcceptPolicy::SharedOneshot).open().unwrap();
        let app = || {
            Router::new()
                .route("/", get(|| async { "hello" }))
                .route("/large", get(|| async { "x".repeat(3_000_000) }))
                .route("/echo", post(|body: String| async { body }))
        };
        let large = "x".repeat(3_000_000);
        // The request, the expected body, and whether the next request may be sent before the response (pipelining).
        let forms: [(&str, &str); 9] = [
            ("GET / HTTP/1.1\r\nhost: x\r\n\r\n", "hello"),
            ("GET / HTTP/1.1\nhost: x\n\n", "hello"),
            ("\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n", "hello"),
            ("GET /large HTTP/1.1\r\nhost: x\r\n\r\n", &large),
            ("POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nab\r\n\r\nabc", "ab\r\n\r\nabc"),
            ("POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n", ""),
            (
                "POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n",
                "ab",
            ),
            ("GET / HTTP/1.1\r\nhost: x\r\nconnection: keep-alive\r\n\r\n", "hello"),
            ("GET /none HTTP/1.1\r\nhost: x\r\n\r\n", ""),
        ];
        with_workers(&group, vec![app(), app()], || {
            for seed in 0..20 {
                let mut random = fastrand::Rng::with_seed(seed);
                let mut client = Raw::new(&group);
                for _ in 0..20 {
                    // One to three requests at once, cut at random.
                    let some: Vec<_> =
                        (0..random.usize(1..4)).map(|_| forms[random.usize(..forms.len())]).collect();
                    let bytes: String = some.iter().map(|(request, _)| *request).collect();
                    let mut rest = bytes.as_bytes();
                    while !rest.is_empty() {
                        let (piece, left) = rest.split_at(random.usize(1..=rest.len()));
                        client.send(piece);
                        rest = left;
                    }
                    for (request, expected) in some {
                        assert_eq!(
                            client.response(),
                            (expected.to_owned(), false),
                            "seed {seed}: {request:?}"
                        );
                    }
                }
                client.send(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
                assert_eq!(client.response(), ("hello".to_owned(), true));
                assert!(client.is_closed());
            }
            let mut old = Raw::new(&group);
            old.send(b"GET / HTTP/1.0\r\n\r\n");
            assert_eq!(old.response().0, "hello");
            assert!(old.is_closed());
            run(until_open(&group, 0));
            assert_eq!(group.stats().iter().map(|seat| seat.accepts).sum::<u64>(), 21);
        });
    });
}

#[test]
fn a_drain_closes_returned_connections() {
    in_namespace(|| {
        let group = group().policy(AcceptPolicy::SharedOneshot).recycle(Recycle::Requests(5)).open().unwrap();
        let app = || {
            Router::new()
                .route("/", get(|ConnectInfo(from): ConnectInfo<StreamAddr>| async move { from.to_string() }))
        };
        let mut idle: Vec<Raw> = Vec::new();
        with_workers(&group, vec![app(), app()], || {
            let mut last = Raw::new(&group);
            let own = last.0.get_ref().local_addr().unwrap().to_string();
            let answers: Vec<_> = (0..5)
                .map(|_| {
                    last.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n");
                    last.response()
                })
                .collect();
            let closes = [false, false, false, false, true];
            assert_eq!(answers, closes.map(|is_last| (own.clone(), is_last)));
            assert!(last.is_closed());

            idle.extend((0..4).map(|_| Raw::new(&group)));
            idle.iter_mut().for_each(|client| drop(client.get("/")));
            assert_eq!(group.drain(Duration::from_millis(100)).unwrap().open, 4);
        });
        // The workers have left the group.
        assert!(idle.iter_mut().all(Raw::is_closed));
    });
}
