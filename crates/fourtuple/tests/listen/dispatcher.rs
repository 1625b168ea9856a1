use std::fs;
use std::io::{Read, Write};
use std::thread;
use std::time::Duration;

use fourtuple::listen::{Connection, Endpoint, Family, Group, Listen, Policy};
use fourtuple_testing::in_namespace;

use crate::pool::{Worker, ask, connect, endpoint, open, serve};

const DEADLINE: Option<Duration> = Some(Duration::from_secs(60));

#[test]
fn there_is_one_and_only_with_its_policy() {
    in_namespace(|| {
        let group = Listen::at(endpoint(Family::Tcp4)).policy(Policy::ROTATE).open().unwrap();
        let error = group.dispatcher().unwrap_err().to_string();
        assert!(error.starts_with("a group with rotate gives no dispatcher: its workers accept"), "{error}");
        let group = Listen::at(endpoint(Family::Tcp4)).policy(Policy::Dispatcher).open().unwrap();
        let first = group.dispatcher().unwrap();
        let error = group.dispatcher().unwrap_err().to_string();
        assert!(error.ends_with("it has one already; drop that first"), "{error}");
        drop(first);
        group.dispatcher().unwrap();
    });
}

#[test]
fn the_next_dispatcher_takes_over() {
    in_namespace(|| {
        let mut group = open(Policy::Dispatcher, Family::Unix);
        let workers = Worker::start_many(&group, 2);
        let mut streams: Vec<_> = (0..5).map(|_| connect(&group)).collect();
        for stream in &mut streams {
            assert_eq!(ask(&mut **stream, 0).1, 1);
        }
        let stats = group.end_dispatcher();
        assert_eq!((stats.accepts, stats.handed, stats.lost), (5, 5, 0));
        // Whoever comes meanwhile stays in the listener's queue.
        streams.push(connect(&group));
        group.start_dispatcher();
        for stream in &mut streams {
            ask(&mut **stream, 0);
        }
        workers.into_iter().for_each(Worker::stop);
    });
}

#[test]
fn a_worker_that_dies_at_work_is_in_nobodys_way() {
    in_namespace(|| {
        let group = open(Policy::Dispatcher, Family::Unix);
        let mut dies = group.join().unwrap();
        let mut stream = connect(&group);
        stream.write_all(b"x").unwrap();
        let connection = dies.next(DEADLINE).unwrap().unwrap();
        let worker = Worker::start(&group);
        // As a process that is killed: nobody hears of it.
        std::mem::forget(dies);
        drop(connection);
        for _ in 0..10 {
            assert_eq!(ask(&mut *connect(&group), 0).0, 1);
        }
        group.vacate(0);
        let heir = Worker::start(&group);
        // The thread may take its time to begin.
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

/// A worker that is forgotten keeps its group open, and so its path.
fn remove_path(group: &Group) {
    if let Endpoint::Unix(path) = group.endpoint() {
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn a_worker_that_dies_idle_keeps_nobody() {
    in_namespace(|| {
        let group = open(Policy::Dispatcher, Family::Unix);
        let mut dies = group.join().unwrap();
        assert!(dies.next(Some(Duration::ZERO)).unwrap().is_none());
        std::mem::forget(dies);
        let mut stream = connect(&group);
        thread::scope(|scope| {
            let asks = scope.spawn(|| ask(&mut *stream, 0));
            // So that it is given to the one that is no more.
            thread::sleep(Duration::from_millis(100));
            let worker = Worker::start(&group);
            group.vacate(0);
            assert_eq!(asks.join().unwrap(), (1, 1));
            worker.stop();
        });
        remove_path(&group);
    });
}

#[test]
fn what_cannot_travel_stays_with_its_worker() {
    in_namespace(|| {
        let group = open(Policy::Dispatcher, Family::Unix);
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
        // Others are not kept out by it.
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
            // What is kept goes back with the next question.
            acceptor.next(Some(Duration::ZERO)).unwrap();
            assert_eq!(asks.join().unwrap(), (0, 1));
        });
    });
}

#[test]
fn a_worker_has_no_more_than_it_was_allowed() {
    in_namespace(|| {
        let group = open(Policy::Dispatcher, Family::Tcp4);
        let mut first = group.join().unwrap();
        let mut streams: Vec<_> = (0..3).map(|_| connect(&group)).collect();
        for stream in &mut streams {
            stream.write_all(&0_u32.to_ne_bytes()).unwrap();
        }
        let held = first.next(DEADLINE).unwrap().unwrap();
        // It is busy: everybody else is for the one that is not.
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
