//! Workers join and leave under load, and no request fails.

use std::collections::VecDeque;
use std::env;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use fourtuple::listen::{AcceptPolicy, Family, ListenerGroup, ListenerGroupBuilder, Workers};
use fourtuple_testing::{StopOnDrop, in_namespace};

use crate::policies::everywhere;
use crate::pool::{Worker, connect, endpoint, open, try_ask};

/// Returns how often a worker joins while another one leaves; FOURTUPLE_RELOADS overrides it.
fn reloads() -> u32 {
    env::var("FOURTUPLE_RELOADS").map_or(100, |count| count.parse().expect("FOURTUPLE_RELOADS is a number"))
}

/// The outcome of the clients: answers, and failed requests.
struct ClientOutcome {
    answers: u64,
    failures: Vec<String>,
}

/// Runs four clients: two open a connection per request, and two keep a connection for several requests.
fn under_load(group: &ListenerGroup, reload: impl FnOnce()) -> ClientOutcome {
    let stop = AtomicBool::new(false);
    let answers = AtomicU64::new(0);
    thread::scope(|scope| {
        let stopping = StopOnDrop(&stop);
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
                    // The client closes first and gets the TIME_WAIT socket; the pause prevents that ports run out.
                    thread::sleep(Duration::from_micros(500));
                }
                None
            })
        };
        let clients = [client(1), client(1), client(50), client(50)];
        reload();
        drop(stopping);
        let failures = clients.into_iter().filter_map(|client| client.join().unwrap()).collect();
        ClientOutcome { answers: answers.load(Ordering::Relaxed), failures }
    })
}

fn reload_again_and_again(policy: AcceptPolicy, family: Family) {
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
fn reloads_lose_no_request() {
    in_namespace(|| {
        // A worker with `blocking` leaves when its connection ends, and no other worker serves that connection.
        let reloadable = |(policy, family): &(AcceptPolicy, Family)| {
            *policy != AcceptPolicy::Blocking && *family != Family::Tcp6
        };
        for (policy, family) in everywhere("reloads_lose_no_request").filter(reloadable) {
            reload_again_and_again(policy, family);
        }
    });
}

#[test]
fn processes_use_tcp_migrate_req() {
    in_namespace(|| {
        // The sysctl belongs to this namespace. It is absent before Linux 5.14; the listener is then handed over.
        let _ = std::fs::write("/proc/sys/net/ipv4/tcp_migrate_req", "1");
        let listen = ListenerGroupBuilder::at(endpoint(Family::Tcp4)).policy(AcceptPolicy::Reuseport);
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
