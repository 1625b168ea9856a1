//! The acceptor on tokio runtimes with every policy, and as the listener of `axum::serve`.

use std::convert::Infallible;
use std::future::Future;
use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::header::{CONNECTION, HeaderValue};
use axum::middleware::{self, Next};
use axum::routing::{get, post};
use fourtuple::listen::{
    AcceptPolicy, AsyncAcceptor, AsyncConnection, ConnectionHandle, Endpoint, Family, ListenError,
    ListenerGroup, ListenerGroupBuilder, Recycle, StreamAddr, Workers, by_request,
};
use fourtuple_record::measure::balance;
use fourtuple_syscalls::seccomp;
use fourtuple_testing::in_namespace;
use fourtuple_testing::process::until_others_sleep;
use futures_util::StreamExt;
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, server};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Builder;
use tokio::sync::oneshot;

use crate::{DEADLINE, run, runtime};

fn endpoint(family: Family) -> Endpoint {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    match family {
        Family::Unix => {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let name = format!("fourtuple-accept-tokio-{}-{number}.sock", std::process::id());
            Endpoint::Unix([std::env::temp_dir(), PathBuf::from(name)].iter().collect())
        }
        Family::Tcp4 => Endpoint::Inet("127.0.0.1:0".parse().unwrap()),
        Family::Tcp6 => Endpoint::Inet("[::1]:0".parse().unwrap()),
    }
}

fn builder(policy: AcceptPolicy, family: Family) -> ListenerGroupBuilder {
    ListenerGroupBuilder::at(endpoint(family)).policy(policy)
}

/// A group, and the thread of its dispatcher if the policy has one.
struct Open {
    group: ListenerGroup,
    over: Arc<AtomicBool>,
    dispatcher: Option<JoinHandle<()>>,
}

fn open(policy: AcceptPolicy, family: Family) -> Open {
    let group = builder(policy, family).max_workers(8).open().unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let dispatcher = (group.policy() == AcceptPolicy::Dispatcher).then(|| {
        let (mut dispatcher, over) = (group.dispatcher().unwrap(), Arc::clone(&over));
        thread::spawn(move || dispatcher.run(&over).unwrap())
    });
    Open { group, over, dispatcher }
}

impl Deref for Open {
    type Target = ListenerGroup;

    fn deref(&self) -> &ListenerGroup {
        &self.group
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(Err(panic)) = self.dispatcher.take().map(JoinHandle::join)
            && !thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

/// A worker with its own runtime.
struct Worker {
    thread: JoinHandle<()>,
    stop: oneshot::Sender<()>,
}

impl Worker {
    /// Joins in the calling thread, so that seats are in order.
    fn start<F: Future<Output = ()> + Send + 'static>(
        group: &ListenerGroup,
        serve: fn(AsyncConnection) -> F,
    ) -> Worker {
        let mut acceptor = AsyncAcceptor::new(group.join().unwrap()).unwrap();
        let (stop, mut stopped) = oneshot::channel();
        let thread = thread::spawn(move || {
            runtime().block_on(async {
                loop {
                    tokio::select! {
                        accepted = acceptor.accept() => drop(tokio::spawn(serve(accepted.unwrap()))),
                        _ = &mut stopped => break,
                    }
                }
                let report = acceptor.leave().await.unwrap();
                assert!(report.kept.is_empty(), "{report:?}");
            });
        });
        Worker { thread, stop }
    }

    fn start_many<F: Future<Output = ()> + Send + 'static>(
        group: &ListenerGroup,
        count: usize,
        serve: fn(AsyncConnection) -> F,
    ) -> Vec<Worker> {
        (0..count).map(|_| Worker::start(group, serve)).collect()
    }

    fn stop(self) {
        drop(self.stop);
        self.thread.join().unwrap();
    }
}

/// Answers each byte with the next one.
async fn serve_bytes(mut stream: AsyncConnection) {
    while let Ok(byte) = stream.read_u8().await {
        let last = stream.should_close();
        stream.response_sent();
        if stream.write_u8(byte.wrapping_add(1)).await.is_err() || last {
            break;
        }
    }
}

async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(Bytes::from_static(b"hello"))))
}

async fn serve_http(stream: AsyncConnection) {
    let _ =
        server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(hello)).await;
}

/// Returns whether this host can open the policy. A missing facility is reported as a skip, or fails where the facility is required.
fn is_available(policy: AcceptPolicy) -> bool {
    match (builder(policy, Family::Tcp4).open(), policy.facility()) {
        (Ok(_), _) => true,
        (Err(ListenError::NotBuilt { .. }), Some(_)) if !cfg!(all(feature = "bpf", feature = "uring")) => {
            false
        }
        (Err(error @ (ListenError::NotPermitted { .. } | ListenError::Absent { .. })), Some(facility)) => {
            fourtuple_testing::skip(&format!("{policy} on tokio"), facility, &error.to_string());
            false
        }
        (Err(error), _) => panic!("{policy}: {error}"),
    }
}

/// Returns every policy that this host can open, with each family that it supports.
fn everywhere() -> impl Iterator<Item = (AcceptPolicy, Family)> {
    AcceptPolicy::ALL
        .into_iter()
        .filter(|policy| is_available(*policy))
        .flat_map(|policy| Family::ALL.map(|family| (policy, family)))
        .filter(|(policy, family)| policy.check(*family, Workers::Threads).is_ok())
}

#[test]
fn a_hundred_requests_are_answered_under_every_policy() {
    in_namespace(|| {
        for (policy, family) in everywhere() {
            let group = open(policy, family);
            let workers = Worker::start_many(&group, 3, serve_http);
            run(async {
                for _ in 0..10 {
                    let stream = TokioIo::new(connect(&group).await);
                    let (mut sender, connection) = http1::handshake(stream).await.unwrap();
                    let connection = tokio::spawn(connection);
                    for _ in 0..10 {
                        let request =
                            Request::get("/").header("host", "x").body(Full::<Bytes>::default()).unwrap();
                        let response = sender.send_request(request).await.unwrap();
                        let body = response.into_body().collect().await.unwrap().to_bytes();
                        assert_eq!(body, "hello", "{policy} over {family}");
                    }
                    drop(sender);
                    connection.await.unwrap().unwrap();
                }
            });
            workers.into_iter().for_each(Worker::stop);
            let stats = group.stats();
            assert_eq!(stats.iter().map(|seat| seat.accepts).sum::<u64>(), 10, "{policy} over {family}");
            // A runtime drops its connections when it ends.
            assert_eq!(stats.iter().map(|seat| seat.open).sum::<u64>(), 0, "{policy} over {family}");
        }
    });
}

#[test]
fn a_connection_without_a_watch_is_counted_and_closed() {
    in_namespace(|| {
        let group = open(AcceptPolicy::Exclusive, Family::Tcp4);
        let mut acceptor = AsyncAcceptor::new(group.join().unwrap()).unwrap();
        let runtime = runtime();
        let (stop, stopped) = oneshot::channel::<()>();
        let worker = thread::spawn(move || {
            // The seccomp filter applies to this thread only, not to the thread of the acceptor.
            seccomp::exhaust_watches().unwrap();
            runtime.block_on(async {
                tokio::select! {
                    accepted = acceptor.accept() => panic!("{accepted:?}"),
                    _ = stopped => {}
                }
            });
        });
        run(async {
            for _ in 0..3 {
                let mut stream = connect(&group).await;
                stream.write_u8(1).await.unwrap();
                // The server closes the socket with a byte unread: the client reads an end of file or a reset.
                assert!(stream.read_u8().await.is_err());
            }
        });
        // The worker counts a connection after it has closed it.
        while group.stats()[0].unwatched < 3 {
            thread::yield_now();
        }
        drop(stop);
        worker.join().unwrap();
    });
}

/// Would fail if the runtime watched the acceptor epoll: the kernel would wake all workers for each connection.
#[test]
fn rotate_wakes_one_worker_per_connection_in_turn() {
    in_namespace(|| {
        for family in Family::ALL {
            let group = open(AcceptPolicy::ROTATE, family);
            let workers = Worker::start_many(&group, 4, serve_bytes);
            run(async {
                let mut kept = Vec::new();
                for number in 0..48 {
                    until_others_sleep();
                    let mut stream = connect(&group).await;
                    stream.write_u8(number).await.unwrap();
                    assert_eq!(stream.read_u8().await.unwrap(), number + 1);
                    kept.push(stream);
                }
            });
            workers.into_iter().for_each(Worker::stop);
            let shares: Vec<_> = group.stats()[..4].iter().map(|seat| seat.accepts).collect();
            assert!(balance::jain(&shares).unwrap() > 0.9, "{family}: {shares:?}");
            let empty: u64 = group.stats().iter().map(|seat| seat.empty_accepts).sum();
            assert!(empty < 24, "{family}: {empty} were woken for nothing");
        }
    });
}

/// Waits until the runtime has polled its tasks a number of times. The third poll of `accept()` asks for a connection.
async fn until_polled(times: u32) {
    for _ in 0..times {
        tokio::task::yield_now().await;
    }
}

/// Blocks a runtime while one of its tasks waits for a connection, and lets clients connect meanwhile. The runtime was idle before if
/// `was_idle`. Returns the number of connections that its acceptor has accepted. An idle worker is there for the rest.
fn accepts_while_busy(was_idle: bool) -> u64 {
    let expected = u64::from(was_idle);
    let group = open(AcceptPolicy::Exclusive, Family::Unix);
    let (held, holding) = mpsc::channel::<()>();
    let mut first = AsyncAcceptor::new(group.join().unwrap()).unwrap();
    let (waits, waiting) = mpsc::channel();
    let busy = thread::spawn(move || {
        runtime().block_on(async {
            tokio::select! {
                biased;
                _ = first.accept() => panic!("no connection has arrived yet"),
                () = until_polled(if was_idle { 5 } else { 0 }) => {}
            }
            waits.send(()).unwrap();
            holding.recv().unwrap_err();
            first.accept().await.unwrap();
            drop(first);
        });
    });
    let other = Worker::start(&group, serve_bytes);
    waiting.recv().unwrap();
    let accepts = run(async {
        let mut kept = Vec::new();
        let mut after = 0;
        while after < 10 {
            after += u64::from(group.stats()[0].accepts >= expected);
            let mut stream = connect(&group).await;
            stream.write_u8(0).await.unwrap();
            kept.push(stream);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        while group.stats()[1].requests + group.stats()[0].accepts < kept.len() as u64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let accepts = group.stats()[0].accepts;
        drop(held);
        // The runtime that is no longer busy gets a connection too.
        while !busy.is_finished() {
            let mut stream = connect(&group).await;
            let _ = stream.write_u8(0).await;
            kept.push(stream);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        accepts
    });
    busy.join().unwrap();
    other.stop();
    accepts
}

#[test]
fn at_most_one_connection_waits_for_a_busy_runtime() {
    in_namespace(|| {
        assert_eq!(accepts_while_busy(false), 0);
        // Rarely two: the thread lost its processor after it had found no bytes on a connection, before it watched it.
        let mut accepts = (0..3).map(|_| accepts_while_busy(true));
        assert!(accepts.any(|accepts| accepts == 1), "more than one each time");
    });
}

/// Reads slowly.
async fn serve_slowly(mut stream: AsyncConnection) {
    stream.read_u8().await.unwrap();
    stream.write_u8(0).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    stream.read_u8().await.unwrap();
    stream.write_u8(0).await.unwrap();
}

#[test]
fn runtime_events_wake_no_other_worker() {
    in_namespace(|| {
        // A dispatcher sends only readable connections, so its workers watch none.
        for (policy, family) in everywhere().filter(|(policy, _)| *policy != AcceptPolicy::Dispatcher) {
            let group = open(policy, family);
            let worker = Worker::start(&group, serve_slowly);
            run(async {
                let mut stream = connect(&group).await;
                // The connection is accepted before its first bytes, so the acceptor watches it at first.
                while group.stats()[0].accepts == 0 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                stream.write_all(&[1, 2]).await.unwrap();
                stream.read_exact(&mut [0; 2]).await.unwrap();
            });
            worker.stop();
            let wakeups = group.stats()[0].wakeups;
            assert!(wakeups <= 4, "{policy} over {family}: {wakeups} wakeups for one connection");
        }
    });
}

#[test]
fn an_untaken_connection_goes_to_another_worker() {
    in_namespace(|| {
        let group = open(AcceptPolicy::Exclusive, Family::Unix);
        let mut leaving = AsyncAcceptor::new(group.join().unwrap()).unwrap();
        run(async {
            // A task polled for a connection and was dropped.
            tokio::select! {
                biased;
                _ = leaving.accept() => panic!("no connection has arrived yet"),
                () = until_polled(5) => {}
            }
            let mut stream = connect(&group).await;
            stream.write_u8(1).await.unwrap();
            while group.stats()[0].accepts == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let report = leaving.leave().await.unwrap();
            assert_eq!((report.handed_over, report.waiting), (0, 1));
            let staying = Worker::start(&group, serve_bytes);
            assert_eq!(stream.read_u8().await.unwrap(), 2);
            tokio::task::spawn_blocking(|| staying.stop()).await.unwrap();
        });
    });
}

#[test]
fn recycle_closes_connections_and_measured_is_refused() {
    in_namespace(|| {
        let listen = builder(AcceptPolicy::SharedOneshot, Family::Tcp4).max_workers(4);
        let group = listen.clone().recycle(Recycle::Requests(2)).open().unwrap();
        let worker = Worker::start(&group, serve_bytes);
        run(async {
            let mut stream = connect(&group).await;
            stream.write_all(&[1, 2]).await.unwrap();
            let mut answers = Vec::new();
            stream.read_to_end(&mut answers).await.unwrap();
            assert_eq!(answers, [2, 3]);
        });
        worker.stop();
        let measured = listen.recycle(Recycle::Measured).open().unwrap();
        let refused = AsyncAcceptor::new(measured.join().unwrap()).unwrap_err();
        assert!(matches!(refused, ListenError::NotMeasurable), "{refused}");
    });
}

#[test]
fn the_stream_of_connections_ends_with_a_drain() {
    in_namespace(|| {
        let group = open(AcceptPolicy::Exclusive, Family::Tcp4);
        runtime().block_on(async {
            let mut incoming = AsyncAcceptor::new(group.join().unwrap()).unwrap().incoming();
            for _ in 0..3 {
                let mut client = connect(&group).await;
                client.write_all(b"x").await.unwrap();
                let mut stream = incoming.next().await.unwrap().unwrap();
                let mut read = [0];
                stream.read_exact(&mut read).await.unwrap();
                assert_eq!(&read, b"x");
            }
            // The stream is polled on the runtime on which the drain waits.
            let (drained, last) = tokio::join!(group.drain_tokio(DEADLINE), incoming.next());
            assert!(drained.unwrap().is_complete() && last.is_none());
        });
    });
}

/// The group cannot know that its workers will be runtimes: the reason of its choice names the setting.
#[test]
fn the_choice_of_auto_names_its_kind_of_workers() {
    in_namespace(|| {
        let builder = || ListenerGroupBuilder::at(endpoint(Family::Tcp4)).max_workers(2);
        for (group, policy, reason) in [
            (
                builder().open().unwrap(),
                AcceptPolicy::SharedOneshot,
                "with Workers::Threads; a runtime reads",
            ),
            (builder().workers(Workers::Runtimes).open().unwrap(), AcceptPolicy::ROTATE, "a runtime keeps"),
        ] {
            let workers = Worker::start_many(&group, 2, serve_bytes);
            assert_eq!(group.policy(), policy);
            assert!(group.choice().to_string().contains(reason), "{}", group.choice());
            run(async {
                let mut stream = connect(&group).await;
                for byte in 0..2 {
                    stream.write_u8(byte).await.unwrap();
                    assert_eq!(stream.read_u8().await.unwrap(), byte + 1);
                }
            });
            workers.into_iter().for_each(Worker::stop);
        }
    });
}

trait Both: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Both for T {}

async fn connect(group: &ListenerGroup) -> Box<dyn Both> {
    match group.endpoint() {
        Endpoint::Unix(path) => Box::new(UnixStream::connect(path).await.unwrap()),
        Endpoint::Inet(address) => Box::new(TcpStream::connect(address).await.unwrap()),
    }
}

fn group() -> ListenerGroupBuilder {
    ListenerGroupBuilder::at(Endpoint::Inet("127.0.0.1:0".parse().unwrap())).max_workers(2)
}

fn open_connections(group: &ListenerGroup) -> u64 {
    group.stats().iter().map(|seat| seat.open).sum()
}

/// Waits until the group counts `expected` connections as open.
async fn until_open(group: &ListenerGroup, expected: u64) {
    while open_connections(group) != expected {
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
    let request = Request::get("/").header("host", "x").body(Empty::new()).unwrap();
    let response = sender.send_request(request).await.unwrap();
    let is_last = response.headers().get(CONNECTION).is_some_and(|value| value == "close");
    (response.into_body().collect().await.unwrap().to_bytes(), is_last)
}

/// Counts each request, and announces the last one.
async fn count(
    ConnectInfo(session): ConnectInfo<ConnectionHandle>,
    request: Request<Body>,
    next: Next,
) -> Response<Body> {
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
                assert_eq!(open_connections(&group), 10);
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
            assert_eq!((stream.served(), open_connections(&group)), (1, 1));
            assert!(!handle.should_close());
            drop(stream);
            // A handle does not keep the connection open.
            assert_eq!(open_connections(&group), 0);
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
            // A connection that returns counts twice for a moment, and a closed one once.
            run(until_open(&group, 4));
            until_others_sleep();
            assert_eq!(group.drain(Duration::from_millis(100)).unwrap().open, 4);
        });
        // The workers have left the group.
        assert!(idle.iter_mut().all(Raw::is_closed));
    });
}
