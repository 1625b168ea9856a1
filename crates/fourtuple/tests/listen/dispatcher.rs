use std::fs;
use std::io::{Read, Write};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use fourtuple::listen::{
    AcceptPolicy, Acceptor, Connection, Endpoint, Family, ListenerGroup, ListenerGroupBuilder,
};
use fourtuple_testing::in_namespace;
use fourtuple_testing::threads::until_others_sleep;

use crate::pool::{Worker, ask, connect, endpoint, open, serve};

const DEADLINE: Option<Duration> = Some(Duration::from_secs(60));

#[test]
fn a_group_has_one_dispatcher() {
    in_namespace(|| {
        let group =
            ListenerGroupBuilder::at(endpoint(Family::Tcp4)).policy(AcceptPolicy::ROTATE).open().unwrap();
        let error = group.dispatcher().unwrap_err().to_string();
        assert!(
            error.starts_with("a group with rotate has no dispatcher to return: its workers accept"),
            "{error}"
        );
        let group =
            ListenerGroupBuilder::at(endpoint(Family::Tcp4)).policy(AcceptPolicy::Dispatcher).open().unwrap();
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
