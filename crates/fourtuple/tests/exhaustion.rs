//! Exhaustion of ports in its four forms: the error is right, and no descriptor leaks. Exhaustion of descriptors: a worker still gets
//! its connection. The binary has no other tests, because these count and take the descriptors of the whole process.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::dial::{DialError, Dialer, Sharing, SourcePool, Strategy, UdpDialer};
use fourtuple::listen::{AcceptPolicy, ListenerGroupBuilder};
use fourtuple_testing::process::until_others_sleep;
use fourtuple_testing::{StopOnDrop, connect, in_namespace, listener, open_descriptors, set_sysctl};

/// Held by the test that runs.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn every_form_of_exhaustion_is_named_and_leaks_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 64);
        let sources = SourcePool::one("127.0.0.2".parse().unwrap());
        let tcp = |strategy| {
            Dialer::builder(destination).sources(sources.clone()).strategy(strategy).build().unwrap()
        };
        let dialers = [tcp(Strategy::KernelDefault), tcp(Strategy::Auto), tcp(Strategy::SELECT_TEST_REPEAT)];
        let streams: Vec<_> = (0..8).map(|_| dialers[1].dial().unwrap()).collect();
        let udp = |sharing| UdpDialer::new(destination, None, sharing).unwrap();
        let (exclusive, shared) = (udp(Sharing::Exclusive), udp(Sharing::Shared));
        let sockets: Vec<_> = (0..8).map(|_| exclusive.dial().unwrap()).collect();
        let before = open_descriptors();
        for _ in 0..100 {
            for dialer in &dialers {
                match dialer.dial() {
                    Err(DialError::PortsExhausted { census: Ok(census), source_address, .. }) => {
                        assert_eq!(census.established, 8);
                        assert_eq!(source_address, Some("127.0.0.2".parse().unwrap()));
                    }
                    other => panic!("{other:?}"),
                }
            }
            for dialer in [&exclusive, &shared] {
                assert!(matches!(dialer.dial(), Err(DialError::PortsExhausted { .. })));
            }
        }
        assert_eq!(open_descriptors(), before);
        let text = dialers[0].dial().unwrap_err().to_string();
        assert!(text.contains("of 8 ports 8 are established, 0 in TIME_WAIT, 0 otherwise held"), "{text}");
        drop((streams, sockets));
    });
}

/// Takes all descriptors that the process may still open.
fn all_descriptors(of: impl AsFd) -> Vec<OwnedFd> {
    std::iter::from_fn(|| of.as_fd().try_clone_to_owned().ok()).collect()
}

/// The dispatcher has sent connections to two workers that have not received them yet, and gets one back, while the process has no
/// free descriptor.
#[test]
fn no_descriptor_is_free_and_no_connection_is_lost() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    in_namespace(|| {
        let address: std::net::SocketAddr = "127.0.0.1:4000".parse().unwrap();
        let group =
            ListenerGroupBuilder::at(address).policy(AcceptPolicy::Dispatcher).max_workers(2).open().unwrap();
        let mut dispatcher = group.dispatcher().unwrap();
        let mut workers = [group.join().unwrap(), group.join().unwrap()];
        for worker in &mut workers {
            assert!(
                worker.next(Some(Duration::from_millis(1))).unwrap().is_none(),
                "it has reported that it is idle"
            );
        }
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let waker = dispatcher.waker();
            let running = scope.spawn(|| dispatcher.run(&stop).map(|()| dispatcher.stats()));
            // None is in a handshake when the dispatcher sleeps.
            let mut clients = [(); 3].map(|()| connect(address));
            for client in &mut clients {
                client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                client.write_all(b"x").unwrap();
            }
            let held;
            {
                let _stop = StopOnDrop(&stop);
                // Two connections are in messages to the workers; the dispatcher holds the third.
                until_others_sleep();
                held = all_descriptors(&clients[0]);
                for round in 0..3 {
                    let worker = &mut workers[round % 2];
                    let mut connection = worker
                        .next(Some(Duration::from_secs(60)))
                        .unwrap()
                        .unwrap_or_else(|| panic!("round {round}: {:?}", group.stats()));
                    assert_eq!(connection.read(&mut [0]).unwrap(), 1);
                    connection.write_all(b"y").unwrap();
                    connection.response_sent();
                    worker.keep(connection).unwrap();
                }
                for client in &mut clients {
                    client.read_exact(&mut [0]).unwrap();
                }
            }
            waker.wake();
            let stats = running.join().unwrap().unwrap();
            assert_eq!((stats.accepts, stats.lost), (3, 0));
            drop(held);
        });
    });
}

/// Each policy pauses for 10 ms after accept(2) found no descriptor.
#[test]
fn accept_without_descriptors_does_not_spin() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    in_namespace(|| {
        let accepts_itself = |policy: &AcceptPolicy| *policy != AcceptPolicy::Dispatcher;
        for policy in AcceptPolicy::ALL.into_iter().filter(accepts_itself) {
            let address: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
            // Other tests report the policies that this host does not permit.
            let Ok(group) = ListenerGroupBuilder::at(address).policy(policy).open() else { continue };
            let mut worker = group.join().unwrap();
            assert!(worker.next(Some(Duration::from_millis(1))).unwrap().is_none());
            let mut client = connect(group.endpoint().inet().unwrap());
            client.write_all(b"x").unwrap();
            let held = all_descriptors(&client);
            let begun = Instant::now();
            assert!(worker.next(Some(Duration::from_millis(100))).unwrap().is_none(), "{policy}");
            let pauses = begun.elapsed().as_millis() as u64 / 10;
            let failed = worker.stats().out_of_process_descriptors;
            assert!((1..pauses + 2).contains(&failed), "{policy}: {failed} in {pauses} pauses");
            drop(held);
            assert!(worker.next(Some(Duration::from_secs(60))).unwrap().is_some(), "{policy}");
        }
    });
}
