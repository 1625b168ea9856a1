//! Connections that the server closes where the measurement favours it.

use std::iter;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::listen::{AcceptPolicy, BreakEven, Family, ListenerGroup, ListenerGroupBuilder, Recycle};
use fourtuple_testing::{StopOnDrop, in_namespace};

use crate::policies::is_available;
use crate::pool::{Worker, connect, endpoint, try_ask};

fn open(policy: AcceptPolicy) -> ListenerGroup {
    let listen = ListenerGroupBuilder::at(endpoint(Family::Unix)).policy(policy).seats(16);
    listen.recycle(Recycle::Measured).open().unwrap()
}

/// Runs clients that reconnect when they are closed, until `enough`, and returns the measurement that was enough. One request in
/// `long_every` takes 20 ms.
fn load(
    group: &ListenerGroup,
    clients: u32,
    long_every: u32,
    pause: Duration,
    enough: fn(&BreakEven) -> bool,
) -> BreakEven {
    let workers = Worker::start_many(group, 4);
    let over = AtomicBool::new(false);
    let found = thread::scope(|scope| {
        let _over = StopOnDrop(&over);
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
        // If the condition never holds, the caller's assertion fails.
        loop {
            let found = group.break_even().unwrap();
            if enough(&found) || begun.elapsed() >= Duration::from_secs(60) {
                break found;
            }
            thread::sleep(Duration::from_millis(1));
        }
    });
    workers.into_iter().for_each(Worker::stop);
    found
}

#[test]
fn measured_closes_connections_that_wait() {
    in_namespace(|| {
        let uring = is_available(AcceptPolicy::UringOneshot, "measured_closes_connections_that_wait");
        for policy in [AcceptPolicy::Exclusive].into_iter().chain(uring.then_some(AcceptPolicy::UringOneshot))
        {
            let found = load(&open(policy), 16, 8, Duration::ZERO, |found| found.closes);
            assert!(found.closes, "{policy}: {found}");
            assert!(found.misplaced_wait > found.fresh_connection, "{policy}: {found}");
        }
    });
}

/// Runs one client and workers that sleep before each request. While other tests load the host a request may really wait; an
/// error of the measurement would appear in every group until the deadline.
fn keeps(policy: AcceptPolicy) {
    let enough = |found: &BreakEven| found.samples >= 400 || found.closes;
    let once = || load(&open(policy), 1, u32::MAX, Duration::from_millis(1), enough);
    let begun = Instant::now();
    let mut groups = iter::from_fn(|| (begun.elapsed() < Duration::from_secs(120)).then(once));
    let kept = groups.find(|found| !found.closes);
    assert!(kept.is_some_and(|found| found.samples >= 400), "{policy}: {kept:?}");
}

#[test]
fn kept_connections_that_do_not_wait_are_kept() {
    in_namespace(|| {
        let enough = |found: &BreakEven| found.samples >= 400 || found.closes;
        keeps(AcceptPolicy::Exclusive);
        if is_available(AcceptPolicy::UringOneshot, "kept_connections_that_do_not_wait_are_kept") {
            keeps(AcceptPolicy::UringOneshot);
        }
        // Any idle worker serves the next request, so closing gains nothing, however long requests take.
        let found = load(&open(AcceptPolicy::SharedOneshot), 16, 8, Duration::ZERO, enough);
        assert!(!found.closes && found.samples >= 400 && found.misplaced_wait.is_zero(), "{found}");
        let kept = ListenerGroupBuilder::at(endpoint(Family::Tcp4)).open().unwrap();
        assert_eq!(kept.break_even(), None);
    });
}
