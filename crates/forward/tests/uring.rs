//! What only planes with io_uring have: buffers that run out, packets in a ring that goes, hosts that refuse it.

mod kinds;

use std::collections::HashSet;
use std::net::UdpSocket;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_forward::{Forward, ForwardError, Link, PlaneKind, Running};
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_testing::in_namespace;
use kinds::kinds;

/// Nothing takes as long on a machine that works.
const LONG: Duration = Duration::from_secs(20);
/// More than a ring has buffers, fewer than a queue has room for.
const PACKETS: u32 = 150;

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

/// Planes that take so long for a packet that more than a ring has buffers wait for them.
fn start(target: &UdpSocket, planes: usize, work: Duration) -> Running {
    let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
    Forward { kind: PlaneKind::Uring, work, ..Forward::new(link, planes) }.start().unwrap()
}

/// So many of those sent came, each once.
fn require_all(target: &UdpSocket, packets: u32) {
    let mut got = HashSet::new();
    let mut room = [0; 100];
    while got.len() < packets as usize {
        let length = target.recv(&mut room).expect("a packet that was sent comes out");
        assert!(got.insert(u32::from_be_bytes(room[..length].try_into().unwrap())), "a packet came twice");
    }
    assert!((0..packets).all(|number| got.contains(&number)));
}

#[test]
fn no_packet_is_lost_when_there_are_fewer_buffers() {
    in_namespace(|| {
        if !kinds("no_packet_is_lost_when_there_are_fewer_buffers").contains(&PlaneKind::Uring) {
            return;
        }
        let (sender, target) = (socket(), socket());
        // Also when it ends while they wait.
        for ends_early in [false, true] {
            let running = start(&target, 1, Duration::from_micros(100));
            for number in 0..PACKETS {
                sender.send_to(&number.to_be_bytes(), running.address(0).unwrap()).unwrap();
            }
            if !ends_early {
                require_all(&target, PACKETS);
            }
            let counts = running.drain().unwrap().remove(0).remove(0);
            if ends_early {
                require_all(&target, PACKETS);
            }
            assert_eq!((counts.received, counts.sent), (PACKETS.into(), PACKETS.into()));
            assert_eq!(counts.dropped_in_all(), 0);
        }
    });
}

#[test]
fn no_packet_is_lost_that_is_in_the_ring_of_a_plane_that_leaves() {
    in_namespace(|| {
        if !kinds("no_packet_is_lost_that_is_in_the_ring").contains(&PlaneKind::Uring) {
            return;
        }
        let (sender, target) = (socket(), socket());
        let mut running = start(&target, 2, Duration::from_micros(100));
        // All packets have one 4-tuple: one of the planes has them all.
        let mut sent = 0;
        let send = |running: &Running, sent: &mut u32| {
            for _ in 0..PACKETS {
                sender.send_to(&sent.to_be_bytes(), running.address(0).unwrap()).unwrap();
                *sent += 1;
            }
        };
        send(&running, &mut sent);
        let begun = Instant::now();
        let plane = loop {
            let counts = running.counts(0);
            if let Some(plane) = counts.iter().position(|plane| plane.received > 0) {
                break plane;
            }
            assert!(begun.elapsed() < LONG, "{counts:?}");
        };
        running.leave(plane).unwrap();
        assert_eq!(running.join().unwrap(), plane);
        require_all(&target, sent);
        // Ended with packets in its ring, it sends these on, and what waits in the queue goes with the socket.
        sent = 0;
        send(&running, &mut sent);
        for _ in 0..5 {
            running.leave(plane).unwrap();
            running.join().unwrap();
        }
        let planes = running.drain().unwrap().remove(0);
        require_all(&target, sent);
        assert_eq!(planes.iter().map(|plane| plane.received).sum::<u64>(), u64::from(2 * PACKETS));
        assert!(planes.iter().all(|plane| plane.dropped.is_empty()), "{planes:?}");
    });
}

#[test]
fn without_permission_it_says_so_before_there_is_a_socket() {
    in_namespace(|| {
        // On a thread of its own: there is no way back.
        let refused = thread::spawn(|| {
            seccomp::refuse(Facility::IoUring).unwrap();
            let there = "127.0.0.1:9".parse().unwrap();
            // This address is nobody's here, which would be said next.
            let forward = Forward::new(Link::new("192.0.2.1:0".parse().unwrap(), there), 1);
            Forward { kind: PlaneKind::Uring, ..forward }.start().unwrap_err()
        });
        let error = refused.join().unwrap();
        let is_named = matches!(error, ForwardError::NotPermitted { kind: PlaneKind::Uring, .. });
        assert!(is_named, "{error:?}");
        let said = error.to_string();
        assert!(said.starts_with("uring is not permitted here: io_uring_setup(): EPERM ("), "{said}");
    });
}
