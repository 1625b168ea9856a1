//! Workers come and go under load, and no request notices.

use std::collections::VecDeque;
use std::env;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple::listen::{Family, Group, Listen, Policy, Workers};
use fourtuple_testing::in_namespace;

use crate::policies::everywhere;
use crate::pool::{Worker, connect, endpoint, open, try_ask};

/// A worker joins, another drains and leaves, so often; FOURTUPLE_RELOADS asks for more.
fn reloads() -> u32 {
    env::var("FOURTUPLE_RELOADS").map_or(100, |count| count.parse().expect("FOURTUPLE_RELOADS is a number"))
}

/// What clients had while they asked without a pause: answers, and requests that failed.
struct Seen {
    answers: u64,
    failures: Vec<String>,
}

/// Four clients: two of them open a connection per request, two keep theirs for a while.
fn under_load(group: &Group, reload: impl FnOnce()) -> Seen {
    let stop = AtomicBool::new(false);
    let answers = AtomicU64::new(0);
    thread::scope(|scope| {
        let client = |requests: u32| {
            let (stop, answers) = (&stop, &answers);
            scope.spawn(move || {
                while !stop.load(Ordering::Acquire) {
                    let mut stream = connect(group);
                    for number in 1..=requests {
                        match try_ask(&mut *stream, 0) {
                            Ok(_) => answers.fetch_add(1, Ordering::Relaxed),
                            Err(error) => return Some(format!("request {number} of {requests}: {error}")),
                        };
                        if requests > 1 {
                            thread::sleep(Duration::from_micros(200));
                        }
                    }
                    // TIME_WAIT is theirs who close: not so fast that the ports run out.
                    thread::sleep(Duration::from_micros(500));
                }
                None
            })
        };
        let clients = [client(1), client(1), client(50), client(50)];
        reload();
        stop.store(true, Ordering::Release);
        let failures = clients.into_iter().filter_map(|client| client.join().unwrap()).collect();
        Seen { answers: answers.load(Ordering::Relaxed), failures }
    })
}

fn reload_again_and_again(policy: Policy, family: Family) {
    let group = open(policy, family);
    let mut workers: VecDeque<Worker> = Worker::start_many(&group, 3).into();
    let seen = under_load(&group, || {
        for _ in 0..reloads() {
            workers.push_back(Worker::start(&group));
            workers.pop_front().expect("three or four").stop();
        }
    });
    workers.into_iter().for_each(Worker::stop);
    assert_eq!(seen.failures, Vec::<String>::new(), "{policy} over {family}, after {} answers", seen.answers);
    let requests: u64 = group.stats().iter().map(|seat| seat.requests).sum();
    assert_eq!(requests, seen.answers, "{policy} over {family}");
    eprintln!("{policy} over {family}: {} reloads, {} answers, no failure", reloads(), seen.answers);
}

#[test]
fn reloads_lose_nobody() {
    in_namespace(|| {
        // A worker that blocks leaves when its connection ends, and others do not serve that.
        let reloadable =
            |(policy, family): &(Policy, Family)| *policy != Policy::Blocking && *family != Family::Tcp6;
        for (policy, family) in everywhere("reloads_lose_nobody").filter(reloadable) {
            reload_again_and_again(policy, family);
        }
    });
}

#[test]
fn processes_leave_their_queue_to_the_kernel_where_it_moves_it() {
    in_namespace(|| {
        // Of this namespace alone. Absent before Linux 5.14: then the listener is handed over.
        let _ = std::fs::write("/proc/sys/net/ipv4/tcp_migrate_req", "1");
        let listen = Listen::at(endpoint(Family::Tcp4)).policy(Policy::Reuseport);
        let group = listen.workers(Workers::Processes).open().unwrap();
        let leaving = group.join().unwrap();
        let mut waiting: Vec<_> = (0..5).map(|_| connect(&group)).collect();
        let mut staying = group.join().unwrap();
        leaving.leave().unwrap();
        for stream in &mut waiting {
            stream.write_all(b"x").unwrap();
        }
        let mut served = Vec::new();
        while served.len() < waiting.len() {
            served.extend(staying.next(None).unwrap());
        }
        assert_eq!(group.stats()[1].accepts, 5);
    });
}
