//! The dialer on a tokio runtime, in a namespace with few ports.

use std::cell::Cell;
use std::collections::HashSet;
use std::future::Future;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use fourtuple::dial::{DialError, Dialer, Strategy};
use fourtuple_syscalls::option;
use fourtuple_testing::{in_namespace, listener, set_sysctl};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::task::{self, JoinSet, LocalSet};

fn range(text: &str) {
    set_sysctl("net.ipv4.ip_local_port_range", text);
}

fn run<T>(future: impl Future<Output = T>) -> T {
    Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

#[test]
fn a_dial_returns_a_connected_stream_and_a_report() {
    in_namespace(|| {
        range("20000 20007");
        run(async {
            let listener = TcpListener::bind("127.0.0.1:4000").await.unwrap();
            let destination = listener.local_addr().unwrap();
            for timeout in [None, Some(Duration::from_secs(60))] {
                let mut builder = Dialer::to(destination).sources("127.0.0.2".parse().unwrap());
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
            let dialer = Dialer::to(refusing).strategy(strategy).build().unwrap();
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
        let dialer = Dialer::to(destination).timeout(timeout).build().unwrap();
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
        let dialer = Dialer::to(destination).build().unwrap();
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
            let dialer = Dialer::to(destination).strategy(strategy).build().unwrap();
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
            let fill = Dialer::to(destination).build().unwrap();
            let dialer = Dialer::to(destination).strategy(strategy).build().unwrap();
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
        let dialer = Dialer::to(destination).build().unwrap();
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
        let dialer = Dialer::to(destination).build().unwrap();
        let steered = dialer.choice().strategy;
        // Another program takes all ports, which the ledger does not know.
        let other = Dialer::to(destination).build().unwrap();
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
        let dialer = Arc::new(Dialer::to(destination).timeout(Duration::from_secs(60)).build().unwrap());
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
