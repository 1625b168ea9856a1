//! Failures around a forwarder: each is counted, and later packets are forwarded.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::spread::FlowKey;
use fourtuple_forward::bfd::{self, Diagnostic, LinkSettings, State, Timers};
use fourtuple_forward::{
    Drop, Forward, ForwardError, Link, Peer, PlaneCounts, PlaneKind, Routes, Rule, Running,
};
use fourtuple_syscalls::datagram::{Batch, Outgoing};
use fourtuple_syscalls::socket::{self, Transport, bind, connect, open_raw_icmp, send, wait_readable};
use fourtuple_syscalls::{device, netns, option};
use fourtuple_testing::stream::{LONG, Loopback};
use fourtuple_testing::wire::{FAR, FAR_V4, FAR_V6, NEAR, NEAR_V4, Wire};
use fourtuple_testing::{each_in_namespace, in_namespace, skip};

use crate::flood::Flood;
use crate::{is_up, kinds, session, socket, start, until, wait_until};

/// Returns all plane kinds that this machine supports.
fn kinds() -> impl Iterator<Item = PlaneKind> {
    kinds::kinds("robust").into_iter()
}

/// Drains the forwarder and returns the counters of its only plane for its only link.
fn drain(running: Running) -> PlaneCounts {
    running.drain().unwrap().remove(0).remove(0)
}

/// Checks that the counters account for every packet.
fn require_balance(counts: &PlaneCounts, what: &str) {
    // No plane receives these.
    let is_received = |reason: &Drop| !matches!(reason, Drop::Overflow | Drop::Checksum);
    let dropped: u64 =
        counts.dropped.iter().filter(|(reason, _)| is_received(reason)).map(|(_, number)| number).sum();
    assert_eq!(counts.received, counts.sent + dropped, "{what}: {counts:?}");
}

/// Sends `packets` packets of `bytes` bytes as one message, which the kernel segments before it reaches a socket without
/// UDP_GRO.
fn burst(sender: &UdpSocket, to: SocketAddr, packets: usize, bytes: usize) {
    let mut batch = Batch::new(1, packets * bytes);
    batch.room_mut(0).fill(0xa5);
    let mut outgoing = Outgoing::new();
    outgoing.message(Some(to), Some(bytes as u16));
    outgoing.part(0, 0..packets * bytes);
    assert_eq!(outgoing.send(sender.as_fd(), &batch, 0).unwrap(), 1);
}

/// Opens a socket with UDP_GRO, which receives the packets of one message together.
fn gathering_socket(address: SocketAddr) -> UdpSocket {
    let socket = socket(address);
    let _ = option::set_udp_gro(socket.as_fd(), true).unwrap();
    socket
}

/// Sends until a packet arrives. Kernel workers make devices and addresses usable some time after their creation
/// (`linkwatch_event`, `addrconf_dad_work`), and earlier packets are lost.
fn reach(there: &UdpSocket) {
    let to = there.local_addr().unwrap();
    let from = socket(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" });
    there.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    // A call that fails now may succeed at the next attempt.
    until(|| from.send_to(b"?", to).is_ok() && there.recv(&mut [0; 10]).is_ok());
}

/// Receives `packets` packets of `bytes` bytes at a [`gathering_socket`]. Returns whether some of them came as one message.
fn take(target: &UdpSocket, packets: usize, bytes: usize) -> bool {
    let mut batch = Batch::new(1, 65_536);
    let (mut got, mut is_one) = (0, false);
    while got < packets {
        assert!(wait_readable(target.as_fd(), Some(LONG)).unwrap(), "{got} of {packets}");
        batch.receive(target.as_fd()).unwrap();
        for datagram in batch.iter() {
            assert_eq!(datagram.bytes.len() % bytes, 0, "{:?}", datagram.segment);
            assert!(datagram.bytes.iter().all(|byte| *byte == 0xa5));
            got += datagram.bytes.len() / bytes;
            is_one |= datagram.bytes.len() > bytes;
        }
    }
    assert_eq!(got, packets);
    is_one
}

/// Opens a socket at an address that a link also listens at.
fn beside(address: SocketAddr) -> UdpSocket {
    let socket = socket::open(Transport::Udp, address, false).unwrap();
    let _ = option::set_reuse_port(socket.as_fd()).unwrap();
    socket::bind(socket.as_fd(), address).unwrap();
    socket.into()
}

fn link(listen: &str, to: SocketAddr) -> Link {
    Link { replies: true, ..Link::new(listen.parse().unwrap(), to) }
}

#[test]
fn a_next_hop_is_not_a_client() {
    in_namespace(|| {
        let mut buffer = [0; 10];
        // With a wildcard listener of IPv6, an IPv4 hop has an IPv4-mapped source address.
        for (listen, own) in
            [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "[::1]"), ("[::]:0", "[::1]"), ("[::]:0", "127.0.0.1")]
        {
            let bind = format!("{own}:0");
            let (client, hop) = (socket(&bind), socket(&bind));
            let to = hop.local_addr().unwrap();
            for kind in kinds() {
                let what = format!("{kind} at {listen}, hop {to}");
                let running = start(link(listen, to), kind, 1);
                let entry = SocketAddr::new(to.ip(), running.address(0).unwrap().port());
                hop.send_to(b"x", entry).unwrap();
                // A client that has sent one packet is closed after two ticks, perhaps before the drain.
                for _ in 0..2 {
                    client.send_to(b"yy", entry).unwrap();
                }
                for _ in 0..2 {
                    assert_eq!(hop.recv(&mut buffer).unwrap(), 2, "{what}: only the client's arrive");
                }
                // On a busy machine the packet of the hop may arrive after those of the client.
                until(|| !running.counts(0)[0].dropped.is_empty());
                let counts = drain(running);
                require_balance(&counts, &what);
                let dropped: Vec<_> =
                    counts.dropped.iter().map(|(why, packets)| (why.name(), *packets)).collect();
                assert_eq!((dropped, counts.clients), (vec![("circulating", 1)], 1), "{what}");
            }
        }
    });
}

/// If a link listens at the wildcard address, every address of the host with the link's port belongs to the forwarder.
#[test]
fn an_address_that_a_link_listens_at_is_not_a_client() {
    in_namespace(|| {
        device::add_address("lo", "192.0.2.7".parse().unwrap(), 32).unwrap();
        device::add_address("lo", "2001:db8::7".parse().unwrap(), 128).unwrap();
        reach(&socket("[2001:db8::7]:0"));
        let target = socket("127.0.0.1:0");
        let to = target.local_addr().unwrap();
        let mut buffer = [0; 10];
        for (listen, source, entry, honest) in [
            ("0.0.0.0:4000", "127.9.9.9:4000", "127.0.0.1:4000", "127.0.0.1:0"),
            ("0.0.0.0:4000", "192.0.2.7:4000", "127.0.0.1:4000", "127.0.0.1:0"),
            ("[::]:4000", "[::1]:4000", "[2001:db8::7]:4000", "[::1]:0"),
            ("[::]:4000", "127.9.9.9:4000", "127.0.0.1:4000", "127.0.0.1:0"),
            // The source is the address of the second link.
            ("127.0.0.1:4000", "127.0.0.1:4001", "127.0.0.1:4000", "127.0.0.1:0"),
        ] {
            let links = vec![link(listen, to), link("127.0.0.1:4001", to)];
            let forward = Forward { kind: PlaneKind::Batched, links, ..Forward::new(link(listen, to), 1) };
            let running = forward.start().unwrap();
            let (entry, source): (SocketAddr, SocketAddr) = (entry.parse().unwrap(), source.parse().unwrap());
            let impostor = beside(source);
            impostor.send_to(b"x", entry).unwrap();
            socket(honest).send_to(b"yy", entry).unwrap();
            assert_eq!(target.recv(&mut buffer).unwrap(), 2, "{source} at {listen}");
            // On a busy machine the impostor's packet may arrive after the honest one.
            until(|| !running.counts(0)[0].dropped.is_empty());
            let counts = running.drain().unwrap().remove(0).remove(0);
            let dropped: Vec<_> =
                counts.dropped.iter().map(|(why, packets)| (why.name(), *packets)).collect();
            assert_eq!(dropped, [("circulating", 1)], "{source} at {listen}");
        }
    });
}

/// A client whose address becomes a next hop stops being a client.
#[test]
fn new_routes_end_clients_that_are_next_hops_now() {
    in_namespace(|| {
        let (client, hop) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let link = Link { idle: 10 * LONG, ..link("127.0.0.1:0", hop.local_addr().unwrap()) };
        let running = start(link, PlaneKind::Batched, 1);
        // A client that has sent one packet is closed after two ticks in any case.
        for _ in 0..2 {
            client.send_to(b"x", running.address(0).unwrap()).unwrap();
        }
        for _ in 0..2 {
            assert_eq!(hop.recv(&mut [0; 10]).unwrap(), 1);
        }
        running.set_routes(0, Routes::to(client.local_addr().unwrap())).unwrap();
        until(|| running.counts(0)[0].clients == 0);
    });
}

/// ICMP type "destination unreachable", followed by some of its codes.
const UNREACHABLE: u8 = 3;

const PROTOCOL: u8 = 2;
const PORT: u8 = 3;
const TOO_LONG: u8 = 4;
const FILTERED: u8 = 13;
const UDP: u8 = 17;

/// Opens a raw socket that sends ICMP messages from `here` to `sender`. Needs CAP_NET_RAW, which the test's namespace grants.
fn router(here: IpAddr, sender: IpAddr) -> OwnedFd {
    let router = open_raw_icmp().unwrap();
    bind(router.as_fd(), SocketAddr::new(here, 0)).unwrap();
    connect(router.as_fd(), SocketAddr::new(sender, 0)).unwrap();
    router
}

fn octets(address: SocketAddr) -> [u8; 4] {
    let SocketAddr::V4(address) = address else { panic!("{address} is not of IPv4") };
    address.ip().octets()
}

/// Sends an ICMP error `code` for a packet from `from` to `to`, with the next hop's MTU.
fn send_icmp_error(router: &OwnedFd, code: u8, mtu: u16, from: SocketAddr, to: SocketAddr) {
    let mut message = vec![UNREACHABLE, code, 0, 0, 0, 0];
    message.extend(mtu.to_be_bytes());
    // The ICMP message quotes the packet: the IPv4 header (20 bytes) with a total length of 28, and the UDP header (8 bytes).
    message.extend([0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, UDP, 0, 0]);
    message.extend([octets(from), octets(to)].concat());
    message.extend([from.port(), to.port(), 8, 0].iter().flat_map(|word| word.to_be_bytes()));
    let sum: u32 = message.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    assert_eq!(send(router.as_fd(), &message).unwrap(), message.len());
}

/// The kernel reports the ICMP error at the next send. The plane counts the error and still forwards that packet.
#[test]
fn an_icmp_error_drops_no_later_packet() {
    in_namespace(|| {
        let router = router(Ipv4Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into());
        for kind in kinds() {
            for replies in [false, true] {
                for (code, reason) in [
                    (PORT, Drop::Refused),
                    (FILTERED, Drop::Unreachable),
                    (TOO_LONG, Drop::TooLong),
                    (PROTOCOL, Drop::Other),
                ] {
                    let what = format!("{kind}, code {code}, with replies: {replies}");
                    let (sender, target) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
                    let mut link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
                    link.replies = replies;
                    let running = start(link, kind, 1);
                    let mut packets = 0;
                    let mut pass = || {
                        sender.send_to(b"x", running.address(0).unwrap()).unwrap();
                        packets += 1;
                        let (length, from) = target.recv_from(&mut [0; 10]).expect(&what);
                        assert_eq!(length, 1, "{what}");
                        from
                    };
                    // The socket of a client with one packet is closed after two ticks, perhaps before the error arrives.
                    pass();
                    for complaints in 1..=3 {
                        send_icmp_error(&router, code, 1500, pass(), target.local_addr().unwrap());
                        // With replies the plane polls the socket for the error. Without replies it sees the error at the next
                        // send.
                        until(|| {
                            if !replies {
                                pass();
                            }
                            running.counts(0)[0].dropped == [(reason, complaints)]
                        });
                    }
                    let counts = drain(running);
                    require_balance(&counts, &what);
                    assert_eq!((counts.received, counts.sent), (packets, packets - 3), "{what}");
                    assert_eq!((counts.failed_later, counts.sent_bytes), (3, packets), "{what}");
                }
            }
        }
    });
}

/// A link on the path has a smaller MTU than the link to the next router.
#[test]
fn a_smaller_path_mtu_is_learnt() {
    const BYTES: usize = 1400;
    in_namespace(|| {
        let Some(wire) = Wire::open("icmp::a_smaller_path_mtu_is_learnt") else { return };
        device::leave_checksums(NEAR, true).unwrap();
        let router = wire.far_away(|| router(FAR_V4, NEAR_V4));
        for (kind, last) in kinds().zip(100..) {
            let sender = socket("127.0.0.1:0");
            // The kernel caches the path MTU per destination; it has no entry for the next address yet.
            let address = IpAddr::from([10, 9, 0, last]);
            wire.far_away(|| device::add_address(FAR, address, 24)).unwrap();
            reach(&wire.far_away(|| socket((address, 0))));
            let target = wire.far_away(|| gathering_socket(SocketAddr::new(address, 0)));
            let there = target.local_addr().unwrap();
            let running = start(Link::new("127.0.0.1:0".parse().unwrap(), there), kind, 1);
            burst(&sender, running.address(0).unwrap(), 10, BYTES);
            take(&target, 10, BYTES);
            let from = source(&running, &sender, &target);
            send_icmp_error(&router, TOO_LONG, 1280, from, there);
            let mut packets = 11;
            until(|| {
                burst(&sender, running.address(0).unwrap(), 10, BYTES);
                take(&target, 10, BYTES);
                packets += 10;
                let counts = &running.counts(0)[0];
                counts.unsegmented > 0 || !counts.dropped.is_empty()
            });
            let counts = drain(running);
            require_balance(&counts, kind.name());
            assert_eq!(counts.received, packets, "{kind}");
            // If the kernel also returns the error for a packet that it would segment, the plane does not learn that there were
            // two packets.
            let is_known = counts.dropped == [(Drop::TooLong, 1)];
            assert!(is_known || counts.unsegmented > 0 && counts.dropped.is_empty(), "{kind} {counts:?}");
            assert!(counts.unsegmented > 0 || kind != PlaneKind::Offload, "{kind} {counts:?}");
        }
    });
}

/// Returns the address from which a plane sends to the target.
fn source(running: &fourtuple_forward::Running, sender: &UdpSocket, target: &UdpSocket) -> SocketAddr {
    sender.send_to(b"?", running.address(0).unwrap()).unwrap();
    target.recv_from(&mut [0; 10]).unwrap().1
}

fn link_to(listen: &str, to: &str) -> Link {
    Link::new(listen.parse().unwrap(), to.parse().unwrap())
}

fn forward(links: Vec<Link>) -> Forward {
    Forward { links, ..Forward::new(link_to("127.0.0.1:1", "127.0.0.1:2"), 1) }
}

#[test]
fn a_local_listening_address_is_refused_as_next_hop() {
    in_namespace(|| {
        device::add_address("lo", "192.0.2.7".parse().unwrap(), 32).unwrap();
        device::add_address("lo", "2001:db8::7".parse().unwrap(), 128).unwrap();
        // A kernel worker adds the route that makes the address local.
        reach(&socket("[2001:db8::7]:0"));
        for (listen, to) in [
            ("0.0.0.0:4000", "192.0.2.7:4000"),
            ("0.0.0.0:4000", "127.1.2.3:4000"),
            ("[::]:4000", "192.0.2.7:4000"),
            ("[::]:4000", "[2001:db8::7]:4000"),
            ("[::]:4000", "[::ffff:127.0.0.1]:4000"),
            ("127.0.0.1:4000", "0.0.0.0:4000"),
        ] {
            let refused = forward(vec![link_to(listen, to)]).start();
            assert!(matches!(refused, Err(ForwardError::Loop { .. })), "{listen} > {to}");
        }
        // The next hop is on another host, or has the port of a link at another address.
        for (listen, to) in [("0.0.0.0:4000", "192.0.2.8:4000"), ("127.0.0.1:4000", "192.0.2.7:4000")] {
            drop(forward(vec![link_to(listen, to)]).start().unwrap());
        }
    });
}

#[test]
fn two_links_do_not_share_an_address() {
    in_namespace(|| {
        let listen = "127.0.0.1:4000";
        let twice = forward(vec![link_to(listen, "127.0.0.1:1"), link_to(listen, "127.0.0.1:2")]).start();
        assert!(matches!(twice, Err(ForwardError::Twice { .. })), "{twice:?}");
    });
}

#[test]
fn new_routes_cannot_form_a_loop() {
    in_namespace(|| {
        let (sender, target) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let there = target.local_addr().unwrap();
        let mut buffer = [0; 10];
        for kind in kinds() {
            let running = start(Link::new("0.0.0.0:0".parse().unwrap(), there), kind, 1);
            let port = running.address(0).unwrap().port();
            let to_itself = SocketAddr::from(([127, 7, 7, 7], port));
            let refused = running.set_routes(0, Routes::to(to_itself));
            assert!(matches!(refused, Err(ForwardError::Loop { .. })), "{kind}");
            // The previous route still works.
            sender.send_to(b"x", ("127.0.0.1", port)).unwrap();
            assert_eq!(target.recv(&mut buffer).unwrap(), 1, "{kind}");
        }
    });
}

#[test]
fn links_may_swap_order_but_not_form_a_circle() {
    in_namespace(|| {
        let (sender, target) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let there = target.local_addr().unwrap();
        let (one, other) = ("127.0.0.1:4000", "127.0.0.1:4001");
        let round = forward(vec![link_to(one, other), link_to(other, one)]).start();
        let Err(error @ ForwardError::Round { .. }) = round else { panic!("{round:?}") };
        assert!(error.is_usage());
        assert_eq!(error.to_string(), format!("packets would go round: {one}, {other}, and {one} again"));
        // Two links may be chained in either order.
        let running = forward(vec![link_to(one, other), Link::new(other.parse().unwrap(), there)]);
        let running = running.start().unwrap();
        let to = |address: &str| Routes::to(address.parse().unwrap());
        let mut buffer = [0; 10];
        let mut passes = |enter: &str| {
            sender.send_to(b"x", enter).unwrap();
            assert_eq!(target.recv(&mut buffer).unwrap(), 1);
        };
        passes(one);
        let refused = running.set_routes(1, to(one));
        assert!(matches!(refused, Err(ForwardError::Round { .. })), "{refused:?}");
        passes(one);
        // The second change alone would form a loop with the first link's present route.
        running.set_all_routes(vec![Routes::to(there), to(one)]).unwrap();
        passes(other);
        running.set_all_routes(vec![to(other), Routes::to(there)]).unwrap();
        passes(one);
        let refused = running.set_all_routes(vec![Routes::to(there), to(other)]);
        assert!(matches!(refused, Err(ForwardError::Loop { .. })), "{refused:?}");
        passes(one);
    });
}

const PACKETS: usize = 10;

const BYTES: usize = 1400;

/// With IP_PMTUDISC_WANT the kernel fragments packets, but not messages that it has to segment (UDP_SEGMENT). The plane sends
/// such packets one by one while the MTU is too small, and in batches again afterwards.
#[test]
fn packets_beyond_the_mtu_are_fragmented() {
    in_namespace(|| {
        let cases: Vec<_> = kinds().flat_map(|kind| [(kind, FAR_V4), (kind, FAR_V6)]).collect();
        each_in_namespace(cases, |(kind, far)| {
            let Some(wire) = Wire::open("mtu::packets_beyond_the_mtu_are_fragmented") else { return };
            // Older kernels segment only for devices with checksum offload.
            device::leave_checksums(NEAR, true).unwrap();
            reach(&wire.far_away(|| socket((far, 0))));
            let what = format!("{kind} to {far}");
            let target = wire.far_away(|| gathering_socket(SocketAddr::new(far, 0)));
            let sender = socket("127.0.0.1:0");
            let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
            let running = start(link, kind, 1);
            let mut bursts = 0;
            let mut pass = || {
                bursts += PACKETS as u64;
                burst(&sender, running.address(0).unwrap(), PACKETS, BYTES);
                take(&target, PACKETS, BYTES)
            };
            // How a plane batches a burst depends on its kind. The plane must batch again once the MTU allows it.
            let is_cut_there = pass();
            assert!(is_cut_there || kind != PlaneKind::Offload, "{what}");
            assert_eq!(running.counts(0)[0].unsegmented, 0, "{what}");
            device::set_mtu(NEAR, 1280).unwrap();
            for _ in 0..3 {
                assert!(!pass(), "no fragment is of many packets: {what}");
            }
            let refused = running.counts(0)[0].unsegmented;
            assert_eq!(refused > 0, is_cut_there, "{what}");
            device::set_mtu(NEAR, 1500).unwrap();
            let end = Instant::now() + LONG;
            while pass() != is_cut_there {
                assert!(Instant::now() < end, "the kernel is not asked again: {what}");
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            let counts = drain(running);
            require_balance(&counts, &what);
            assert_eq!((counts.received, counts.dropped_in_all()), (bursts, 0), "{what}: {counts:?}");
            assert_eq!(counts.sent_bytes, bursts * BYTES as u64, "{what}");
        });
    });
}

/// A packet that exceeds the maximum length of IPv4 is not sent at all.
#[test]
fn oversized_datagrams_count_as_too_long() {
    in_namespace(|| {
        for kind in kinds() {
            let target = socket("127.0.0.1:0");
            let running = start(Link::new("[::1]:0".parse().unwrap(), target.local_addr().unwrap()), kind, 1);
            let sender = socket("[::1]:0");
            // The length field of IPv6 does not include the header, so that 20 more bytes fit.
            sender.send_to(&vec![1; 65_527], running.address(0).unwrap()).unwrap();
            sender.send_to(b"short", running.address(0).unwrap()).unwrap();
            let mut buffer = [0; 100];
            assert_eq!(target.recv(&mut buffer).unwrap(), 5, "{kind}");
            let counts = drain(running);
            require_balance(&counts, kind.name());
            assert_eq!((counts.received, counts.sent), (2, 1), "{kind} {counts:?}");
            // Some planes have too small a buffer for such a packet.
            let reasons: Vec<Drop> = counts.dropped.iter().map(|(reason, _)| *reason).collect();
            assert!(
                reasons == [Drop::TooLong]
                    || reasons == [Drop::Truncated]
                        && ![PlaneKind::OneByOne, PlaneKind::Offload].contains(&kind),
                "{kind} {counts:?}"
            );
        }
    });
}

/// Each packet was either received or dropped at a full queue.
#[test]
fn drops_at_a_full_queue_are_counted() {
    const OFFERED: u64 = 300;
    in_namespace(|| {
        for kind in kinds() {
            let target = socket("127.0.0.1:0");
            let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
            // The queue holds a few packets, and the plane works on the first of them for longer than the sender needs for all
            // others.
            let running = Forward {
                kind,
                work: Duration::from_millis(20),
                receive_buffer: Some(4096),
                ..Forward::new(link, 1)
            };
            let running = running.start().unwrap();
            let sender = socket("127.0.0.1:0");
            for _ in 0..OFFERED {
                sender.send_to(&[7; 500], running.address(0).unwrap()).unwrap();
            }
            // A packet that is delivered after the drain is in no counter.
            Loopback::open().flush();
            // The counter also rises while planes run, not only at their end.
            until(|| running.counts(0)[0].dropped.iter().any(|(reason, _)| *reason == Drop::Overflow));
            let counts = drain(running);
            require_balance(&counts, kind.name());
            let overflow: u64 = counts.dropped_in_all();
            assert_eq!(counts.dropped, [(Drop::Overflow, overflow)], "{kind}");
            assert_eq!(counts.received + overflow, OFFERED, "{kind} {counts:?}");
            assert!(overflow > 0 && counts.sent > 0, "{kind} {counts:?}");
        }
    });
}

/// Drains a forwarder after 250 packets, which its queue holds, and during a flood if `floods`. Returns the number of received packets.
fn received_by_drain(kind: PlaneKind, floods: bool) -> u64 {
    let target = socket("127.0.0.1:0");
    let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
    let forward = Forward { kind, work: Duration::from_micros(200), ..Forward::new(link, 1) };
    let running = forward.start().unwrap();
    let (sender, to) = (socket("127.0.0.1:0"), running.address(0).unwrap());
    (0..100).for_each(|_| assert_eq!(sender.send_to(b"x", to).unwrap(), 1));
    (0..3).for_each(|_| burst(&sender, to, 50, 1));
    let flood = floods.then(|| Flood::start(sender.into(), to));
    let draining = thread::spawn(|| drain(running));
    until(|| draining.is_finished());
    flood.map(Flood::end);
    draining.join().unwrap().received
}

/// A drain forwards all packets that are in the receive queue, and ends although packets arrive faster than the plane forwards.
#[test]
fn a_drain_empties_the_queue_and_ends_during_a_flood() {
    in_namespace(|| {
        for kind in kinds() {
            // On a busy machine the kernel may deliver packets after the drain (ksoftirqd): one attempt without such packets is enough.
            assert!((0..10).any(|_| received_by_drain(kind, false) == 250), "{kind}");
            received_by_drain(kind, true);
        }
    });
}

/// Returns each packet to its sender.
fn echo(target: &UdpSocket) {
    let mut buffer = [0; 2000];
    let (length, from) = target.recv_from(&mut buffer).unwrap();
    target.send_to(&buffer[..length], from).unwrap();
}

fn addresses(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// A client that sends to several addresses of a forwarder gets each reply from the address that it sent to.
#[test]
fn replies_come_from_the_requested_address() {
    in_namespace(|| {
        let v4 = addresses(&["127.0.0.1", "127.0.0.9", "192.0.2.7"]);
        let v6 = addresses(&["::1", "2001:db8::7", "2001:db8::8"]);
        device::add_address("lo", v4[2], 32).unwrap();
        device::add_address("lo", v6[1], 128).unwrap();
        device::add_address("lo", v6[2], 128).unwrap();
        for ip in v4.iter().chain(&v6) {
            reach(&socket((*ip, 0)));
        }
        let target = socket("127.0.0.1:0");
        for kind in kinds() {
            for (listen, asked) in [("0.0.0.0:0", &v4), ("[::]:0", &v4), ("[::]:0", &v6)] {
                let mut link = Link::new(listen.parse().unwrap(), target.local_addr().unwrap());
                link.replies = true;
                let running = start(link, kind, 1);
                let port = running.address(0).unwrap().port();
                let client = socket(if asked[0].is_ipv4() { "0.0.0.0:0" } else { "[::]:0" });
                let mut buffer = [0; 2000];
                // Of a new client the plane loses a reply that comes two ticks late, of one that has sent two packets none.
                for ip in asked {
                    for _ in 0..2 {
                        client.send_to(b"?", (*ip, port)).unwrap();
                    }
                    for _ in 0..2 {
                        assert_eq!(target.recv(&mut buffer).unwrap(), 1, "{kind} at {listen}");
                    }
                }
                for round in 0..3_u8 {
                    for (number, ip) in asked.iter().enumerate() {
                        let to = SocketAddr::new(*ip, port);
                        client.send_to(&[number as u8, round], to).unwrap();
                        echo(&target);
                        let (length, from) = client.recv_from(&mut buffer).unwrap();
                        assert_eq!(&buffer[..length], &[number as u8, round]);
                        assert_eq!(from, to, "{kind} at {listen}");
                    }
                }
                // The check also covers packets that came as one message.
                let to = SocketAddr::new(asked[1], port);
                burst(&client, to, 5, 100);
                for _ in 0..5 {
                    echo(&target);
                    assert_eq!(client.recv_from(&mut buffer).unwrap(), (100, to), "{kind} at {listen}");
                }
                let counts = drain(running);
                require_balance(&counts, kind.name());
                assert_eq!((counts.received, counts.returned), (6 + 14, 14), "{kind} at {listen}");
                assert_eq!(counts.clients, asked.len() as u64, "{kind} at {listen}: one for each address");
            }
        }
    });
}

/// A batched plane has buffers for jumbo frames only. A longer reply has a counter of its own, so that the balance of packets holds.
#[test]
fn a_dropped_reply_is_not_a_dropped_packet() {
    in_namespace(|| {
        let (client, target) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let mut link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
        link.replies = true;
        let running = start(link, PlaneKind::Batched, 1);
        // The socket of a client with one packet is closed after two ticks, perhaps before the reply.
        for _ in 0..2 {
            client.send_to(b"x", running.address(0).unwrap()).unwrap();
        }
        target.recv(&mut [0; 10]).unwrap();
        let (_, from) = target.recv_from(&mut [0; 10]).unwrap();
        target.send_to(&[0; 20_000], from).unwrap();
        until(|| !running.counts(0)[0].dropped_replies.is_empty());
        let counts = drain(running);
        require_balance(&counts, "with a dropped reply");
        assert_eq!((&counts.dropped_replies, counts.returned), (&vec![(Drop::Truncated, 1)], 0));
    });
}

/// Without replies, the destination address of a packet does not create another target.
#[test]
fn one_way_there_is_one_socket_for_all_addresses() {
    in_namespace(|| {
        for kind in kinds() {
            let (client, target) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
            let running =
                start(Link::new("0.0.0.0:0".parse().unwrap(), target.local_addr().unwrap()), kind, 1);
            let mut buffer = [0; 10];
            let mut sources = Vec::new();
            for to in ["127.0.0.1", "127.0.0.2"] {
                client.send_to(b"x", (to, running.address(0).unwrap().port())).unwrap();
                sources.push(target.recv_from(&mut buffer).unwrap().1);
            }
            assert_eq!(sources[0], sources[1], "{kind}");
        }
    });
}

/// The port at which next hops receive.
const HOP_PORT: u16 = 5000;
/// The first byte of a packet that takes the watched route.
const WATCHED: u8 = 1;

/// A namespace at the far end of a wire, with a next hop in it.
struct Neighbour {
    namespace: OwnedFd,
    /// The addresses of the near and the far end of the wire.
    here: IpAddr,
    there: IpAddr,
    hop: UdpSocket,
}

impl Neighbour {
    /// Returns `None`, and counts a skipped test, if the host has no veth.
    fn open(test: &str, number: u8) -> Option<Neighbour> {
        let far = thread::spawn(|| {
            netns::enter_new()?;
            netns::set_loopback_up()?;
            netns::current()
        });
        let namespace = far.join().unwrap().expect("a namespace");
        let (near, far) = (format!("near{number}"), format!("far{number}"));
        if let Err(error) = device::make_pair(&near, &far, namespace.as_fd()) {
            skip(test, "veth", &format!("no pair of devices to be had: {error}"));
            return None;
        }
        let (here, there) = (IpAddr::from([10, 9, number, 1]), IpAddr::from([10, 9, number, 2]));
        device::set_up(&near).unwrap();
        device::add_address(&near, here, 24).unwrap();
        let hop = inside(&namespace, || {
            device::set_up(&far).unwrap();
            device::add_address(&far, there, 24).unwrap();
            // A socket at the wildcard address stays usable while the device is down.
            UdpSocket::bind(("0.0.0.0", HOP_PORT)).unwrap()
        });
        hop.set_nonblocking(true).unwrap();
        Some(Neighbour { namespace, here, there, hop })
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::new(self.there, HOP_PORT)
    }

    /// Starts the BFD session of the neighbour.
    fn speak(&self) -> bfd::Link {
        let settings = LinkSettings { timers: timers(), ..LinkSettings::new(self.there, self.here) };
        inside(&self.namespace, || bfd::Link::start(&settings).unwrap())
    }

    /// Returns whether a packet arrives within this time.
    fn got(&self, within: Duration) -> bool {
        let there_is = socket::wait_readable(self.hop.as_fd(), Some(within)).unwrap();
        there_is && self.hop.recv(&mut [0; 100]).is_ok()
    }
}

fn inside<T: Send>(namespace: &OwnedFd, what: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let there = scope.spawn(|| {
            netns::enter(namespace.as_fd()).unwrap();
            what()
        });
        there.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload))
    })
}

/// Timers with a detection time of 4 s: long enough for a busy machine, short enough for a test.
fn timers() -> Timers {
    Timers::new(Duration::from_millis(100), Duration::from_millis(100), 40).unwrap()
}

fn counts(running: &Running) -> PlaneCounts {
    running.counts(0).remove(0)
}

fn link_downs(running: &Running) -> u64 {
    let dropped = counts(running).dropped;
    dropped.iter().find(|(reason, _)| *reason == Drop::LinkDown).map_or(0, |(_, number)| *number)
}

/// Starts a forwarder that sends packets with the key to the watched neighbour, and all others to `default`.
fn start_watched(kind: PlaneKind, watched: &Neighbour, default: Option<SocketAddr>) -> Running {
    let rules = [Rule::Key(WATCHED.into(), watched.address())];
    let mut link = Link::new("127.0.0.1:0".parse().unwrap(), watched.address());
    link.routes = Routes::new(default, &rules, Some(FlowKey::whole(0, 1))).unwrap();
    let peer = Peer { timers: timers(), local: Some(watched.here), ..Peer::new(watched.there) };
    link.bfd = Some(peer);
    start(link, kind, 1)
}

/// Sends packets until one arrives at this neighbour. Packets may be lost until both ends of the wire are up.
#[track_caller]
fn arrives(running: &Running, sender: &UdpSocket, at: &Neighbour) {
    wait_until("a packet", || {
        sender.send_to(&[WATCHED], running.address(0).unwrap()).unwrap();
        at.got(Duration::from_millis(100))
    });
}

/// The watched neighbour fails silently: its packets take the default route, and return to the neighbour when it recovers.
#[test]
fn packets_go_around_a_link_that_is_down() {
    in_namespace(|| {
        let test = "packets_go_around_a_link_that_is_down";
        each_in_namespace(kinds::kinds(test), |kind| {
            let (Some(watched), Some(other)) = (Neighbour::open(test, 1), Neighbour::open(test, 2)) else {
                return;
            };
            let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
            let running = start_watched(kind, &watched, Some(other.address()));
            // No BFD session has been up yet, which is not a failure.
            arrives(&running, &sender, &watched);
            let there = watched.speak();
            wait_until("up", || is_up(&running));
            arrives(&running, &sender, &watched);

            // The far end of the wire goes down, like a pulled cable.
            inside(&watched.namespace, || device::set_down("far1").unwrap());
            wait_until("down", || !is_up(&running));
            let report = running.bfd().remove(0).report;
            assert_eq!(report.last_failure, Diagnostic::DetectionTimeExpired, "{kind}");
            while watched.got(Duration::ZERO) {}
            arrives(&running, &sender, &other);
            assert!(!watched.got(Duration::ZERO), "{kind}");
            assert_eq!(link_downs(&running), 0, "{kind}: there was another way");

            inside(&watched.namespace, || device::set_up("far1").unwrap());
            wait_until("up again", || is_up(&running));
            while other.got(Duration::ZERO) {}
            arrives(&running, &sender, &watched);
            assert!(!other.got(Duration::ZERO), "{kind}");
            assert!(running.bfd()[0].report.ups >= 2, "{kind}");
            drop(there);
        });
    });
}

/// The neighbour's BFD process ends and no other route exists: packets are dropped and counted.
#[test]
fn packets_are_dropped_without_another_route() {
    in_namespace(|| {
        let test = "packets_are_dropped_without_another_route";
        // The default route leads to the same next hop, or does not exist.
        let cases: Vec<_> =
            kinds::kinds(test).into_iter().flat_map(|kind| [(kind, true), (kind, false)]).collect();
        each_in_namespace(cases, |(kind, has_default)| {
            let Some(watched) = Neighbour::open(test, 1) else { return };
            let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
            let default = has_default.then(|| watched.address());
            let running = start_watched(kind, &watched, default);
            let there = watched.speak();
            wait_until("up", || is_up(&running));
            arrives(&running, &sender, &watched);
            inside(&watched.namespace, || device::set_down("far1").unwrap());
            wait_until("down", || !is_up(&running));
            let before = counts(&running);
            let earlier = link_downs(&running);
            // On a busy machine the session may have been down before.
            assert!(earlier == 0 || session(&running).report.downs > 1, "{kind}: {earlier}");
            for _ in 0..5 {
                sender.send_to(&[WATCHED], running.address(0).unwrap()).unwrap();
            }
            wait_until("the drops", || link_downs(&running) == earlier + 5);
            let after = counts(&running);
            assert_eq!((after.sent, after.received), (before.sent, before.received + 5), "{kind}");
            inside(&watched.namespace, || device::set_up("far1").unwrap());
            wait_until("up again", || is_up(&running));
            arrives(&running, &sender, &watched);

            // An administrator holds the session down, which is not a failure of the link.
            there.set_admin_down(true);
            wait_until("word of it", || running.bfd()[0].report.remote_state == State::AdminDown);
            arrives(&running, &sender, &watched);
            while watched.got(Duration::ZERO) {}
        });
    });
}
