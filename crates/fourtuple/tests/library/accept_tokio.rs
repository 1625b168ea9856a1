//! The acceptor on tokio runtimes with every policy.

use std::convert::Infallible;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fourtuple::listen::{
    AcceptPolicy, AsyncAcceptor, AsyncConnection, Endpoint, Family, ListenError, ListenerGroup,
    ListenerGroupBuilder, Recycle, Workers,
};
use fourtuple_record::measure::balance;
use fourtuple_syscalls::seccomp;
use fourtuple_testing::in_namespace;
use fourtuple_testing::threads::until_others_sleep;
use futures_util::StreamExt;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, client, server};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

const DEADLINE: Duration = Duration::from_secs(60);

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

/// A group, and the thread of its dispatcher if the policy has one.
struct Open {
    group: ListenerGroup,
    over: Arc<AtomicBool>,
    dispatcher: Option<JoinHandle<()>>,
}

fn open(policy: AcceptPolicy, family: Family) -> Open {
    let group = ListenerGroupBuilder::at(endpoint(family)).policy(policy).max_workers(8).open().unwrap();
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

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs a client, and fails the test if the client does not end.
fn client<T>(future: impl Future<Output = T>) -> T {
    runtime().block_on(async { tokio::time::timeout(DEADLINE, future).await.expect("an answer in time") })
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
    match (ListenerGroupBuilder::at(endpoint(Family::Tcp4)).policy(policy).open(), policy.facility()) {
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
            client(async {
                for _ in 0..10 {
                    let stream = TokioIo::new(connect(&group).await);
                    let (mut sender, connection) = client::conn::http1::handshake(stream).await.unwrap();
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
        client(async {
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
            client(async {
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
    let accepts = client(async {
        let mut kept = Vec::new();
        let mut after = 0;
        while after < 10 {
            after += u64::from(group.stats()[0].accepts >= expected);
            let mut stream = connect(&group).await;
            stream.write_u8(0).await.unwrap();
            kept.push(stream);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        while group.stats()[1].requests + expected < kept.len() as u64 {
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
        assert_eq!(accepts_while_busy(true), 1);
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
            client(async {
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
        client(async {
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
        let listen = ListenerGroupBuilder::at(endpoint(Family::Tcp4))
            .policy(AcceptPolicy::SharedOneshot)
            .max_workers(4);
        let group = listen.clone().recycle(Recycle::Requests(2)).open().unwrap();
        let worker = Worker::start(&group, serve_bytes);
        client(async {
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
            client(async {
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

pub(crate) trait Both: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Both for T {}

pub(crate) async fn connect(group: &ListenerGroup) -> Box<dyn Both> {
    match group.endpoint() {
        Endpoint::Unix(path) => Box::new(UnixStream::connect(path).await.unwrap()),
        Endpoint::Inet(address) => Box::new(TcpStream::connect(address).await.unwrap()),
    }
}
