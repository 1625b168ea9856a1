//! Packets through real planes, in a separate namespace.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use crate::kinds::kinds;
use fourtuple::spread::{FlowKey, Selector};
use fourtuple_forward::{Drop, Forward, ForwardError, Link, PlaneKind, Routes, Rule, Running};
use fourtuple_testing::in_namespace;

const LOCALHOSTS: [&str; 2] = ["127.0.0.1:0", "[::1]:0"];
/// A time limit that no working machine reaches.
const LONG: Duration = Duration::from_secs(60);

fn socket(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind(address).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

fn any() -> SocketAddr {
    LOCALHOSTS[0].parse().unwrap()
}

fn start(link: Link, kind: PlaneKind, planes: usize) -> Running {
    Forward { kind, ..Forward::new(link, planes) }.start().unwrap()
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
    let mut room = vec![0; 65_536];
    let group = (64 * 1024 / bytes as u32).clamp(1, 32);
    for packet in 0..packets {
        let mut payload = vec![0xa5; bytes.max(4)];
        payload[..4].copy_from_slice(&packet.to_be_bytes());
        sender.send_to(&payload, to).unwrap();
        if packet % group == group - 1 || packet + 1 == packets {
            while got.len() <= packet as usize {
                let length = target.recv(&mut room).unwrap();
                assert_eq!(length, payload.len());
                assert!(room[4..length].iter().all(|byte| *byte == 0xa5));
                got.push(u32::from_be_bytes(room[..4].try_into().unwrap()));
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
            let mut room = vec![0; 65_536];
            for bytes in [0, 1, 0, 3] {
                sender.send_to(&vec![1; bytes], to).unwrap();
                assert_eq!(target.recv(&mut room).unwrap(), bytes, "{kind}");
            }
            // The packet has the maximum length of UDP over IPv4. A batched plane has room for jumbo frames only, and counts it as
            // truncated.
            sender.send_to(&vec![1; 65_507], to).unwrap();
            if kind != PlaneKind::Batched {
                assert_eq!(target.recv(&mut room).unwrap(), 65_507, "{kind}");
            }
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
                let mut room = [0; 100];
                for round in 0..3_u8 {
                    for (number, client) in clients.iter().enumerate() {
                        client.send_to(&[number as u8, round], running.address(0).unwrap()).unwrap();
                        let (length, from) = target.recv_from(&mut room).unwrap();
                        target.send_to(&room[..length], from).unwrap();
                    }
                    for (number, client) in clients.iter().enumerate() {
                        let (length, from) = client.recv_from(&mut room).unwrap();
                        assert_eq!(&room[..length], &[number as u8, round]);
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
        let mut room = [0; 100];
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
                assert_eq!(socket.recv(&mut room).unwrap(), 1);
                assert_eq!(room[0], number, "{kind}");
            }
            running.set_routes(0, Routes::to(to_other)).unwrap();
            sender.send_to(&[1], to).unwrap();
            assert_eq!(other.recv(&mut room).unwrap(), 1);
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
            assert_eq!(at.recv(&mut room).unwrap(), 1, "{address}");
        }
    });
}

#[test]
fn new_routes_can_be_the_first_by_destination() {
    in_namespace(|| {
        let (one, other) = (socket(LOCALHOSTS[0]), socket(LOCALHOSTS[0]));
        let (to_one, to_other) = (one.local_addr().unwrap(), other.local_addr().unwrap());
        let mut room = [0; 100];
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
                        at.recv(&mut room).unwrap_or_else(|error| panic!("{kind} {address}: {error}"));
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
            for _ in 0..10 {
                sender.send_to(b"x", running.address(0).unwrap()).unwrap();
                until(|| running.counts(0)[0].received > 0);
            }
            let counts = running.drain().unwrap().remove(0).remove(0);
            assert_eq!(counts.received, 10);
            assert_eq!(counts.sent + counts.dropped_in_all(), 10, "{kind} {counts:?}");
            // A namespace with only loopback has no route to this next hop.
            let running = start(Link::new(any(), "192.0.2.1:9".parse().unwrap()), kind, 1);
            sender.send_to(b"x", running.address(0).unwrap()).unwrap();
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

fn until(mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < end, "not within {LONG:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
