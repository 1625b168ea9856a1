//! The acceptor on tokio runtimes, under every policy.

use std::convert::Infallible;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fourtuple::listen::{
    Accepted, AsyncAcceptor, Endpoint, Family, Group, Listen, ListenError, Policy, Recycle, Workers,
};
use fourtuple_measure::balance;
use fourtuple_testing::in_namespace;
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

/// A group, and the thread that accepts for it where the policy has one.
struct Open {
    group: Group,
    over: Arc<AtomicBool>,
    dispatcher: Option<JoinHandle<()>>,
}

fn open(policy: Policy, family: Family) -> Open {
    let group = Listen::at(endpoint(family)).policy(policy).seats(8).open().unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let dispatcher = (group.policy() == Policy::Dispatcher).then(|| {
        let (mut dispatcher, over) = (group.dispatcher().unwrap(), Arc::clone(&over));
        thread::spawn(move || dispatcher.run(&over).unwrap())
    });
    Open { group, over, dispatcher }
}

impl Deref for Open {
    type Target = Group;

    fn deref(&self) -> &Group {
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

/// Runs what a client does, and fails the test where that takes for ever.
fn client<T>(future: impl Future<Output = T>) -> T {
    runtime().block_on(async { tokio::time::timeout(DEADLINE, future).await.expect("an answer in time") })
}

trait Both: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Both for T {}

async fn connect(group: &Group) -> Box<dyn Both> {
    match group.endpoint() {
        Endpoint::Unix(path) => Box::new(UnixStream::connect(path).await.unwrap()),
        Endpoint::Inet(address) => Box::new(TcpStream::connect(address).await.unwrap()),
    }
}

/// A worker with a runtime of its own.
struct Worker {
    thread: JoinHandle<()>,
    stop: oneshot::Sender<()>,
}

impl Worker {
    /// Joins in the calling thread, so that seats are in order.
    fn start<F: Future<Output = ()> + Send + 'static>(group: &Group, serve: fn(Accepted) -> F) -> Worker {
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
                let farewell = acceptor.leave().await.unwrap();
                assert!(farewell.kept.is_empty(), "{farewell:?}");
            });
        });
        Worker { thread, stop }
    }

    fn start_many<F: Future<Output = ()> + Send + 'static>(
        group: &Group,
        count: usize,
        serve: fn(Accepted) -> F,
    ) -> Vec<Worker> {
        (0..count).map(|_| Worker::start(group, serve)).collect()
    }

    fn stop(self) {
        drop(self.stop);
        self.thread.join().unwrap();
    }
}

/// Answers each byte with the next one.
async fn serve_bytes(Accepted { mut stream, mut visit, carry }: Accepted) {
    assert!(carry.is_empty());
    while let Ok(byte) = stream.read_u8().await {
        let last = visit.is_last();
        visit.answered();
        if stream.write_u8(byte.wrapping_add(1)).await.is_err() || last {
            break;
        }
    }
}

async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(Bytes::from_static(b"hello"))))
}

async fn serve_http(Accepted { stream, visit, .. }: Accepted) {
    let _ =
        server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(hello)).await;
    drop(visit);
}

/// Whether the policy can be had here; if not, that it is left out is said aloud, or a failure.
fn is_here(policy: Policy, need: &str) -> bool {
    match Listen::at(endpoint(Family::Tcp4)).policy(policy).open() {
        Ok(_) => true,
        Err(ListenError::NotBuilt { .. }) => false,
        Err(error @ (ListenError::NotPermitted { .. } | ListenError::Absent { .. })) => {
            fourtuple_testing::skip(&format!("{policy} on tokio"), need, &error.to_string());
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// Policies with the families they go with.
fn everywhere() -> impl Iterator<Item = (Policy, Family)> {
    let policies = [
        Policy::Exclusive,
        Policy::Plain,
        Policy::Blocking,
        Policy::ROTATE,
        Policy::SharedOneshot,
        Policy::Dispatcher,
        Policy::Reuseport,
    ];
    let uring = is_here(Policy::UringOneshot, "io_uring").then_some(Policy::UringOneshot);
    let least_busy = is_here(Policy::ReuseportLeastBusy, "bpf").then_some(Policy::ReuseportLeastBusy);
    let all = policies
        .into_iter()
        .chain(least_busy)
        .chain(uring)
        .flat_map(|policy| Family::ALL.map(|family| (policy, family)));
    all.filter(|(policy, family)| policy.check(*family, Workers::Threads).is_ok())
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
            // Runtimes that ended have dropped what they had.
            assert_eq!(stats.iter().map(|seat| seat.open).sum::<u64>(), 0, "{policy} over {family}");
        }
    });
}

/// Would fail if the runtime's own epoll waited around that of the acceptor: all would be woken for each connection.
#[test]
fn one_worker_is_woken_for_a_connection_and_they_take_turns() {
    in_namespace(|| {
        for family in Family::ALL {
            let group = open(Policy::ROTATE, family);
            let workers = Worker::start_many(&group, 4, serve_bytes);
            client(async {
                let mut kept = Vec::new();
                for number in 0..48 {
                    // All wait again.
                    tokio::time::sleep(Duration::from_millis(3)).await;
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

#[test]
fn a_runtime_that_is_busy_has_one_connection_waiting_at_most() {
    in_namespace(|| {
        let group = open(Policy::Exclusive, Family::Unix);
        let (held, holding) = mpsc::channel::<()>();
        let mut first = AsyncAcceptor::new(group.join().unwrap()).unwrap();
        let busy = thread::spawn(move || {
            runtime().block_on(async {
                // Asks for a connection, and then does something else for long.
                tokio::select! {
                    biased;
                    _ = first.accept() => panic!("nobody has come yet"),
                    () = std::future::ready(()) => {}
                }
                holding.recv().unwrap_err();
                first.accept().await.unwrap();
                drop(first);
            });
        });
        let other = Worker::start(&group, serve_bytes);
        client(async {
            let mut kept = Vec::new();
            let mut after = 0;
            // One comes to wait for the busy runtime. All that come after it do not.
            while after < 10 {
                after += u64::from(group.stats()[0].accepts > 0);
                let mut stream = connect(&group).await;
                stream.write_u8(0).await.unwrap();
                kept.push(stream);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            while group.stats()[1].requests + 1 < kept.len() as u64 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        assert_eq!(group.stats()[0].accepts, 1);
        drop(held);
        busy.join().unwrap();
        other.stop();
    });
}

/// Takes its time to read.
async fn serve_slowly(Accepted { mut stream, visit, .. }: Accepted) {
    stream.read_u8().await.unwrap();
    stream.write_u8(0).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    stream.read_u8().await.unwrap();
    stream.write_u8(0).await.unwrap();
    drop(visit);
}

#[test]
fn what_the_runtime_is_told_of_a_connection_wakes_nobody_else() {
    in_namespace(|| {
        // From a dispatcher a worker gets a connection when that has something to say, and watches none.
        for (policy, family) in everywhere().filter(|(policy, _)| *policy != Policy::Dispatcher) {
            let group = open(policy, family);
            let worker = Worker::start(&group, serve_slowly);
            client(async {
                let mut stream = connect(&group).await;
                // It is accepted before it has something to say, so that the acceptor watches it at first.
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
fn what_no_task_has_taken_is_for_whoever_stays() {
    in_namespace(|| {
        let group = open(Policy::Exclusive, Family::Unix);
        let mut leaving = AsyncAcceptor::new(group.join().unwrap()).unwrap();
        client(async {
            // A task asked, and gave up.
            assert!(tokio::time::timeout(Duration::from_millis(1), leaving.accept()).await.is_err());
            let mut stream = connect(&group).await;
            stream.write_u8(1).await.unwrap();
            while group.stats()[0].accepts == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let farewell = leaving.leave().await.unwrap();
            assert_eq!(farewell.handed_over, 1);
            let staying = Worker::start(&group, serve_bytes);
            assert_eq!(stream.read_u8().await.unwrap(), 2);
            tokio::task::spawn_blocking(|| staying.stop()).await.unwrap();
        });
    });
}

#[test]
fn connections_are_closed_after_so_many_requests_and_what_cannot_be_measured_is_refused() {
    in_namespace(|| {
        let listen = Listen::at(endpoint(Family::Tcp4)).policy(Policy::SharedOneshot).seats(4);
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
