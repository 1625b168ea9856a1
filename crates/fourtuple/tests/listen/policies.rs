//! What each policy does, and the dispatcher.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use fourtuple::listen::{
    AcceptPolicy, Acceptor, Connection, Endpoint, Family, ListenError, ListenerGroup, ListenerGroupBuilder,
    Recycle, Workers,
};
use fourtuple_record::measure::balance;
use fourtuple_syscalls::option;
use fourtuple_testing::in_namespace;
use fourtuple_testing::process::until_others_sleep;

use crate::{Worker, ask, builder, closed_gate, connect, endpoint, open, serve};

fn stop(workers: Vec<Worker>) {
    workers.into_iter().for_each(Worker::stop);
}

fn sums(group: &ListenerGroup) -> (u64, u64, u64) {
    group.stats().iter().fold((0, 0, 0), |(accepts, requests, open), seat| {
        (accepts + seat.accepts, requests + seat.requests, open.wrapping_add(seat.open))
    })
}

/// Returns every policy that this host can open, with each family that it supports.
pub(crate) fn everywhere(test: &str) -> impl Iterator<Item = (AcceptPolicy, Family)> {
    AcceptPolicy::ALL
        .into_iter()
        .filter(|policy| is_available(*policy, test))
        .flat_map(|policy| Family::ALL.map(|family| (policy, family)))
        .filter(|(policy, family)| policy.check(*family, Workers::Threads).is_ok())
}

/// Returns whether this host can open the policy. A missing facility is reported as a skip, or fails where the facility is required.
pub(crate) fn is_available(policy: AcceptPolicy, test: &str) -> bool {
    match (builder(policy, Family::Tcp4).open(), policy.facility()) {
        (Ok(_), _) => true,
        (Err(ListenError::NotBuilt { .. }), Some(_)) if !cfg!(all(feature = "bpf", feature = "uring")) => {
            false
        }
        (Err(error @ (ListenError::NotPermitted { .. } | ListenError::Absent { .. })), Some(facility)) => {
            fourtuple_testing::skip(test, facility, &error.to_string());
            false
        }
        (Err(error), _) => panic!("{policy}: {error}"),
    }
}

#[test]
fn a_wakeup_comes_before_ready_connections() {
    in_namespace(|| {
        for (policy, family) in everywhere("a_wakeup_comes_before_ready_connections") {
            let group = open(policy, family);
            let mut acceptor = group.join().unwrap();
            let mut streams = [connect(&group), connect(&group)];
            for stream in &mut streams {
                stream.write_all(&0_u32.to_ne_bytes()).unwrap();
            }
            let first = acceptor.next(None).unwrap().expect("a connection");
            acceptor.waker().wake();
            assert!(acceptor.next(None).unwrap().is_none(), "{policy} over {family}");
            drop(first);
            assert!(acceptor.next(None).unwrap().is_some(), "{policy} over {family}: once");
        }
    });
}

#[test]
fn every_policy_answers_every_request() {
    in_namespace(|| {
        for (policy, family) in everywhere("every_policy_answers_every_request") {
            let group = open(policy, family);
            let workers = Worker::start_many(&group, 3);
            thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        for requests in [1, 2, 20] {
                            let mut stream = connect(&group);
                            for number in 1..=requests {
                                assert_eq!(ask(&mut *stream, 0).1, number, "{policy} over {family}");
                            }
                        }
                    });
                }
            });
            stop(workers);
            let (accepts, requests, open) = sums(&group);
            assert_eq!((accepts, requests), (9, 69), "{policy} over {family}");
            // A worker may not yet have read the end of a connection; no connection counts twice.
            assert!(open <= 9, "{policy} over {family}: {open} open");
        }
    });
}

/// Opens connections in sequence, each when all workers wait, and keeps them open.
fn one_after_the_other(policy: AcceptPolicy, family: Family) -> Vec<u64> {
    let group = open(policy, family);
    let workers = Worker::start_many(&group, 4);
    let mut streams = Vec::new();
    for _ in 0..48 {
        until_others_sleep();
        let mut stream = connect(&group);
        ask(&mut *stream, 0);
        streams.push(stream);
    }
    let shares = group.stats().iter().take(4).map(|seat| seat.accepts).collect();
    drop(streams);
    stop(workers);
    shares
}

#[test]
fn exclusive_prefers_one_worker_and_rotate_takes_turns() {
    in_namespace(|| {
        for family in Family::ALL {
            let shares = one_after_the_other(AcceptPolicy::Exclusive, family);
            assert!(balance::jain(&shares).unwrap() < 0.75, "exclusive over {family}: {shares:?}");
            for policy in [AcceptPolicy::ROTATE, AcceptPolicy::Blocking] {
                // A blocking worker serves only its connection, so these are closed one by one.
                let shares = if policy == AcceptPolicy::Blocking {
                    closed_one_by_one(policy, family)
                } else {
                    one_after_the_other(policy, family)
                };
                assert!(balance::jain(&shares).unwrap() > 0.9, "{policy} over {family}: {shares:?}");
            }
        }
    });
}

#[test]
fn uring_oneshot_and_dispatcher_take_turns() {
    in_namespace(|| {
        let mut policies = vec![AcceptPolicy::Dispatcher];
        if is_available(AcceptPolicy::UringOneshot, "uring_oneshot_and_dispatcher_take_turns") {
            policies.push(AcceptPolicy::UringOneshot);
        }
        for policy in policies {
            for family in Family::ALL {
                let shares = one_after_the_other(policy, family);
                assert_eq!(shares.iter().sum::<u64>(), 48, "{policy} over {family}: {shares:?}");
                assert!(balance::jain(&shares).unwrap() > 0.9, "{policy} over {family}: {shares:?}");
            }
        }
    });
}

fn closed_one_by_one(policy: AcceptPolicy, family: Family) -> Vec<u64> {
    let group = open(policy, family);
    let set_timeout = |timeout| {
        for listener in group.listeners().unwrap() {
            option::set_receive_timeout(listener.as_fd(), timeout).unwrap();
        }
    };
    // After the timeout of the group a worker waits anew, behind the others; on a busy machine that is before its turn.
    set_timeout(Duration::from_secs(60));
    let workers = Worker::start_many(&group, 4);
    for _ in 0..48 {
        // A worker that has not yet read the end of its connection sleeps too.
        while sums(&group).2 > 0 {
            thread::yield_now();
        }
        until_others_sleep();
        ask(&mut *connect(&group), 0);
    }
    let shares = group.stats().iter().take(4).map(|seat| seat.accepts).collect();
    // Only a connection ends an accept(2) with the long timeout: each worker serves one more, all at the same time.
    set_timeout(Duration::from_millis(50));
    let mut streams: Vec<_> = (0..4).map(|_| connect(&group)).collect();
    for stream in &mut streams {
        ask(&mut **stream, 0);
    }
    drop(streams);
    stop(workers);
    shares
}

#[test]
fn a_kept_connection_does_not_wait_behind_a_busy_worker() {
    in_namespace(|| {
        for policy in [AcceptPolicy::SharedOneshot, AcceptPolicy::Dispatcher] {
            let group = open(policy, Family::Unix);
            let workers = Worker::start_many(&group, 2);
            let mut first = connect(&group);
            let mut second = connect(&group);
            let busy = ask(&mut *first, 0).0;
            // Both connections are served. Then one worker gets the long request, and the other worker must serve the other connection.
            ask(&mut *second, 0);
            thread::scope(|scope| {
                let (gate, work) = closed_gate();
                let first = &mut first;
                let long = scope.spawn(move || ask(&mut **first, work).0);
                gate.wait();
                let seats: Vec<u32> = (0..50).map(|_| ask(&mut *second, 0).0).collect();
                gate.open();
                let long = long.join().unwrap();
                assert!(seats.iter().all(|&seat| seat != long), "{seats:?} beside {long} ({busy})");
            });
            stop(workers);
        }
    });
}

#[test]
fn recycle_closes_after_n_requests() {
    in_namespace(|| {
        let listen = builder(AcceptPolicy::ROTATE, Family::Unix).recycle(Recycle::Requests(3));
        let group = listen.open().unwrap();
        let workers = Worker::start_many(&group, 2);
        let mut stream = connect(&group);
        assert_eq!([ask(&mut *stream, 0).1, ask(&mut *stream, 0).1, ask(&mut *stream, 0).1], [1, 2, 3]);
        let mut byte = [0];
        assert_eq!(stream.read(&mut byte).unwrap(), 0);
        stop(workers);
    });
}

#[test]
fn a_worker_that_leaves_loses_no_connection() {
    in_namespace(|| {
        for (policy, family) in everywhere("a_worker_that_leaves_loses_no_connection") {
            // A blocking worker serves only its connection.
            if policy == AcceptPolicy::Blocking {
                continue;
            }
            let group = open(policy, family);
            let leaving = Worker::start(&group);
            let mut kept: Vec<_> = (0..10).map(|_| connect(&group)).collect();
            for stream in &mut kept {
                assert_eq!(ask(&mut **stream, 0), (0, 1), "{policy} over {family}");
            }
            let staying = Worker::start(&group);
            leaving.stop();
            for stream in &mut kept {
                assert_eq!(ask(&mut **stream, 0), (1, 2), "{policy} over {family}");
            }
            // A connection that arrives while the group has no worker is queued by the listener that was left.
            staying.stop();
            if !policy.has_listener_each() {
                kept.push(connect(&group));
            }
            let last = Worker::start(&group);
            for stream in &mut kept {
                assert_eq!(ask(&mut **stream, 0).0, 0, "{policy} over {family}");
            }
            last.stop();
        }
    });
}

#[test]
fn impossible_settings_are_errors() {
    in_namespace(|| {
        let refused = builder(AcceptPolicy::Reuseport, Family::Unix).open().unwrap_err();
        assert!(refused.to_string().starts_with("reuseport is not possible over unix"), "{refused}");
        let group = ListenerGroupBuilder::at(endpoint(Family::Tcp4))
            .max_workers(1)
            .policy(AcceptPolicy::ROTATE)
            .open()
            .unwrap();
        let _acceptor = group.join().unwrap();
        assert_eq!(group.join().err().unwrap().to_string(), "all 1 seats of the group are taken");
        let taken = ListenerGroupBuilder::at(group.endpoint().clone())
            .policy(AcceptPolicy::Reuseport)
            .open()
            .unwrap_err();
        assert!(taken.to_string().contains("EADDRINUSE"), "{taken}");
        let auto = ListenerGroupBuilder::at(endpoint(Family::Tcp6)).open().unwrap();
        assert_eq!(auto.policy(), AcceptPolicy::SharedOneshot);
    });
}

#[test]
#[cfg(feature = "bpf")]
fn the_least_busy_worker_is_chosen() {
    in_namespace(|| {
        if !is_available(AcceptPolicy::ReuseportLeastBusy, "the_least_busy_worker_is_chosen") {
            return;
        }
        let group = open(AcceptPolicy::ReuseportLeastBusy, Family::Tcp4);
        let workers = Worker::start_many(&group, 3);
        thread::scope(|scope| {
            // One worker is busy for long, so the program must not choose it.
            let mut first = connect(&group);
            let busy = ask(&mut *first, 0).0;
            let (gate, work) = closed_gate();
            let long = scope.spawn(move || ask(&mut *first, work).0);
            gate.wait();
            // The connections are held, so that no end of one makes a worker busy. Each is opened when the previous worker waits again.
            let mut held = Vec::new();
            let mut seats = Vec::new();
            for _ in 0..60 {
                until_others_sleep();
                let mut stream = connect(&group);
                seats.push(ask(&mut *stream, 0).0);
                held.push(stream);
            }
            gate.open();
            assert_eq!(long.join().unwrap(), busy);
            assert!(seats.iter().all(|&seat| seat != busy), "{seats:?} beside {busy}");
        });
        stop(workers);
    });
}

#[cfg(feature = "uring")]
mod uring {
    use std::thread;
    use std::time::Duration;

    use fourtuple::listen::{AcceptPolicy, Family, ListenError, ListenerGroupBuilder};
    use fourtuple_syscalls::seccomp::{self, Facility};
    use fourtuple_testing::in_namespace;

    use crate::policies::is_available;
    use crate::{ask, builder, connect, serve};

    const DEADLINE: Option<Duration> = Some(Duration::from_secs(60));

    fn listen(family: Family) -> ListenerGroupBuilder {
        builder(AcceptPolicy::UringOneshot, family)
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
}

const DEADLINE: Option<Duration> = Some(Duration::from_secs(60));

#[test]
fn a_group_has_one_dispatcher() {
    in_namespace(|| {
        let group = builder(AcceptPolicy::ROTATE, Family::Tcp4).open().unwrap();
        let error = group.dispatcher().unwrap_err().to_string();
        assert!(
            error.starts_with("a group with rotate has no dispatcher to return: its workers accept"),
            "{error}"
        );
        let group = builder(AcceptPolicy::Dispatcher, Family::Tcp4).open().unwrap();
        let first = group.dispatcher().unwrap();
        let error = group.dispatcher().unwrap_err().to_string();
        assert!(error.ends_with("it has one already; drop that first"), "{error}");
        drop(first);
        group.dispatcher().unwrap();
    });
}

#[test]
fn the_next_dispatcher_takes_over_connections() {
    in_namespace(|| {
        let mut group = open(AcceptPolicy::Dispatcher, Family::Unix);
        let workers = Worker::start_many(&group, 2);
        let mut streams: Vec<_> = (0..5).map(|_| connect(&group)).collect();
        for stream in &mut streams {
            assert_eq!(ask(&mut **stream, 0).1, 1);
        }
        let stats = group.end_dispatcher();
        assert_eq!((stats.accepts, stats.handed, stats.lost), (5, 5, 0));
        // Connections that arrive meanwhile stay in the accept queue.
        streams.push(connect(&group));
        group.start_dispatcher();
        for stream in &mut streams {
            ask(&mut **stream, 0);
        }
        workers.into_iter().for_each(Worker::stop);
    });
}

#[test]
fn a_busy_worker_that_dies_delays_no_request() {
    in_namespace(|| {
        let group = open(AcceptPolicy::Dispatcher, Family::Unix);
        let mut dies = group.join().unwrap();
        let mut stream = connect(&group);
        stream.write_all(b"x").unwrap();
        let connection = dies.next(DEADLINE).unwrap().unwrap();
        let worker = Worker::start(&group);
        die(dies);
        drop(connection);
        for _ in 0..10 {
            assert_eq!(ask(&mut *connect(&group), 0).0, 1);
        }
        group.worker_died(0);
        let heir = Worker::start(&group);
        // The thread of the dispatcher may start late.
        let serves = (0..10_000).any(|_| {
            thread::sleep(Duration::from_millis(1));
            ask(&mut *connect(&group), 0).0 == 0
        });
        assert!(serves, "the seat's next worker was given nothing");
        heir.stop();
        worker.stop();
        remove_path(&group);
    });
}

/// The dispatcher sends each connection to a worker twice, for its request and for its end. Workers that take turns strictly
/// would be in step with this: one would get all requests.
#[test]
fn requests_are_not_in_step_with_workers() {
    in_namespace(|| {
        let group = open(AcceptPolicy::Dispatcher, Family::Unix);
        let workers = Worker::start_many(&group, 2);
        for _ in 0..400 {
            ask(&mut *connect(&group), 0);
            // The request and the end of the connection are served, and both workers wait.
            until_others_sleep();
        }
        let requests: Vec<_> = group.stats().iter().take(2).map(|seat| seat.requests).collect();
        assert!(requests.iter().all(|&requests| requests >= 40), "{requests:?}");
        workers.into_iter().for_each(Worker::stop);
    });
}

/// Ends a worker like a killed process: no destructor runs. Its memory stays reachable, so that it is not reported as a leak.
fn die(worker: Acceptor) {
    static DEAD: Mutex<Vec<Acceptor>> = Mutex::new(Vec::new());
    DEAD.lock().unwrap().push(worker);
}

/// Forgets a worker, which keeps its group open. The path of the group is removed here.
fn remove_path(group: &ListenerGroup) {
    if let Endpoint::Unix(path) = group.endpoint() {
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn an_idle_worker_that_dies_keeps_no_connection() {
    in_namespace(|| {
        let group = open(AcceptPolicy::Dispatcher, Family::Unix);
        let mut dies = group.join().unwrap();
        assert!(dies.next(Some(Duration::ZERO)).unwrap().is_none());
        die(dies);
        let mut stream = connect(&group);
        thread::scope(|scope| {
            let asks = scope.spawn(|| ask(&mut *stream, 0));
            // The dispatcher sends this request to the dead worker.
            thread::sleep(Duration::from_millis(100));
            let worker = Worker::start(&group);
            group.worker_died(0);
            assert_eq!(asks.join().unwrap(), (1, 1));
            worker.stop();
        });
        remove_path(&group);
    });
}

#[test]
fn a_connection_with_a_long_carry_stays() {
    in_namespace(|| {
        let group = open(AcceptPolicy::Dispatcher, Family::Unix);
        let mut acceptor = group.join().unwrap();
        let mut stream = connect(&group);
        stream.write_all(b"x").unwrap();
        let read = |connection: &mut Connection| {
            let mut byte = [0];
            connection.read_exact(&mut byte).unwrap();
        };
        for carry in [60_000, 1_000_000] {
            let mut connection = acceptor.next(DEADLINE).unwrap().unwrap();
            read(&mut connection);
            connection.carry = vec![b'y'; carry];
            connection.mark = 7;
            acceptor.keep(connection).unwrap();
            assert!(acceptor.next(Some(Duration::ZERO)).unwrap().is_none());
            stream.write_all(b"x").unwrap();
            let connection = acceptor.next(DEADLINE).unwrap().unwrap();
            assert_eq!((connection.carry.len(), connection.mark), (carry, 7));
            acceptor.keep(connection).unwrap();
        }
        // Other connections are served meanwhile.
        let mut other = connect(&group);
        thread::scope(|scope| {
            let asks = scope.spawn(|| ask(&mut *other, 0));
            loop {
                let connection = acceptor.next(DEADLINE).unwrap().unwrap();
                if connection.mark == 7 {
                    continue; // closed
                }
                serve(&mut acceptor, connection);
                break;
            }
            // The worker returns a kept connection with its next call of `next`.
            acceptor.next(Some(Duration::ZERO)).unwrap();
            assert_eq!(asks.join().unwrap(), (0, 1));
        });
    });
}

#[test]
fn depth_bounds_the_connections_of_a_worker() {
    in_namespace(|| {
        let group = open(AcceptPolicy::Dispatcher, Family::Tcp4);
        let mut first = group.join().unwrap();
        let mut streams: Vec<_> = (0..3).map(|_| connect(&group)).collect();
        for stream in &mut streams {
            stream.write_all(&0_u32.to_ne_bytes()).unwrap();
        }
        let held = first.next(DEADLINE).unwrap().unwrap();
        // The first worker is busy, so the second worker gets every further connection.
        let second = Worker::start(&group);
        let mut answers = 0;
        let mut last = connect(&group);
        assert_eq!(ask(&mut *last, 0).0, 1);
        serve(&mut first, held);
        drop(first);
        for stream in &mut streams {
            let mut answer = [0; 8];
            stream.read_exact(&mut answer).unwrap();
            answers += u32::from(answer[..4] == 1_u32.to_ne_bytes());
        }
        assert_eq!(answers, 2);
        second.stop();
    });
}
