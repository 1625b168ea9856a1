//! Dials on a tokio runtime, and the connector with its dialers and the client of hyper-util, in namespaces with few ports.

use std::cell::Cell;
use std::collections::HashSet;
use std::convert::Infallible;
use std::error::Error;
use std::fs;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::time::Duration;

use fourtuple::dial::{
    ConnectError, Connector, DialError, DialReport, DialedStream, Dialer, Dialers, Strategy,
};
use fourtuple_syscalls::option;
use fourtuple_testing::accept_queue::full_listener;
use fourtuple_testing::{in_namespace, listener};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, Uri};
use hyper_util::client::legacy::{self, Client};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::task::{self, JoinSet, LocalSet};

use crate::{range, run, until_gone};

/// Serves HTTP in a task of the runtime, and returns the address.
async fn http_server(address: &str) -> SocketAddr {
    let listener = TcpListener::bind(address).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let answer = service_fn(|_: Request<Incoming>| async {
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"hello"))))
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), answer));
        }
    });
    address
}

fn client(connector: Connector) -> Client<Connector, Empty<Bytes>> {
    Client::builder(TokioExecutor::new()).build(connector)
}

/// Requests the page of a server. Returns the report of the connection, and the response.
async fn get(
    client: &Client<Connector, Empty<Bytes>>,
    server: SocketAddr,
) -> Result<(DialReport, Response<Incoming>), legacy::Error> {
    let response = client.get(format!("http://{server}/").parse().unwrap()).await?;
    Ok((*response.extensions().get::<DialReport>().expect("a report"), response))
}

/// Returns the error of the connector in an error of the client.
fn connect_error(error: &legacy::Error) -> &ConnectError {
    error.source().and_then(|source| source.downcast_ref()).expect("an error of the connector")
}

/// Returns a connector that resolves each name to `addresses`.
fn resolving_to(addresses: Vec<SocketAddr>) -> Connector {
    let resolver = move |_: String, _: u16| {
        let addresses = addresses.clone();
        async move { Ok(addresses) }
    };
    Connector::builder().resolver(resolver).attempt_delay(Duration::from_millis(10)).build()
}

#[test]
fn hyper_gets_the_last_twentieth_of_the_ports() {
    in_namespace(|| {
        range("20000 20199");
        run(async {
            let server = http_server("127.0.0.1:4000").await;
            let fill = Dialer::builder(server).build().unwrap();
            let mut held = Vec::new();
            for _ in 0..190 {
                held.push(fill.dial_tokio().await.unwrap());
            }
            let connector = Connector::new();
            let mut clients = Vec::new();
            let mut ports: Vec<u16> = held.iter().map(|(_, report)| report.source.port()).collect();
            // Each client keeps a connection of its own.
            for _ in 0..10 {
                let client = client(connector.clone());
                let (report, response) = get(&client, server).await.unwrap();
                assert_eq!(report.attempts, 1, "the ledger names the free port");
                assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "hello");
                ports.push(report.source.port());
                clients.push(client);
            }
            ports.sort_unstable();
            assert_eq!(ports, (20_000..=20_199).collect::<Vec<u16>>());

            let error = get(&client(connector), server).await.unwrap_err();
            let error = connect_error(&error);
            assert!(error.is_exhausted() && error.is_retryable(), "{error:?}");
            assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
        });
    });
}

#[test]
fn a_kept_connection_serves_further_requests() {
    in_namespace(|| {
        range("20000 20007");
        run(async {
            let server = http_server("127.0.0.1:4000").await;
            let client = client(Connector::new());
            let mut sources = Vec::new();
            for _ in 0..20 {
                let (report, response) = get(&client, server).await.unwrap();
                response.into_body().collect().await.unwrap();
                sources.push(report.source);
            }
            sources.dedup();
            assert_eq!(sources.len(), 1, "{sources:?}");
        });
    });
}

#[test]
fn uris_with_ipv6_addresses_and_names_are_connected() {
    in_namespace(|| {
        range("20000 20007");
        run(async {
            let server = http_server("[::1]:4000").await;
            let (_, response) = get(&client(Connector::new()), server).await.unwrap();
            assert_eq!(response.status(), 200);
            let named = client(resolving_to(vec![server]));
            let response = named.get(Uri::from_static("http://backend.test/")).await.unwrap();
            assert_eq!(response.status(), 200);
        });
    });
}

#[test]
fn unusable_uris_and_names_are_errors() {
    in_namespace(|| {
        run(async {
            let error = |connector: Connector, uri: &'static str| async move {
                let error = client(connector).get(Uri::from_static(uri)).await.unwrap_err();
                let error = connect_error(&error);
                (error.kind(), error.to_string())
            };
            let (kind, text) = error(Connector::new(), "https://127.0.0.1/").await;
            assert_eq!(kind, io::ErrorKind::InvalidInput);
            assert!(text.contains("enforce_http(false)"), "{text}");
            let allowed = Connector::builder().enforce_http(false).build();
            let (kind, text) = error(allowed, "https://127.0.0.1/").await;
            assert!(kind == io::ErrorKind::ConnectionRefused && text.contains(":443"), "{text}");
            let (kind, text) = error(resolving_to(Vec::new()), "http://nowhere.test/").await;
            assert_eq!(
                (kind, text.as_str()),
                (io::ErrorKind::NotFound, "the name nowhere.test has no address")
            );
            let failing = |_: String, _: u16| async { Err(io::Error::other("no name service")) };
            let failing = Connector::builder().resolver(failing).build();
            let (_, text) = error(failing, "http://nowhere.test/").await;
            assert_eq!(text, "cannot resolve the name nowhere.test");
        });
    });
}

#[test]
fn a_silent_address_does_not_delay_the_next_one() {
    in_namespace(|| {
        range("20000 20099");
        let (_socket, dead, _queued) = full_listener("127.0.0.1");
        run(async {
            let server = http_server("[::1]:4000").await;
            let connector = resolving_to(vec![dead, server]);
            let stream: DialedStream = connector.connect("backend.test", 80).await.unwrap();
            assert_eq!(stream.peer_addr(), server);
            // The socket of the attempt for the silent address is closed. The probe of its dialer may still connect to others. 02: SYN_SENT.
            let sockets = fs::read_to_string("/proc/thread-self/net/tcp").unwrap();
            let silent = format!(":{:04X}", dead.port());
            let is_unanswered = |line: &&str| {
                let words: Vec<&str> = line.split_whitespace().collect();
                words[2].ends_with(&silent) && words[3] == "02"
            };
            assert_eq!(sockets.lines().filter(is_unanswered).count(), 0, "{sockets}");
        });
    });
}

#[test]
fn a_silent_address_alone_ends_at_the_timeout() {
    in_namespace(|| {
        range("20000 20099");
        let (_socket, dead, _queued) = full_listener("127.0.0.1");
        run(async {
            let connector = Connector::builder().timeout(Duration::from_millis(50)).build();
            let error = connector.connect("127.0.0.1", dead.port()).await.unwrap_err();
            assert!(matches!(error, ConnectError::TimedOut { .. }), "{error:?}");
            assert_eq!(io::Error::from(error).kind(), io::ErrorKind::TimedOut);
        });
    });
}

#[test]
fn the_failures_of_all_addresses_are_reported() {
    in_namespace(|| {
        range("20000 20007");
        run(async {
            let addresses = ["127.0.0.1:4001", "[::1]:4002"].map(|text| text.parse().unwrap());
            let error = resolving_to(addresses.to_vec()).connect("backend.test", 80).await.unwrap_err();
            let text = error.to_string();
            assert!(addresses.iter().all(|address| text.contains(&address.to_string())), "{text}");
            assert!(error.kind() == io::ErrorKind::ConnectionRefused && !error.is_exhausted(), "{error:?}");
        });
    });
}

#[test]
fn clones_share_the_ports_of_a_destination() {
    in_namespace(|| {
        range("20000 20007");
        let (_socket, destination) = listener("127.0.0.1", 64);
        run(async {
            let connector = Connector::new();
            let clones = [connector.clone(), connector.clone()];
            let mut held = Vec::new();
            for number in 0..8 {
                let stream = clones[number % 2].connect("127.0.0.1", destination.port()).await.unwrap();
                assert_eq!(stream.report().attempts, 1, "no clone tries the port of the other");
                held.push(stream);
            }
            for clone in &clones {
                let error = clone.connect("127.0.0.1", destination.port()).await.unwrap_err();
                assert!(error.is_exhausted(), "{error:?}");
            }
            assert_eq!(connector.dialers().len(), 1);
        });
    });
}

#[test]
fn an_evicted_dialer_still_dials() {
    in_namespace(|| {
        range("20000 20007");
        let (_socket, destination) = listener("127.0.0.1", 64);
        run(async {
            let dialers = Dialers::new(2);
            let first = dialers.get(destination).await.unwrap();
            for port in 4500..4510 {
                dialers.get(SocketAddr::new(destination.ip(), port)).await.unwrap();
                assert!(dialers.len() <= 2);
            }
            assert!(!dialers.contains(destination));
            first.dial_tokio().await.unwrap();
            let again = dialers.get(destination).await.unwrap();
            assert!(!Arc::ptr_eq(&first, &again));
        });
    });
}

#[test]
fn parallel_tasks_build_a_dialer_once() {
    in_namespace(|| {
        run(async {
            let (builds, built) = mpsc::channel();
            let dialers = Dialers::default().settings(move |dialer| {
                builds.send(dialer.destination()).unwrap();
                dialer
            });
            let destination = "127.0.0.1:4000".parse().unwrap();
            let tasks: Vec<_> = (0..10)
                .map(|_| {
                    let dialers = dialers.clone();
                    tokio::spawn(async move { dialers.get(destination).await.unwrap() })
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
            assert_eq!(built.try_iter().collect::<Vec<_>>(), [destination]);
        });
    });
}

#[test]
fn a_failed_build_is_repeated() {
    in_namespace(|| {
        run(async {
            let dialers = Dialers::new(2).settings(|dialer| dialer.source_port(0));
            let destination = "127.0.0.1:4000".parse().unwrap();
            for _ in 0..3 {
                let error = dialers.get(destination).await.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            }
        });
    });
}

#[test]
fn a_dialer_is_built_on_a_blocking_thread() {
    in_namespace(|| {
        let runtime = Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            // While the only blocking thread is occupied, a build cannot begin, and the runtime's thread runs other tasks.
            let (release, released) = mpsc::channel::<()>();
            let occupied = task::spawn_blocking(move || released.recv());
            let dialers = Dialers::default();
            let mut building = Box::pin(dialers.get("127.0.0.1:4000".parse().unwrap()));
            for _ in 0..100 {
                let polled = std::future::poll_fn(|context| Poll::Ready(building.as_mut().poll(context)));
                assert!(polled.await.is_pending());
                // Not locked during the build.
                assert_eq!(dialers.len(), 1);
                task::yield_now().await;
            }
            release.send(()).unwrap();
            occupied.await.unwrap().unwrap();
            building.await.unwrap();
        });
    });
}

#[test]
fn a_port_is_reused_after_the_peer_closed_first() {
    in_namespace(|| {
        range("20000 20007");
        run(async {
            let listener = TcpListener::bind("127.0.0.1:4000").await.unwrap();
            let connector = Connector::new();
            let (mut held, mut accepted) = (Vec::new(), Vec::new());
            for _ in 0..7 {
                held.push(connector.connect("127.0.0.1", 4000).await.unwrap());
                accepted.push(listener.accept().await.unwrap());
            }
            for close_by_reset in [false, true].into_iter().cycle().take(20) {
                let mut stream = connector.connect("127.0.0.1", 4000).await.unwrap();
                assert_eq!(stream.report().attempts, 1, "the ledger knows the only free port");
                let (mut server_side, _) = listener.accept().await.unwrap();
                if close_by_reset {
                    server_side.set_zero_linger().unwrap();
                } else {
                    server_side.shutdown().await.unwrap();
                }
                drop(server_side);
                let read = stream.read(&mut [0]).await;
                assert!(if close_by_reset { read.is_err() } else { read.unwrap() == 0 });
                let source = stream.local_addr();
                drop(stream);
                until_gone(source);
            }
        });
    });
}

#[test]
fn a_dial_returns_a_connected_stream_and_a_report() {
    in_namespace(|| {
        range("20000 20007");
        run(async {
            let listener = TcpListener::bind("127.0.0.1:4000").await.unwrap();
            let destination = listener.local_addr().unwrap();
            for timeout in [None, Some(Duration::from_secs(60))] {
                let mut builder = Dialer::builder(destination).sources("127.0.0.2".parse().unwrap());
                if let Some(timeout) = timeout {
                    builder = builder.timeout(timeout);
                }
                let (mut stream, report) = builder.build().unwrap().dial_tokio().await.unwrap();
                assert_eq!(report.source, stream.local_addr().unwrap());
                assert_eq!(report.source.ip().to_string(), "127.0.0.2");
                assert!(
                    (20000..=20007).contains(&report.source.port()) && report.attempts == 1,
                    "{report:?}"
                );
                assert!(report.connect > Duration::ZERO, "{report:?}");
                let (mut accepted, peer) = listener.accept().await.unwrap();
                assert_eq!(peer, report.source);
                stream.write_all(b"there").await.unwrap();
                accepted.write_all(b"back").await.unwrap();
                drop(accepted.shutdown().await);
                let mut answer = String::new();
                stream.read_to_string(&mut answer).await.unwrap();
                assert_eq!(answer, "back");
            }
        });
    });
}

#[test]
fn a_refused_connection_burns_no_port() {
    in_namespace(|| {
        range("20000 20007");
        let refusing: SocketAddr = "127.0.0.1:4999".parse().unwrap();
        for strategy in [Strategy::Auto, Strategy::KernelDefault, Strategy::SELECT_TEST_REPEAT] {
            let dialer = Dialer::builder(refusing).strategy(strategy).build().unwrap();
            run(async {
                for _ in 0..32 {
                    let error = dialer.dial_tokio().await.unwrap_err();
                    assert!(
                        matches!(error, DialError::Refused { destination, .. } if destination == refusing),
                        "{error:?}"
                    );
                }
            });
        }
    });
}

#[test]
fn no_answer_is_a_timeout_in_time_and_frees_its_port() {
    in_namespace(|| {
        range("20000 20007");
        // A listener with a full queue answers no further SYN.
        let (_listener, destination) = listener("127.0.0.1", 0);
        let timeout = Duration::from_millis(50);
        let dialer = Dialer::builder(destination).timeout(timeout).build().unwrap();
        let mut held = Vec::new();
        run(async {
            // There are more dials than ports, so the port of a dial that timed out must be free again.
            for _ in 0..16 {
                match dialer.dial_tokio().await {
                    Ok((stream, _)) => held.push(stream),
                    Err(DialError::TimedOut { destination: to, after, .. }) => {
                        assert_eq!(to, destination);
                        assert!(after >= timeout, "{after:?}");
                    }
                    Err(other) => panic!("{other:?}"),
                }
            }
        });
        assert!(held.len() < 8, "a backlog of 0 holds one or two connections");
    });
}

#[test]
fn a_dropped_dial_frees_its_port() {
    in_namespace(|| {
        range("20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 0);
        let dialer = Dialer::builder(destination).build().unwrap();
        let mut held = Vec::new();
        run(async {
            for _ in 0..32 {
                let dialed = tokio::time::timeout(Duration::from_millis(5), dialer.dial_tokio()).await;
                if let Ok(dialed) = dialed {
                    held.push(dialed.unwrap());
                }
            }
        });
        assert!(held.len() < 8, "a backlog of 0 holds one or two connections");
    });
}

#[test]
fn exhaustion_is_named() {
    in_namespace(|| {
        range("20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 64);
        for strategy in [Strategy::KernelDefault, Strategy::Auto] {
            let dialer = Dialer::builder(destination).strategy(strategy).build().unwrap();
            run(async {
                let mut held = Vec::new();
                for _ in 0..8 {
                    held.push(dialer.dial_tokio().await.unwrap());
                }
                match dialer.dial_tokio().await {
                    Err(DialError::PortsExhausted { census: Ok(census), .. }) => {
                        assert_eq!((census.ports, census.established), (8, 8));
                    }
                    other => panic!("{strategy}: {other:?}"),
                }
                for (stream, _) in held {
                    stream.set_zero_linger().unwrap();
                }
            });
        }
    });
}

#[test]
fn dials_that_fail_at_once_let_other_tasks_run() {
    in_namespace(|| {
        range("20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 64);
        for strategy in [Strategy::Auto, Strategy::KernelDefault, Strategy::SELECT_TEST_REPEAT] {
            let fill = Dialer::builder(destination).build().unwrap();
            let dialer = Dialer::builder(destination).strategy(strategy).build().unwrap();
            run(async {
                let mut held = Vec::new();
                for _ in 0..8 {
                    held.push(fill.dial_tokio().await.unwrap());
                }
                let polls = Rc::new(Cell::new(0));
                let counted = Rc::clone(&polls);
                let local = LocalSet::new();
                local.spawn_local(async move {
                    loop {
                        counted.set(counted.get() + 1);
                        task::yield_now().await;
                    }
                });
                local
                    .run_until(async {
                        for dial in 0..20 {
                            let before = polls.get();
                            dialer.dial_tokio().await.unwrap_err();
                            assert!(
                                polls.get() > before,
                                "{strategy}: no poll of the other task in dial {dial}"
                            );
                        }
                    })
                    .await;
                for (stream, _) in held {
                    stream.set_zero_linger().unwrap();
                }
            });
        }
    });
}

#[test]
fn the_kernel_chooses_below_a_quarter_of_the_ports() {
    in_namespace(|| {
        range("20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 64);
        let dialer = Dialer::builder(destination).build().unwrap();
        let steered = dialer.choice().strategy;
        assert_ne!(steered, Strategy::KernelDefault);
        run(async {
            let mut held = Vec::new();
            for expected in [Strategy::KernelDefault, Strategy::KernelDefault, steered, steered] {
                let (stream, report) = dialer.dial_tokio().await.unwrap();
                assert_eq!((report.strategy, report.attempts), (expected, 1));
                held.push(stream);
            }
        });
    });
}

#[test]
fn a_vain_search_of_the_kernel_is_not_repeated() {
    in_namespace(|| {
        range("20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 64);
        let dialer = Dialer::builder(destination).build().unwrap();
        let steered = dialer.choice().strategy;
        // Another program takes all ports, which the ledger does not know.
        let other = Dialer::builder(destination).build().unwrap();
        let mut held: Vec<_> = (0..8).map(|_| other.dial().unwrap().0).collect();
        run(async {
            let error = dialer.dial_tokio().await.unwrap_err();
            assert!(matches!(error, DialError::PortsExhausted { .. }), "{error:?}");
            let freed = held.pop().unwrap();
            option::set_reset_on_close(freed.as_fd()).unwrap();
            drop(freed);
            let (_stream, report) = dialer.dial_tokio().await.unwrap();
            assert_eq!(report.strategy, steered);
        });
    });
}

#[test]
fn parallel_dials_share_few_ports_without_conflict() {
    in_namespace(|| {
        const DIALS: usize = 200;
        // There are exactly as many ports as dials.
        range("20000 20199");
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let dialer = Arc::new(Dialer::builder(destination).timeout(Duration::from_secs(60)).build().unwrap());
        let held = run(async {
            let mut dials = JoinSet::new();
            for _ in 0..DIALS {
                let dialer = Arc::clone(&dialer);
                dials.spawn(async move { dialer.dial_tokio().await });
            }
            let mut held = Vec::new();
            while let Some(dialed) = dials.join_next().await {
                held.push(dialed.unwrap().unwrap());
            }
            let error = dialer.dial_tokio().await.unwrap_err();
            assert!(matches!(error, DialError::PortsExhausted { .. }), "{error:?}");
            held
        });
        let ports: HashSet<u16> = held.iter().map(|(_, report)| report.source.port()).collect();
        assert_eq!(ports.len(), DIALS);
        assert!(held.iter().all(|(_, report)| report.attempts == 1), "the ledger names each port once");
    });
}
