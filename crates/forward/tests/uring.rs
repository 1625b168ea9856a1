//! Behaviour specific to planes with io_uring: exhausted buffers, packets in the ring of a leaving plane, and hosts that forbid
//! io_uring.

mod kinds;

use std::collections::HashSet;
use std::net::UdpSocket;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_forward::{Forward, ForwardError, Link, PlaneKind, Running};
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_testing::in_namespace;
use kinds::kinds;

/// A time limit that no working machine reaches.
const LONG: Duration = Duration::from_secs(60);
/// The number of packets in a burst: more than a ring has buffers, fewer than a receive queue holds.
const PACKETS: u32 = 150;

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

/// Starts planes that spend `work` on each packet, so that more packets than ring buffers wait for them.
fn start(target: &UdpSocket, planes: usize, work: Duration) -> Running {
    let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
    Forward { kind: PlaneKind::Uring, work, ..Forward::new(link, planes) }.start().unwrap()
}

/// Checks that `packets` packets arrived, each once.
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
        // The forwarder also ends while packets wait for buffers.
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
fn a_leaving_plane_forwards_the_packets_in_its_ring() {
    in_namespace(|| {
        if !kinds("no_packet_is_lost_that_is_in_the_ring").contains(&PlaneKind::Uring) {
            return;
        }
        let (sender, target) = (socket(), socket());
        let mut running = start(&target, 2, Duration::from_micros(100));
        // All packets have one 4-tuple, so one plane receives all of them.
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
        // A plane that ends with packets in its ring forwards them; packets in the receive queue stay with the socket.
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
fn missing_permission_fails_before_a_socket_opens() {
    in_namespace(|| {
        // The filter applies to a separate thread, since it cannot be removed.
        let refused = thread::spawn(|| {
            seccomp::refuse(Facility::IoUring).unwrap();
            let there = "127.0.0.1:9".parse().unwrap();
            // No device has this address; bind() would fail next.
            let forward = Forward::new(Link::new("192.0.2.1:0".parse().unwrap(), there), 1);
            Forward { kind: PlaneKind::Uring, ..forward }.start().unwrap_err()
        });
        let error = refused.join().unwrap();
        let is_named = matches!(error, ForwardError::NotPermitted { kind: PlaneKind::Uring, .. });
        assert!(is_named, "{error:?}");
        let text = error.to_string();
        assert!(text.starts_with("uring is not permitted here: io_uring_setup(): EPERM ("), "{text}");
    });
}
