//! Packets through real planes, in a separate namespace.

use std::collections::HashSet;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::spread::{FlowKey, Selector};
use fourtuple_forward::{Drop, Forward, ForwardError, Link, PlaneKind, Routes, Rule, Running};
use fourtuple_syscalls::option;
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::in_namespace;
use fourtuple_testing::stream::{self, LONG, Stream};

use crate::kinds::kinds;
use crate::{socket, start, until};

const LOCALHOSTS: [&str; 2] = ["127.0.0.1:0", "[::1]:0"];

fn any() -> SocketAddr {
    LOCALHOSTS[0].parse().unwrap()
}

/// Sends `packets` packets in groups that fit into a receive queue, and returns their numbers as received at `target`.
fn through(
    running: &Running,
    sender: &UdpSocket,
    target: &UdpSocket,
    packets: u32,
    bytes: usize,
) -> Vec<u32> {
    let to = running.address(0).unwrap();
    let mut got = Vec::new();
    let mut buffer = vec![0; 65_536];
    let group = (64 * 1024 / bytes as u32).clamp(1, 32);
    for packet in 0..packets {
        let mut payload = vec![0xa5; bytes.max(4)];
        payload[..4].copy_from_slice(&packet.to_be_bytes());
        sender.send_to(&payload, to).unwrap();
        if packet % group == group - 1 || packet + 1 == packets {
            while got.len() <= packet as usize {
                let length = target.recv(&mut buffer).unwrap();
                assert_eq!(length, payload.len());
                assert!(buffer[4..length].iter().all(|byte| *byte == 0xa5));
                got.push(u32::from_be_bytes(buffer[..4].try_into().unwrap()));
            }
        }
    }
    got
}

#[test]
fn every_plane_forwards_packets() {
    in_namespace(|| {
        for kind in kinds("every_plane_forwards_packets") {
            for address in LOCALHOSTS {
                let (sender, target) = (socket(address), socket(address));
                let link = Link::new(address.parse().unwrap(), target.local_addr().unwrap());
                let running = start(link, kind, 1);
                for bytes in [4, 64, 1400, 9000] {
                    let got = through(&running, &sender, &target, 200, bytes);
                    assert!(got.is_sorted(), "{kind} {address} {bytes}");
                }
                let counts = running.drain().unwrap().remove(0).remove(0);
                assert_eq!((counts.received, counts.sent), (800, 800), "{kind} {address}");
                assert_eq!(counts.sent_bytes, 200 * (4 + 64 + 1400 + 9000), "{kind} {address}");
                assert_eq!(counts.dropped_in_all(), 0, "{kind} {address}");
            }
        }
    });
}

#[test]
fn one_tuple_keeps_all_planes_busy() {
    in_namespace(|| {
        for kind in kinds("one_tuple_keeps_all_planes_busy") {
            let (sender, target) = (socket(LOCALHOSTS[0]), socket(LOCALHOSTS[0]));
            let mut link = Link::new(any(), target.local_addr().unwrap());
            link.spread = Selector::Key(FlowKey::whole(0, 4));
            let running = start(link, kind, 4);
            let mut got = through(&running, &sender, &target, 400, 64);
            got.sort_unstable();
            assert!(got.into_iter().eq(0..400), "{kind}");
            let planes = running.drain().unwrap().remove(0);
            assert!(planes.iter().all(|plane| plane.received == 100), "{kind} {planes:?}");
        }
    });
}

#[test]
fn empty_and_large_datagrams_are_forwarded() {
    in_namespace(|| {
        for kind in kinds("empty_and_large_datagrams_are_forwarded") {
            let (sender, target) = (socket(LOCALHOSTS[0]), socket(LOCALHOSTS[0]));
            let running = start(Link::new(any(), target.local_addr().unwrap()), kind, 1);
            let to = running.address(0).unwrap();
            let mut buffer = vec![0; 65_536];
            for bytes in [0, 1, 0, 3] {
                sender.send_to(&vec![1; bytes], to).unwrap();
                assert_eq!(target.recv(&mut buffer).unwrap(), bytes, "{kind}");
            }
            // The packet has the maximum length of UDP over IPv4. A batched plane has buffers for jumbo frames only, and counts it as
            // truncated.
            sender.send_to(&vec![1; 65_507], to).unwrap();
            if kind != PlaneKind::Batched {
                assert_eq!(target.recv(&mut buffer).unwrap(), 65_507, "{kind}");
            }
            // The kernel may deliver the last packet after a drain.
            until(|| running.counts(0)[0].received == 5);
            let counts = running.drain().unwrap().remove(0).remove(0);
            let truncated = u64::from(kind == PlaneKind::Batched);
            assert_eq!(counts.received, 5, "{kind}");
            assert_eq!(counts.sent, 5 - truncated, "{kind}");
            assert_eq!(counts.dropped, [(Drop::Truncated, 1)][..truncated as usize], "{kind}");
        }
    });
}

#[test]
fn replies_return_to_their_client() {
    in_namespace(|| {
        for kind in kinds("replies_return_to_their_client") {
            for address in LOCALHOSTS {
                let target = socket(address);
                let mut link = Link::new(address.parse().unwrap(), target.local_addr().unwrap());
                link.replies = true;
                let running = start(link, kind, 2);
                let clients: Vec<_> = (0..20).map(|_| socket(address)).collect();
                let mut buffer = [0; 100];
                // Of a new client the plane loses a reply that comes two ticks late, of one that has sent two packets none.
                for client in &clients {
                    for _ in 0..2 {
                        client.send_to(b"?", running.address(0).unwrap()).unwrap();
                    }
                    for _ in 0..2 {
                        assert_eq!(target.recv(&mut buffer).unwrap(), 1, "{kind}");
                    }
                }
                for round in 0..3_u8 {
                    for (number, client) in clients.iter().enumerate() {
                        client.send_to(&[number as u8, round], running.address(0).unwrap()).unwrap();
                        let (length, from) = target.recv_from(&mut buffer).unwrap();
                        target.send_to(&buffer[..length], from).unwrap();
                    }
                    for (number, client) in clients.iter().enumerate() {
                        let (length, from) = client.recv_from(&mut buffer).unwrap();
                        assert_eq!(&buffer[..length], &[number as u8, round]);
                        assert_eq!(from, running.address(0).unwrap(), "{kind}");
                    }
                }
                let planes = running.drain().unwrap().remove(0);
                assert_eq!(planes.iter().map(|plane| plane.returned).sum::<u64>(), 60);
                assert_eq!(planes.iter().map(|plane| plane.clients).sum::<u64>(), 20);
            }
        }
    });
}

#[test]
fn routes_by_key_or_destination_can_be_replaced() {
    in_namespace(|| {
        let (one, other) = (socket(LOCALHOSTS[0]), socket(LOCALHOSTS[0]));
        let (to_one, to_other) = (one.local_addr().unwrap(), other.local_addr().unwrap());
        let mut buffer = [0; 100];
        for kind in kinds("routes_by_key_or_destination_can_be_replaced") {
            let sender = socket(LOCALHOSTS[0]);
            let key = Some(FlowKey::whole(0, 1));
            let mut link = Link::new(any(), to_one);
            link.routes = Routes::new(None, &[Rule::Key(1, to_one), Rule::Key(2, to_other)], key).unwrap();
            let running = start(link, kind, 1);
            let to = running.address(0).unwrap();
            for number in [1, 2, 3, 1, 2] {
                sender.send_to(&[number], to).unwrap();
            }
            for (socket, number) in [(&one, 1), (&other, 2), (&one, 1), (&other, 2)] {
                assert_eq!(socket.recv(&mut buffer).unwrap(), 1);
                assert_eq!(buffer[0], number, "{kind}");
            }
            running.set_routes(0, Routes::to(to_other)).unwrap();
            sender.send_to(&[1], to).unwrap();
            assert_eq!(other.recv(&mut buffer).unwrap(), 1);
            let counts = running.drain().unwrap().remove(0).remove(0);
            assert_eq!(counts.dropped, [(Drop::NoRoute, 1)], "{kind}");
        }
        let mut link = Link::new("0.0.0.0:0".parse().unwrap(), to_one);
        let rules = [Rule::Destination("127.0.0.8/32".parse().unwrap(), to_other)];
        link.routes = Routes::new(Some(to_one), &rules, None).unwrap();
        let running = start(link, PlaneKind::Offload, 1);
        let port = running.address(0).unwrap().port();
        let sender = socket(LOCALHOSTS[0]);
        for (address, at) in [("127.0.0.8", &other), ("127.0.0.9", &one)] {
            sender.send_to(b"x", (address, port)).unwrap();
            assert_eq!(at.recv(&mut buffer).unwrap(), 1, "{address}");
        }
    });
}

#[test]
fn new_routes_can_be_the_first_by_destination() {
    in_namespace(|| {
        let (one, other) = (socket(LOCALHOSTS[0]), socket(LOCALHOSTS[0]));
        let (to_one, to_other) = (one.local_addr().unwrap(), other.local_addr().unwrap());
        let mut buffer = [0; 100];
        for kind in kinds("new_routes_can_be_the_first_by_destination") {
            let running = start(Link::new("0.0.0.0:0".parse().unwrap(), to_one), kind, 2);
            let port = running.address(0).unwrap().port();
            let rules = [Rule::Destination("127.0.0.8/32".parse().unwrap(), to_other)];
            running.set_routes(0, Routes::new(Some(to_one), &rules, None).unwrap()).unwrap();
            // Several senders ensure that both planes get packets.
            for sender in (0..8).map(|_| socket(LOCALHOSTS[0])) {
                for (address, at) in [("127.0.0.8", &other), ("127.0.0.9", &one)] {
                    sender.send_to(b"x", (address, port)).unwrap();
                    let length =
                        at.recv(&mut buffer).unwrap_or_else(|error| panic!("{kind} {address}: {error}"));
                    assert_eq!(length, 1, "{kind} {address}");
                }
            }
        }
    });
}

#[test]
fn an_absent_next_hop_is_counted() {
    in_namespace(|| {
        for kind in kinds("an_absent_next_hop_is_counted") {
            let running = start(Link::new(any(), "127.0.0.1:9".parse().unwrap()), kind, 1);
            let sender = socket(LOCALHOSTS[0]);
            for packets in 1..=10 {
                sender.send_to(b"x", running.address(0).unwrap()).unwrap();
                until(|| running.counts(0)[0].received == packets);
            }
            let counts = running.drain().unwrap().remove(0).remove(0);
            assert_eq!(counts.received, 10);
            assert_eq!(counts.sent + counts.dropped_in_all(), 10, "{kind} {counts:?}");
            // A namespace with only loopback has no route to this next hop.
            let running = start(Link::new(any(), "192.0.2.1:9".parse().unwrap()), kind, 1);
            sender.send_to(b"x", running.address(0).unwrap()).unwrap();
            until(|| running.counts(0)[0].received == 1);
            let counts = running.drain().unwrap().remove(0).remove(0);
            assert_eq!(counts.dropped, [(Drop::Unreachable, 1)], "{kind}");
        }
    });
}

#[test]
fn a_loop_is_refused() {
    in_namespace(|| {
        let here: SocketAddr = "127.0.0.1:4000".parse().unwrap();
        let refused = Forward::new(Link::new(here, here), 1).start();
        assert!(matches!(refused, Err(ForwardError::Loop { .. })));
        let everywhere = Link::new("0.0.0.0:4000".parse().unwrap(), here);
        assert!(matches!(Forward::new(everywhere, 1).start(), Err(ForwardError::Loop { .. })));
        let nothing = Forward { links: Vec::new(), ..Forward::new(Link::new(here, any()), 1) };
        assert!(matches!(nothing.start(), Err(ForwardError::Nothing { .. })));
    });
}

fn changes() -> usize {
    let number = std::env::var("FOURTUPLE_PLANE_CHANGES").ok();
    number.map_or(20, |number| number.parse().expect("FOURTUPLE_PLANE_CHANGES is a number"))
}

#[test]
fn no_packet_is_lost_when_planes_come_and_go() {
    in_namespace(|| {
        for kind in kinds("no_packet_is_lost_when_planes_come_and_go") {
            for replies in [false, true] {
                let mut stream = Stream::new(replies);
                let mut link = Link::new("127.0.0.1:0".parse().unwrap(), stream.target());
                link.spread = Selector::Key(FlowKey::whole(0, 4));
                link.replies = replies;
                let mut running = Forward { kind, ..Forward::new(link, 3) }.start().unwrap();
                let sent = stream.run(running.address(0).unwrap(), || {
                    for change in 0..changes() {
                        running.leave(change % 3).unwrap();
                        assert_eq!(running.at_work().len(), 2);
                        running.join().unwrap();
                        assert_eq!(running.at_work(), [0, 1, 2]);
                    }
                    running.check().unwrap();
                });
                let planes = running.drain().unwrap().remove(0);
                let received: u64 = planes.iter().map(|plane| plane.received).sum();
                assert_eq!(received, sent, "{kind}");
                assert!(planes.iter().all(|plane| plane.dropped.is_empty()), "{kind} {planes:?}");
            }
        }
    });
}

#[test]
fn the_last_plane_stays_and_a_join_needs_a_socket() {
    in_namespace(|| {
        let target = stream::socket();
        let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
        let mut running = Forward::new(link, 2).start().unwrap();
        assert!(matches!(running.join(), Err(ForwardError::NoSeat { planes: 2 })));
        running.leave(0).unwrap();
        assert!(matches!(running.leave(0), Err(ForwardError::NoPlane { plane: 0 })));
        assert!(matches!(running.leave(1), Err(ForwardError::NoPlane { plane: 1 })));
        assert_eq!(running.join().unwrap(), 0);
    });
}

const ADDRESSES: [&str; 4] = ["127.0.0.1:4000", "0.0.0.0:4000", "[::1]:4000", "[::]:4000"];

fn forward(listen: &str) -> Forward {
    Forward::new(Link::new(listen.parse().unwrap(), "127.0.0.1:1".parse().unwrap()), 2)
}

fn shared_socket(address: &str) -> UdpSocket {
    let address: SocketAddr = address.parse().unwrap();
    let socket = socket::open(Transport::Udp, address, false).unwrap();
    let _ = option::set_reuse_port(socket.as_fd()).unwrap();
    socket::bind(socket.as_fd(), address).unwrap();
    socket.into()
}

fn share_only_when_asked(listen: &str) {
    let first = forward(listen).start().unwrap();
    let error = forward(listen).start().unwrap_err();
    assert!(matches!(error, ForwardError::Taken { .. }), "{listen}: {error}");
    assert!(error.to_string().contains(listen), "{error}");
    assert!(!error.is_usage());
    drop(Forward { share: true, ..forward(listen) }.start().unwrap());
    drop(first);
    drop(forward(listen).start().unwrap());
}

#[test]
fn two_forwarders_share_an_address_only_when_asked() {
    in_namespace(|| ADDRESSES.into_iter().for_each(share_only_when_asked));
}

/// A bind(2) without SO_REUSEPORT then finds the sockets of the other forwarder.
#[test]
fn without_sock_diag_forwarders_share_only_when_asked() {
    in_namespace(|| {
        seccomp::refuse(Facility::SocketDiag).unwrap();
        ADDRESSES.into_iter().for_each(share_only_when_asked);
        // The only socket at port 4001 is at another address.
        let _other = shared_socket("127.0.0.2:4001");
        drop(forward("127.0.0.1:4001").start().unwrap());
    });
}

#[test]
fn sockets_at_other_addresses_are_not_in_the_way() {
    in_namespace(|| {
        let _others =
            [shared_socket("0.0.0.0:4000"), shared_socket("127.0.0.2:4000"), shared_socket("127.0.0.1:4001")];
        drop(forward("127.0.0.1:4000").start().unwrap());
        let _one = shared_socket("127.0.0.1:4000");
        let mut with_selector = forward("127.0.0.1:4000");
        with_selector.links[0].spread = Selector::Random;
        assert!(matches!(with_selector.start(), Err(ForwardError::Taken { .. })));
    });
}

/// The number of packets in a burst: more than a ring has buffers, fewer than a receive queue holds.
const PACKETS: u32 = 150;

/// Starts planes that spend `work` on each packet, so that more packets than ring buffers wait for them.
fn start_busy(target: &UdpSocket, planes: usize, work: Duration) -> Running {
    let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
    Forward { kind: PlaneKind::Uring, work, ..Forward::new(link, planes) }.start().unwrap()
}

/// Checks that `packets` packets arrived, each once.
fn require_all(target: &UdpSocket, packets: u32) {
    let mut got = HashSet::new();
    let mut buffer = [0; 100];
    while got.len() < packets as usize {
        let length = target.recv(&mut buffer).expect("a packet that was sent comes out");
        assert!(got.insert(u32::from_be_bytes(buffer[..length].try_into().unwrap())), "a packet came twice");
    }
    assert!((0..packets).all(|number| got.contains(&number)));
}

#[test]
fn no_packet_is_lost_when_there_are_fewer_buffers() {
    in_namespace(|| {
        if !kinds("no_packet_is_lost_when_there_are_fewer_buffers").contains(&PlaneKind::Uring) {
            return;
        }
        let (sender, target) = (socket(LOCALHOSTS[0]), socket(LOCALHOSTS[0]));
        // The forwarder also ends while packets wait for buffers.
        for ends_early in [false, true] {
            let running = start_busy(&target, 1, Duration::from_micros(100));
            for number in 0..PACKETS {
                sender.send_to(&number.to_be_bytes(), running.address(0).unwrap()).unwrap();
            }
            // A drain does not wait for packets that the kernel has not delivered.
            stream::Loopback::open().flush();
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
        if !kinds("a_leaving_plane_forwards_the_packets_in_its_ring").contains(&PlaneKind::Uring) {
            return;
        }
        let (sender, target) = (socket(LOCALHOSTS[0]), socket(LOCALHOSTS[0]));
        let mut running = start_busy(&target, 2, Duration::from_micros(100));
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
        stream::Loopback::open().flush();
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
