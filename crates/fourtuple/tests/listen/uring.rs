use std::thread;
use std::time::Duration;

use fourtuple::listen::{AcceptPolicy, Family, ListenError, ListenerGroupBuilder};
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_testing::in_namespace;

use crate::policies::is_available;
use crate::pool::{ask, connect, endpoint, serve};

const DEADLINE: Option<Duration> = Some(Duration::from_secs(60));

fn listen(family: Family) -> ListenerGroupBuilder {
    ListenerGroupBuilder::at(endpoint(family)).policy(AcceptPolicy::UringOneshot)
}

#[test]
fn a_missing_permission_is_an_error() {
    in_namespace(|| {
        let group = listen(Family::Unix).open();
        // The seccomp filter applies to this thread only and cannot be removed.
        thread::spawn(move || {
            seccomp::refuse(Facility::IoUring).unwrap();
            let error = listen(Family::Unix).open().unwrap_err();
            assert!(matches!(error, ListenError::NotPermitted { .. }), "{error:?}");
            let said = error.to_string();
            assert!(
                said.starts_with("uring-oneshot is not permitted here: io_uring_setup(): EPERM; "),
                "{said}"
            );
            // A worker without the permission fails too.
            if let Ok(group) = group {
                assert!(matches!(group.join().err(), Some(ListenError::NotPermitted { .. })));
                assert_eq!(group.stats().len(), 64);
            }
        })
        .join()
        .unwrap();
    });
}

#[test]
fn an_acceptor_can_move_to_another_thread() {
    in_namespace(|| {
        if !is_available(AcceptPolicy::UringOneshot, "an_acceptor_can_move_to_another_thread") {
            return;
        }
        let group = listen(Family::Tcp4).open().unwrap();
        let mut acceptor = group.join().unwrap();
        let mut stream = connect(&group);
        for served in 1..=4 {
            acceptor = thread::scope(|scope| {
                let asks = scope.spawn(|| ask(&mut *stream, 0));
                let works = scope.spawn(move || {
                    let connection = acceptor.next(DEADLINE).unwrap().expect("a request");
                    serve(&mut acceptor, connection);
                    // The poll of the connection is in progress in this thread's ring.
                    assert!(acceptor.next(Some(Duration::ZERO)).unwrap().is_none());
                    acceptor
                });
                assert_eq!(asks.join().unwrap(), (0, served));
                works.join().unwrap()
            });
        }
        let report = acceptor.leave().unwrap();
        assert_eq!((report.handed_over, report.waiting), (0, 1));
    });
}

#[test]
fn no_connection_is_lost_between_waits() {
    in_namespace(|| {
        if !is_available(AcceptPolicy::UringOneshot, "no_connection_is_lost_between_waits") {
            return;
        }
        let group = listen(Family::Unix).open().unwrap();
        thread::scope(|scope| {
            let clients: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..300 {
                            ask(&mut *connect(&group), 0);
                        }
                    })
                })
                .collect();
            // The timeout cancels the accept of each wait.
            let mut acceptor = group.join().unwrap();
            let mut answered = 0;
            while answered < 600 {
                let waits = Duration::from_micros(answered % 50);
                if let Some(connection) = acceptor.next(Some(waits)).unwrap() {
                    let before = group.stats()[0].requests;
                    serve(&mut acceptor, connection);
                    answered += group.stats()[0].requests - before;
                }
            }
            clients.into_iter().for_each(|client| client.join().unwrap());
        });
        assert_eq!(group.stats()[0].accepts, 600);
    });
}
