use std::thread;
use std::time::Duration;

use fourtuple::listen::{Family, Listen, ListenError, Policy};
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_testing::in_namespace;

use crate::pool::{ask, connect, endpoint, has_uring, serve};

const DEADLINE: Option<Duration> = Some(Duration::from_secs(60));

fn listen(family: Family) -> Listen {
    Listen::at(endpoint(family)).policy(Policy::UringOneshot)
}

#[test]
fn without_permission_it_says_so() {
    in_namespace(|| {
        let group = listen(Family::Unix).open();
        // On a thread of its own: there is no way back.
        thread::spawn(move || {
            seccomp::refuse(Facility::IoUring).unwrap();
            let error = listen(Family::Unix).open().unwrap_err();
            assert!(matches!(error, ListenError::NotPermitted { .. }), "{error:?}");
            let said = error.to_string();
            assert!(
                said.starts_with("uring-oneshot is not permitted here: io_uring_setup(): EPERM ("),
                "{said}"
            );
            // So does a worker that alone has not got it.
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
fn an_acceptor_may_go_to_another_thread() {
    in_namespace(|| {
        if !has_uring("an_acceptor_may_go_to_another_thread") {
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
                    // Its poll is under way in this thread's ring.
                    assert!(acceptor.next(Some(Duration::ZERO)).unwrap().is_none());
                    acceptor
                });
                assert_eq!(asks.join().unwrap(), (0, served));
                works.join().unwrap()
            });
        }
        let farewell = acceptor.leave().unwrap();
        assert_eq!(farewell.handed_over, 1);
    });
}

#[test]
fn nobody_is_lost_between_two_waits() {
    in_namespace(|| {
        if !has_uring("nobody_is_lost_between_two_waits") {
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
            // Cancelled as often as it waits.
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
