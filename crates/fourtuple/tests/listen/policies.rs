use std::thread;
use std::time::Duration;

use fourtuple::listen::{Family, Group, Listen, ListenError, Policy, Recycle, Workers};
use fourtuple_measure::balance;
use fourtuple_testing::in_namespace;

use crate::pool::{Worker, ask, closed_gate, connect, endpoint, has_uring, open};

fn stop(workers: Vec<Worker>) {
    workers.into_iter().for_each(Worker::stop);
}

fn sums(group: &Group) -> (u64, u64, u64) {
    group.stats().iter().fold((0, 0, 0), |(accepts, requests, open), seat| {
        (accepts + seat.accepts, requests + seat.requests, open.wrapping_add(seat.open))
    })
}

/// Whether the kernel lets us load a BPF program; if not, what is left out is said aloud, or a failure.
#[cfg(feature = "bpf")]
pub(crate) fn can_choose(test: &str) -> bool {
    let listen = Listen::at(endpoint(Family::Tcp4)).policy(Policy::ReuseportLeastBusy);
    match listen.open() {
        Ok(_) => true,
        Err(error @ (ListenError::NotPermitted { .. } | ListenError::Absent { .. })) => {
            fourtuple_testing::skip(test, "bpf", &error.to_string());
            false
        }
        Err(error) => panic!("{error}"),
    }
}

#[cfg(not(feature = "bpf"))]
fn can_choose(_test: &str) -> bool {
    let refused = Listen::at(endpoint(Family::Tcp4)).policy(Policy::ReuseportLeastBusy).open().unwrap_err();
    assert!(matches!(refused, ListenError::NotBuilt { .. }), "{refused}");
    false
}

/// Policies that this machine can do, with the families they go with.
pub(crate) fn everywhere(test: &str) -> impl Iterator<Item = (Policy, Family)> {
    let uring = has_uring(test).then_some(Policy::UringOneshot);
    let policies = [
        Policy::Exclusive,
        Policy::Plain,
        Policy::Blocking,
        Policy::ROTATE,
        Policy::SharedOneshot,
        Policy::Reuseport,
        Policy::Dispatcher,
    ];
    let least_busy = can_choose(test).then_some(Policy::ReuseportLeastBusy);
    policies
        .into_iter()
        .chain(least_busy)
        .chain(uring)
        .flat_map(|policy| Family::ALL.map(|family| (policy, family)))
        .filter(|(policy, family)| policy.check(*family, Workers::Threads).is_ok())
}

#[test]
fn every_request_is_answered_whoever_serves() {
    in_namespace(|| {
        for (policy, family) in everywhere("every_request_is_answered_whoever_serves") {
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
            // The ends of some may not have been read yet; nobody is counted twice.
            assert!(open <= 9, "{policy} over {family}: {open} open");
        }
    });
}

/// Connections one after the other, each when all workers wait again; kept open.
fn one_after_the_other(policy: Policy, family: Family) -> Vec<u64> {
    let group = open(policy, family);
    let workers = Worker::start_many(&group, 4);
    thread::sleep(Duration::from_millis(100));
    let mut streams = Vec::new();
    for _ in 0..48 {
        let mut stream = connect(&group);
        ask(&mut *stream, 0);
        streams.push(stream);
        thread::sleep(Duration::from_millis(2));
    }
    let shares = group.stats().iter().take(4).map(|seat| seat.accepts).collect();
    drop(streams);
    stop(workers);
    shares
}

#[test]
fn exclusive_is_a_ladder_and_rotate_and_blocking_take_turns() {
    in_namespace(|| {
        for family in Family::ALL {
            let shares = one_after_the_other(Policy::Exclusive, family);
            assert!(balance::jain(&shares).unwrap() < 0.75, "exclusive over {family}: {shares:?}");
            for policy in [Policy::ROTATE, Policy::Blocking] {
                // A blocking worker is its connection's while that is open: these are closed one by one.
                let shares = if policy == Policy::Blocking {
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
fn one_shot_accepts_of_io_uring_and_a_dispatcher_take_turns() {
    in_namespace(|| {
        let mut policies = vec![Policy::Dispatcher];
        if has_uring("one_shot_accepts_of_io_uring_and_a_dispatcher_take_turns") {
            policies.push(Policy::UringOneshot);
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

fn closed_one_by_one(policy: Policy, family: Family) -> Vec<u64> {
    let group = open(policy, family);
    let workers = Worker::start_many(&group, 4);
    for _ in 0..48 {
        thread::sleep(Duration::from_millis(4));
        ask(&mut *connect(&group), 0);
    }
    stop(workers);
    group.stats().iter().take(4).map(|seat| seat.accepts).collect()
}

#[test]
fn a_kept_connection_does_not_wait_behind_a_busy_worker() {
    in_namespace(|| {
        for policy in [Policy::SharedOneshot, Policy::Dispatcher] {
            let group = open(policy, Family::Unix);
            let workers = Worker::start_many(&group, 2);
            let mut first = connect(&group);
            let mut second = connect(&group);
            let busy = ask(&mut *first, 0).0;
            // Both were served by somebody; now whoever gets the long request, the other serves the other connection.
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
fn connections_are_closed_after_so_many_requests() {
    in_namespace(|| {
        let listen = Listen::at(endpoint(Family::Unix)).policy(Policy::ROTATE).recycle(Recycle::Requests(3));
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
fn who_leaves_loses_nobody() {
    in_namespace(|| {
        for (policy, family) in everywhere("who_leaves_loses_nobody") {
            // Its worker is one connection's alone.
            if policy == Policy::Blocking {
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
            // Also whoever comes while nobody is there: over the listener that was left behind.
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
fn what_cannot_be_is_an_error() {
    in_namespace(|| {
        let refused = Listen::at(endpoint(Family::Unix)).policy(Policy::Reuseport).open().unwrap_err();
        assert!(refused.to_string().starts_with("reuseport is not possible over unix"), "{refused}");
        let group = Listen::at(endpoint(Family::Tcp4)).seats(1).policy(Policy::ROTATE).open().unwrap();
        let _acceptor = group.join().unwrap();
        assert_eq!(group.join().err().unwrap().to_string(), "all 1 seats of the group are taken");
        let taken = Listen::at(group.endpoint().clone()).policy(Policy::Reuseport).open().unwrap_err();
        assert!(taken.to_string().contains("EADDRINUSE"), "{taken}");
        let auto = Listen::at(endpoint(Family::Tcp6)).open().unwrap();
        assert_eq!(auto.policy(), Policy::SharedOneshot);
    });
}

#[test]
#[cfg(feature = "bpf")]
fn the_least_busy_worker_is_chosen() {
    in_namespace(|| {
        if !can_choose("the_least_busy_worker_is_chosen") {
            return;
        }
        let group = open(Policy::ReuseportLeastBusy, Family::Tcp4);
        let workers = Worker::start_many(&group, 3);
        thread::scope(|scope| {
            // One worker is busy for long: nobody else may be sent there.
            let mut first = connect(&group);
            let busy = ask(&mut *first, 0).0;
            let (gate, work) = closed_gate();
            let long = scope.spawn(move || ask(&mut *first, work).0);
            gate.wait();
            // Held, so that no end of one makes a worker busy; and each when the worker of the one before waits again.
            let mut held = Vec::new();
            let mut seats = Vec::new();
            for _ in 0..60 {
                let before = group.stats();
                let mut stream = connect(&group);
                let seat = ask(&mut *stream, 0).0;
                let rests = || group.stats()[seat as usize].busy > before[seat as usize].busy;
                while seat != busy && !rests() {
                    thread::yield_now();
                }
                held.push(stream);
                seats.push(seat);
            }
            gate.open();
            assert_eq!(long.join().unwrap(), busy);
            assert!(seats.iter().all(|&seat| seat != busy), "{seats:?} beside {busy}");
        });
        stop(workers);
    });
}
