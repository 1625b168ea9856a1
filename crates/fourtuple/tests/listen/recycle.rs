//! Connections that are closed where it is measured to be better.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::listen::{BreakEven, Family, Group, Listen, Policy, Recycle};
use fourtuple_testing::in_namespace;

use crate::pool::{Worker, connect, endpoint, has_uring, try_ask};

fn open(policy: Policy) -> Group {
    let listen = Listen::at(endpoint(Family::Unix)).policy(policy).seats(16);
    listen.recycle(Recycle::Measured).open().unwrap()
}

/// Clients that connect again when they are closed, until `enough`; of the requests of each one in `long_every` takes 20 ms.
fn load(
    group: &Group,
    clients: u32,
    long_every: u32,
    pause: Duration,
    enough: fn(&BreakEven) -> bool,
) -> BreakEven {
    let workers = Worker::start_many(group, 4);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for client in 0..clients {
            let over = &over;
            scope.spawn(move || {
                let mut stream = connect(group);
                let mut number = client;
                while !over.load(Ordering::Relaxed) {
                    number += 1;
                    let work = if number.is_multiple_of(long_every) { 20_000 } else { 0 };
                    if try_ask(&mut *stream, work).is_err() {
                        stream = connect(group);
                    }
                    thread::sleep(pause);
                }
            });
        }
        let begun = Instant::now();
        // Where it never comes to pass the caller's assertion says so.
        while !enough(&group.break_even().unwrap()) && begun.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(1));
        }
        over.store(true, Ordering::Relaxed);
    });
    let found = group.break_even().unwrap();
    workers.into_iter().for_each(Worker::stop);
    found
}

#[test]
fn kept_connections_that_wait_behind_a_busy_worker_are_closed() {
    in_namespace(|| {
        let uring = has_uring("kept_connections_that_wait_behind_a_busy_worker_are_closed");
        for policy in [Policy::Exclusive].into_iter().chain(uring.then_some(Policy::UringOneshot)) {
            let found = load(&open(policy), 16, 8, Duration::ZERO, |found| found.closes);
            assert!(found.closes, "{policy}: {found}");
            assert!(found.misplaced_wait > found.fresh_connection, "{policy}: {found}");
        }
    });
}

/// One client, and a worker that sleeps whenever it asks. Where processors are late it may wait in truth; a mistake would find
/// that in every group.
fn keeps(policy: Policy) {
    let enough = |found: &BreakEven| found.samples >= 400 || found.closes;
    let once = || load(&open(policy), 1, u32::MAX, Duration::from_millis(1), enough);
    let kept = (0..10).map(|_| once()).find(|found| !found.closes);
    assert!(kept.is_some_and(|found| found.samples >= 400), "{policy}: {kept:?}");
}

#[test]
fn kept_connections_that_do_not_wait_are_kept() {
    in_namespace(|| {
        let enough = |found: &BreakEven| found.samples >= 400 || found.closes;
        keeps(Policy::Exclusive);
        if has_uring("kept_connections_that_do_not_wait_are_kept") {
            keeps(Policy::UringOneshot);
        }
        // Whoever is idle serves whoever waits: there is nothing to be gained by closing, however long requests take.
        let found = load(&open(Policy::SharedOneshot), 16, 8, Duration::ZERO, enough);
        assert!(!found.closes && found.samples >= 400 && found.misplaced_wait.is_zero(), "{found}");
        let kept = Listen::at(endpoint(Family::Tcp4)).open().unwrap();
        assert_eq!(kept.break_even(), None);
    });
}
