//! The acceptor as the listener of `axum::serve`.

mod stream;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{ConnectInfo, Request};
use axum::http::header::{CONNECTION, HeaderValue};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::{Router, routing::get};
use fourtuple::listen::{
    AcceptPolicy, AsyncAcceptor, Endpoint, Family, ListenerGroup, ListenerGroupBuilder, Recycle,
    SessionHandle, StreamAddr,
};
use fourtuple_testing::in_namespace;
use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use stream::connect;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::task;

/// A timeout that only a failing test reaches.
const DEADLINE: Duration = Duration::from_secs(60);

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(DEADLINE, future).await.expect("an end in time") })
}

fn group() -> ListenerGroupBuilder {
    ListenerGroupBuilder::at(Endpoint::Inet("127.0.0.1:0".parse().unwrap())).seats(2)
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
async fn count(ConnectInfo(session): ConnectInfo<SessionHandle>, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    if session.is_last() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    session.answered();
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
                let app = counted().into_make_service_with_connect_info::<SessionHandle>();
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
            let app = counted().into_make_service_with_connect_info::<SessionHandle>();
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
            let app = counted().into_make_service_with_connect_info::<SessionHandle>();
            let (terminate, terminated) = oneshot::channel::<()>();
            let draining = Arc::clone(&group);
            let server = axum::serve(listener, app).with_graceful_shutdown(async move {
                terminated.await.unwrap();
                let drained = task::spawn_blocking(move || draining.drain(DEADLINE)).await;
                assert!(drained.unwrap().unwrap().is_complete());
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
            let mut acceptor = AsyncAcceptor::new(group.join().unwrap()).unwrap();
            let mut sent = connect(&group).await;
            sent.write_all(b"third").await.unwrap();
            let mut accepted = acceptor.accept().await.unwrap();
            assert!(accepted.carry.is_empty());
            accepted.carry = b"first second ".to_vec();
            let mut stream = accepted.into_stream();
            let handle = stream.session_handle();
            let mut read = [0; 18];
            // The first read ends within the replayed bytes.
            let length = stream.read(&mut read[..5]).await.unwrap();
            stream.read_exact(&mut read[length..]).await.unwrap();
            assert_eq!(&read, b"first second third");
            stream.write_all(b"back").await.unwrap();
            let mut answer = [0; 4];
            sent.read_exact(&mut answer).await.unwrap();
            assert_eq!(&answer, b"back");

            handle.answered();
            assert_eq!((stream.session().served(), open(&group)), (1, 1));
            assert!(!handle.is_last());
            drop(stream);
            // A handle does not keep the connection open.
            assert_eq!(open(&group), 0);
            assert!(handle.is_last());
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
            let stream = acceptor.accept().await.unwrap().into_stream();
            assert_eq!(stream.peer_addr().unwrap().inet(), Some(sent.local_addr().unwrap()));
            assert_eq!(stream.local_addr().unwrap().inet(), Some(sent.peer_addr().unwrap()));
        });
    });
}
