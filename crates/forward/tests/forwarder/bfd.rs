//! BFD sessions over real sockets, in a separate namespace: alone, bound to a device, and in-band between forwarders.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::spread::{ControlFilter, DeviceName, FlowKey, Selector, UdpGroup};
use fourtuple_forward::bfd::{
    Diagnostic, Discard, Link, LinkError, LinkReport, LinkSettings, LinkState, PORT, Packet, Port, Receive,
    State, Timers,
};
use fourtuple_forward::{CONTROL, Drop, Forward, InBand, Peer, PlaneKind, Reception, Running};
use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::socket::wait_readable;
use fourtuple_syscalls::{Errno, device, neighbour, netns, option};
use fourtuple_testing::in_namespace;
use fourtuple_testing::stream::LONG;
use fourtuple_testing::stream::Loopback;
use fourtuple_testing::wire::{FAR, FAR_V4, FAR_V6, NEAR, NEAR_V4, NEAR_V6, Wire};

use crate::flood::Flood;
use crate::kinds::kinds;
use crate::{is_up, session, socket, start, wait_until};

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// Timers with a short interval and a long detection time: a busy machine may delay a thread for seconds.
fn patient() -> Timers {
    Timers::new(ms(50), ms(50), 200).unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn settings(local: &str, peer: &str) -> LinkSettings {
    LinkSettings { timers: patient(), ..LinkSettings::new(ip(local), ip(peer)) }
}

#[track_caller]
fn wait_for(state: &LinkState, expected: State) {
    wait_until(&format!("{expected}"), || state.state() == expected);
}

/// Returns two addresses of this host, for each IP version.
fn pairs() -> [(&'static str, &'static str); 2] {
    netns::add_loopback_address("fd00::2".parse::<Ipv6Addr>().unwrap()).expect("an address");
    [("127.0.0.1", "127.0.0.2"), ("::1", "fd00::2")]
}

#[test]
fn a_drained_link_takes_the_peer_down() {
    in_namespace(|| {
        for (here, there) in pairs() {
            let one = Link::start(&settings(here, there)).unwrap();
            assert_eq!(one.state().state(), State::Down);
            let other = Link::start(&settings(there, here)).unwrap();
            let (state, watched) = (one.state(), other.state());
            wait_for(&state, State::Up);
            wait_for(&watched, State::Up);
            assert!(state.is_up());
            assert!((1..=2).contains(&state.transitions()), "by way of Init, or at once");
            assert!(state.since().elapsed() < LONG);
            for link in [&one, &other] {
                assert!((49_152..=65_535).contains(&link.source().port()));
            }
            let drained = one.drain();
            assert_eq!(
                (drained.state, drained.diagnostic),
                (State::AdminDown, Diagnostic::AdministrativelyDown)
            );
            assert!(drained.transmitted >= 3 && drained.received >= 1 && drained.unsent == 0, "{drained:?}");
            wait_for(&watched, State::Down);
            let report = watched.report();
            assert_eq!(report.diagnostic, Diagnostic::NeighborSignaledDown);
            assert_eq!(report.remote_state, State::AdminDown);
            assert_eq!(report.remote_diagnostic, Diagnostic::AdministrativelyDown);
        }
    });
}

#[test]
fn a_dropped_link_sends_admin_down() {
    in_namespace(|| {
        let one = Link::start(&settings("127.0.0.1", "127.0.0.2")).unwrap();
        let other = Link::start(&settings("127.0.0.2", "127.0.0.1")).unwrap();
        wait_for(&one.state(), State::Up);
        wait_for(&other.state(), State::Up);
        drop(one);
        wait_for(&other.state(), State::Down);
        assert_eq!(other.state().report().remote_state, State::AdminDown);
    });
}

#[test]
fn admin_down_and_timers_apply_while_up() {
    in_namespace(|| {
        let one = Link::start(&settings("127.0.0.1", "127.0.0.2")).unwrap();
        let other = Link::start(&settings("127.0.0.2", "127.0.0.1")).unwrap();
        let (here, there) = (one.state(), other.state());
        one.set_admin_down(true);
        wait_for(&here, State::AdminDown);
        wait_until("word of it", || there.report().remote_state == State::AdminDown);
        assert_eq!(there.state(), State::Down);
        one.set_admin_down(false);
        wait_for(&here, State::Up);
        wait_for(&there, State::Up);
        let before = (here.transitions(), there.transitions());
        wait_until("the first timers", || there.report().detection_time == ms(50) * 200);
        one.set_timers(Timers::new(ms(350), ms(150), 100).unwrap());
        wait_until("the interval to send", || here.report().transmit_interval == ms(350));
        wait_until("the detection time", || there.report().detection_time == ms(350) * 100);
        wait_until("the interval to receive", || there.report().transmit_interval == ms(150));
        assert_eq!((here.transitions(), there.transitions()), before, "it stayed up");
        one.reset_forwarding_plane();
        wait_until("the reset", || here.transitions() > before.0);
        wait_until("word of the reset", || there.transitions() > before.1);
        wait_for(&here, State::Up);
        one.signal(Diagnostic::ConcatenatedPathDown);
        wait_until("the signal", || there.report().remote_diagnostic == Diagnostic::ConcatenatedPathDown);
        assert!(there.is_up());
    });
}

/// A peer that the test controls: packet contents, source address and hop limit.
struct TestPeer {
    sender: UdpSocket,
    receiver: UdpSocket,
    to: SocketAddr,
}

impl TestPeer {
    fn new(address: &str, link: &str) -> TestPeer {
        let sender = UdpSocket::bind((address, 0)).unwrap();
        option::set_hops(sender.as_fd(), 255).unwrap();
        let receiver = UdpSocket::bind((address, PORT)).unwrap();
        option::set_receive_hops(receiver.as_fd(), true).unwrap();
        TestPeer { sender, receiver, to: (ip(link), PORT).into() }
    }

    /// Returns the next packet of the link, with its hop limit and its source address.
    fn receive(&self) -> (Packet, Option<u8>, SocketAddr) {
        let mut batch = Batch::new(1, 100);
        assert!(wait_readable(self.receiver.as_fd(), Some(LONG)).unwrap(), "nothing came");
        batch.receive(self.receiver.as_fd()).unwrap();
        let datagram = batch.get(0).unwrap();
        (Packet::parse(datagram.bytes).unwrap(), datagram.hops, datagram.from().unwrap())
    }

    fn send(&self, packet: &Packet) {
        self.sender.send_to(&packet.encode(), self.to).unwrap();
    }

    /// Returns an answer to a packet of the link that requests nothing.
    fn answer(packet: &Packet, state: State) -> Packet {
        Packet {
            state,
            poll: false,
            my_discriminator: 42,
            your_discriminator: packet.my_discriminator,
            desired_min_tx_us: 300_000,
            required_min_rx_us: 50_000,
            ..*packet
        }
    }
}

#[test]
fn a_silent_peer_sets_the_diagnostic() {
    in_namespace(|| {
        for (here, there) in pairs() {
            let timers = Timers::new(ms(100), ms(100), 3).unwrap();
            let link = Link::start(&LinkSettings { timers, ..settings(here, there) }).unwrap();
            let peer = TestPeer::new(there, here);
            let (packet, hops, from) = peer.receive();
            assert_eq!(hops, Some(255));
            assert_eq!(from, link.source());
            assert_eq!((packet.state, packet.your_discriminator), (State::Down, 0));
            // The detection time is a second, so that the session stays Up for a while.
            let answer = Packet { desired_min_tx_us: 333_333, ..TestPeer::answer(&packet, State::Init) };
            peer.send(&answer);
            wait_until("up and down", || link.state().transitions() == 2);
            let report = link.state().report();
            assert_eq!((report.state, report.diagnostic), (State::Down, Diagnostic::DetectionTimeExpired));
            assert_eq!(report.remote_discriminator, None);
            // All packets of the session come from one port.
            loop {
                let (packet, hops, from) = peer.receive();
                assert_eq!((hops, from), (Some(255), link.source()));
                if packet.diagnostic == Diagnostic::DetectionTimeExpired {
                    break;
                }
            }
        }
    });
}

/// A drain has a time limit if the peer does not answer.
#[test]
fn a_drain_ends_after_the_detection_time_of_a_deaf_peer() {
    in_namespace(|| {
        let timers = Timers::new(ms(100), ms(100), 3).unwrap();
        let link = Link::start(&LinkSettings { timers, ..settings("127.0.0.1", "127.0.0.2") }).unwrap();
        let peer = TestPeer::new("127.0.0.2", "127.0.0.1");
        let (packet, ..) = peer.receive();
        let patient = Packet { desired_min_tx_us: 20_000_000, ..TestPeer::answer(&packet, State::Init) };
        peer.send(&patient);
        wait_for(&link.state(), State::Up);
        let report = link.drain();
        assert_eq!((report.state, report.last_failure), (State::AdminDown, Diagnostic::AdministrativelyDown));
        assert_eq!((report.ups, report.downs), (1, 1));
        while peer.receive().0.state != State::AdminDown {}
    });
}

#[test]
fn packets_of_strangers_are_discarded_and_counted() {
    in_namespace(|| {
        let link = Link::start(&settings("127.0.0.1", "127.0.0.2")).unwrap();
        let peer = TestPeer::new("127.0.0.2", "127.0.0.1");
        let (packet, ..) = peer.receive();
        let discards = || link.state().report().discards;
        let down = Packet { your_discriminator: 0, ..TestPeer::answer(&packet, State::Down) };
        option::set_hops(peer.sender.as_fd(), 254).unwrap();
        peer.send(&down);
        // The socket filter rejects the packet, so the session never receives it.
        wait_until("hops", || link.state().report().overflowed == 1);
        option::set_hops(peer.sender.as_fd(), 255).unwrap();
        let stranger = TestPeer::new("127.0.0.3", "127.0.0.1");
        stranger.send(&down);
        wait_until("stranger", || discards().of(Discard::Stranger) == 1);
        peer.send(&Packet { your_discriminator: !packet.my_discriminator, ..down });
        wait_until("no session", || discards().of(Discard::NoSession) == 1);
        for junk in [&b""[..], b"x", &[0; 24], &[0xff; 1000]] {
            peer.sender.send_to(junk, peer.to).unwrap();
        }
        wait_until("junk", || discards().total() == 6);
        assert_eq!(discards().of(Discard::Hops), 0);
        // A packet with the right discriminator must also come from the peer's address.
        stranger.send(&TestPeer::answer(&packet, State::Init));
        wait_until("stranger", || discards().of(Discard::Stranger) == 2);
        assert_eq!(link.state().state(), State::Down);
        peer.send(&TestPeer::answer(&packet, State::Init));
        wait_for(&link.state(), State::Up);
        // A forged packet without a discriminator does not take the session down.
        for state in [State::Down, State::AdminDown] {
            peer.send(&Packet {
                your_discriminator: 0,
                my_discriminator: 7,
                ..TestPeer::answer(&packet, state)
            });
        }
        wait_until("forged", || discards().of(Discard::YourDiscriminatorZero) == 2);
        assert_eq!((link.state().state(), link.state().report().downs), (State::Up, 0));
    });
}

#[test]
fn planes_pass_in_band_packets_to_the_session() {
    in_namespace(|| {
        let ends = Arc::new(AtomicBool::new(false));
        let planes = ["127.0.0.1:4000", "127.0.0.2:4000"].map(|address| {
            let data = UdpSocket::bind(address).unwrap();
            option::set_receive_hops(data.as_fd(), true).unwrap();
            data
        });
        let links = [("127.0.0.1", 1), ("127.0.0.2", 0)].map(|(local, peer)| {
            Link::start(&LinkSettings {
                peer: planes[peer].local_addr().unwrap(),
                receive: Receive::Inbox,
                ..settings(local, "127.0.0.9")
            })
            .unwrap()
        });
        let mut threads = Vec::new();
        for (data, link) in planes.into_iter().zip(&links) {
            let (inbox, ends) = (link.inbox(), Arc::clone(&ends));
            threads.push(thread::spawn(move || {
                let mut batch = Batch::new(8, 2048);
                while !ends.load(Ordering::Relaxed) {
                    if batch.receive(data.as_fd()).is_err() {
                        wait_readable(data.as_fd(), Some(ms(20))).unwrap();
                        continue;
                    }
                    for datagram in batch.iter() {
                        inbox.offer(datagram.bytes, datagram.from().unwrap(), datagram.hops);
                    }
                }
            }));
        }
        for link in &links {
            wait_for(&link.state(), State::Up);
            // Init leads from Down to Up at once: one packet may be all.
            assert!(link.state().report().handed >= 1);
        }
        // Without a reported hop limit, the packet may come from beyond the link.
        let inbox = links[0].inbox();
        inbox.offer(&[0; 24], links[1].source(), None);
        wait_until("hops", || links[0].state().report().discards.of(Discard::Hops) == 1);
        let [one, other] = links;
        one.drain();
        wait_for(&other.state(), State::Down);
        ends.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

/// The timers of the session hold while its port is flooded and planes pass invalid packets to its inbox.
#[test]
fn a_flood_does_not_take_it_down() {
    in_namespace(|| {
        let one = Link::start(&settings("127.0.0.1", "127.0.0.2")).unwrap();
        let other = Link::start(&settings("127.0.0.2", "127.0.0.1")).unwrap();
        wait_for(&one.state(), State::Up);
        wait_for(&other.state(), State::Up);
        let stranger = UdpSocket::bind("127.0.0.3:0").unwrap();
        let inbox = one.inbox();
        let before = one.state().report();
        let begun = Instant::now();
        while begun.elapsed() < ms(1000) {
            for _ in 0..100 {
                // A full receive queue is not an error for a sender over loopback.
                let _ = stranger.send_to(&[0x20; 24], "127.0.0.1:3784");
                inbox.offer(&[0x20; 24], stranger.local_addr().unwrap(), Some(255));
            }
        }
        wait_until("packets that got through", || one.state().report().received > before.received);
        wait_until("discards", || one.state().report().discards.total() > 100);
        wait_until("packets of its own", || one.state().report().transmitted > before.transmitted);
        let report = one.state().report();
        assert_eq!((one.state().state(), report.transitions), (State::Up, before.transitions));
        assert!(other.state().is_up());
    });
}

#[test]
fn several_sessions_share_a_port() {
    in_namespace(|| {
        let address = SocketAddr::new(ip("127.0.0.1"), PORT);
        let port = Port::open(address, None).unwrap();
        assert_eq!(port.address(), address);
        let peers = ["127.0.0.2", "127.0.0.3", "127.0.0.4"];
        let shared = |peer| LinkSettings {
            receive: Receive::Shared(Arc::clone(&port)),
            ..settings("127.0.0.1", peer)
        };
        let mut here: Vec<_> = peers.iter().map(|peer| Link::start(&shared(peer)).unwrap()).collect();
        let there: Vec<_> =
            peers.iter().map(|peer| Link::start(&settings(peer, "127.0.0.1")).unwrap()).collect();
        let sources: HashSet<SocketAddr> = here.iter().map(Link::source).collect();
        assert_eq!(sources.len(), peers.len(), "each sends from a port of its own: {sources:?}");
        for link in here.iter().chain(&there) {
            wait_for(&link.state(), State::Up);
        }
        match Link::start(&shared("127.0.0.3")) {
            Err(LinkError::Taken(peer)) => assert_eq!(peer, ip("127.0.0.3")),
            other => panic!("{other:?}"),
        }
        here.remove(1).drain();
        wait_for(&there[1].state(), State::Down);
        assert!(here.iter().all(|link| link.state().is_up()));
        // The peer still sends, and no session receives its packets.
        wait_until("strangers", || {
            port.discards().of(Discard::Stranger) + port.discards().of(Discard::NoSession) > 0
        });
        here.push(Link::start(&shared("127.0.0.3")).unwrap());
        wait_for(&there[1].state(), State::Up);
    });
}

/// Random bytes go to a port with a session and to a session with its own socket: each packet is in exactly one counter, during
/// the test and after it.
#[test]
fn every_packet_is_in_exactly_one_counter() {
    in_namespace(|| {
        const PACKETS: u64 = 2_010;
        for shares in [true, false] {
            let port = shares.then(|| Port::open((ip("127.0.0.1"), PORT).into(), None).unwrap());
            let receive = port.clone().map_or(Receive::Own, Receive::Shared);
            // A drain lasts for the detection time of a peer that does not answer.
            let timers = Timers::default();
            let link = LinkSettings { receive, timers, ..settings("127.0.0.1", "127.0.0.2") };
            let link = Link::start(&link).unwrap();
            let (peer, stranger) =
                (TestPeer::new("127.0.0.2", "127.0.0.1"), TestPeer::new("127.0.0.3", "127.0.0.1"));
            let (packet, ..) = peer.receive();
            let at_port = || port.as_ref().map_or(0, |port| port.discards().total() + port.overflowed());
            let counted = |report: &LinkReport| {
                let LinkReport { received, discards, handed, handed_dropped, overflowed, .. } = report;
                assert!(*handed == 0 || shares);
                received + discards.total() + handed_dropped + overflowed + at_port()
            };
            let named = TestPeer::answer(&packet, State::Down);
            let mut random = fastrand::Rng::with_seed(7);
            for number in 0..PACKETS {
                let from = if random.bool() { &peer } else { &stranger };
                option::set_hops(from.sender.as_fd(), if random.u8(..4) == 0 { 64 } else { 255 }).unwrap();
                let mut bytes = match random.u8(..4) {
                    0 => named.encode().to_vec(),
                    1 => Packet { your_discriminator: 0, ..named }.encode().to_vec(),
                    2 => vec![0x20; 24],
                    _ => vec![0; random.usize(..300)],
                };
                if let Some(byte) = bytes.first_mut().filter(|_| random.bool()) {
                    *byte = random.u8(..);
                }
                from.sender.send_to(&bytes, from.to).unwrap();
                // The queue of the loopback device holds 1,000 packets; the test must not overflow it.
                if number % 200 == 0 {
                    stranger.sender.send_to(b"x", stranger.receiver.local_addr().unwrap()).unwrap();
                    stranger.receiver.recv(&mut [0; 64]).unwrap();
                }
            }
            wait_until("each counted", || counted(&link.state().report()) >= PACKETS);
            assert_eq!(counted(&link.state().report()), PACKETS);
            let report = link.drain();
            assert_eq!(counted(&report), PACKETS, "{report:?}");
        }
    });
}

#[test]
fn invalid_links_are_refused_with_the_reason() {
    in_namespace(|| {
        let refused = |settings: &LinkSettings| Link::start(settings).expect_err("refused").to_string();
        assert_eq!(
            refused(&settings("127.0.0.1", "::1")),
            "127.0.0.1 cannot reach ::1: one is IPv4, the other IPv6"
        );
        assert_eq!(refused(&settings("::1", "::1")), "::1 is the address of both ends of the link");
        let message = refused(&settings("192.0.2.1", "192.0.2.2"));
        assert!(message.starts_with("bind() of 192.0.2.1:") && message.contains("os error 99"), "{message}");
        match LinkSettings::towards(ip("192.0.2.2")) {
            Err(LinkError::NoRoute { peer, source }) => {
                assert_eq!((peer, Errno::of(&source)), (ip("192.0.2.2"), Some(Errno::ENETUNREACH)));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(
            refused(&settings("fe80::1", "fe80::2")),
            "fe80::2 is a link-local address: name the device that it is on"
        );
        assert_eq!(LinkSettings::towards(ip("127.0.0.2")).unwrap().local.ip(), ip("127.0.0.1"));
        let _first = Link::start(&settings("127.0.0.1", "127.0.0.2")).unwrap();
        let message = refused(&settings("127.0.0.1", "127.0.0.3"));
        assert!(message.starts_with("bind() of 127.0.0.1:3784: Address already in use"), "{message}");
        let device =
            LinkSettings { device: Some("nosuch0".parse().unwrap()), ..settings("127.0.0.5", "127.0.0.6") };
        assert!(refused(&device).starts_with("setsockopt(SO_BINDTODEVICE)"));
    });
}

fn device(name: &str) -> DeviceName {
    name.parse().unwrap()
}

/// Opens a wire whose ends have link-local addresses that are usable at once.
fn with_link_local(test: &str) -> Option<Wire> {
    let wire = Wire::open(test)?;
    device::add_address(NEAR, ip("fe80::1"), 64).unwrap();
    wire.far_away(|| device::add_address(FAR, ip("fe80::2"), 64)).unwrap();
    Some(wire)
}

#[test]
fn link_local_peers_come_up_on_their_device() {
    in_namespace(|| {
        let Some(wire) = with_link_local("link_local_peers_come_up_on_their_device") else { return };
        let settings = |name, peer, local| {
            let settings = LinkSettings::on_device(device(name), ip(peer), Some(ip(local))).unwrap();
            LinkSettings { timers: patient(), ..settings }
        };
        let near = Link::start(&settings(NEAR, "fe80::2", "fe80::1")).unwrap();
        let far = wire.far_away(|| Link::start(&settings(FAR, "fe80::1", "fe80::2")).unwrap());
        wait_until("up", || near.state().is_up() && far.state().is_up());
        // Without a local address, the kernel chooses an address of the device.
        let chosen = LinkSettings::on_device(device(NEAR), ip("fe80::2"), None).unwrap();
        assert!(matches!(chosen.local.ip(), IpAddr::V6(v6) if v6.is_unicast_link_local()), "{chosen:?}");
        let missing = LinkSettings::on_device(device("nosuch0"), ip("fe80::2"), None).unwrap_err();
        assert!(matches!(missing, LinkError::NoDevice { .. }), "{missing}");
        far.drain();
        wait_until("down", || near.state().state() == State::Down);
    });
}

/// Two forwarders have link-local peers and IPv4 peers on a device at the same time.
#[test]
fn a_forwarder_has_sessions_on_a_device() {
    in_namespace(|| {
        let Some(wire) = with_link_local("a_forwarder_has_sessions_on_a_device") else { return };
        let start = |name, local: &[IpAddr], peers: &[IpAddr]| -> Running {
            let link = |(local, peer): (&IpAddr, &IpAddr)| {
                let to = SocketAddr::new(ip("127.0.0.1"), 9);
                let mut link = fourtuple_forward::Link::new((ip("127.0.0.1"), 0).into(), to);
                link.bfd = Some(Peer {
                    local: Some(*local),
                    device: Some(device(name)),
                    timers: patient(),
                    ..Peer::new(*peer)
                });
                link
            };
            let links = local.iter().zip(peers).map(link).collect::<Vec<_>>();
            Forward { links: links.clone(), ..Forward::new(links[0].clone(), 1) }.start().unwrap()
        };
        let (near, far) = ([ip("fe80::1"), NEAR_V4], [ip("fe80::2"), FAR_V4]);
        let mut one = start(NEAR, &near, &far);
        let other = wire.far_away(|| start(FAR, &far, &near));
        let are_up = |running: &Running| {
            let sessions = running.bfd();
            sessions.len() == 2 && sessions.iter().all(|session| session.report.state == State::Up)
        };
        wait_until("up", || are_up(&one) && are_up(&other));
        assert_eq!(one.bfd()[0].device, Some(device(NEAR)));
        // The record reports the session's state before this process ended the session.
        let ended = one.end_bfd();
        for session in &ended {
            let LinkReport { state, last_failure, downs, .. } = session.report;
            assert_eq!((state, last_failure, downs), (State::Up, Diagnostic::None, 0), "{session:?}");
        }
    });
}

/// The packet has the right addresses and a hop limit of 255, but arrives over loopback, not over the device.
#[test]
fn packets_of_other_devices_do_not_arrive() {
    in_namespace(|| {
        let Some(_wire) = Wire::open("packets_of_other_devices_do_not_arrive") else { return };
        let settings = LinkSettings::on_device(device(NEAR), ip("127.0.0.2"), Some(ip("127.0.0.1"))).unwrap();
        let link = Link::start(&settings).unwrap();
        let sender = UdpSocket::bind("127.0.0.2:0").unwrap();
        sender.set_read_timeout(Some(LONG)).unwrap();
        sender.connect(("127.0.0.1", PORT)).unwrap();
        option::set_hops(sender.as_fd(), 255).unwrap();
        sender.send(&[0x20; 24]).unwrap();
        // The sender gets "port unreachable": no socket receives packets from loopback.
        let refused = sender.recv(&mut [0; 8]).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        let report = link.state().report();
        assert_eq!((report.overflowed, report.discards.total(), report.received), (0, 0, 0));
    });
}

/// The port of data and of control packets, at both ends.
const DATA_PORT: u16 = 4000;

/// Returns a link with an in-band BFD peer.
fn in_band_link(
    here: SocketAddr,
    there: SocketAddr,
    to: SocketAddr,
    spread: Selector,
    timers: Timers,
) -> fourtuple_forward::Link {
    let peer = Peer { timers, ..Peer::in_band(there) };
    fourtuple_forward::Link { bfd: Some(peer), spread, ..fourtuple_forward::Link::new(here, to) }
}

/// Sends numbered packets from `sender`, and checks that `target` receives exactly these packets.
fn through(sender: &UdpSocket, to: SocketAddr, target: &UdpSocket) {
    let mut buffer = [0; 2048];
    for number in 0..200_u32 {
        let mut payload = [0x20; 100];
        payload[..4].copy_from_slice(&number.to_be_bytes());
        sender.send_to(&payload, to).unwrap();
        assert_eq!(target.recv(&mut buffer).unwrap(), payload.len());
        assert_eq!(buffer[..100], payload);
    }
}

/// Tests that both ends come up and forward data, and that a forwarder detects the end of its peer.
fn two_forwarders(test: &str, spread: Selector, planes: usize, expected: Reception) {
    let Some(wire) = Wire::open(test) else { return };
    for (here, there) in [(NEAR_V4, FAR_V4), (NEAR_V6, FAR_V6)] {
        for kind in kinds(test) {
            let (near, far) = (SocketAddr::new(here, DATA_PORT), SocketAddr::new(there, DATA_PORT));
            let near_target = socket((here, 0));
            let far_target = wire.far_away(|| socket((there, 0)));
            let one = start(
                in_band_link(near, far, near_target.local_addr().unwrap(), spread, patient()),
                kind,
                planes,
            );
            let other = wire.far_away(|| {
                start(
                    in_band_link(far, near, far_target.local_addr().unwrap(), spread, patient()),
                    kind,
                    planes,
                )
            });
            wait_until("up", || is_up(&one) && is_up(&other));
            assert_eq!(session(&one).reception, expected);
            // Data may begin with any bytes, also when a neighbour at the far end of the wire sends it.
            let far_sender = wire.far_away(|| socket((there, 0)));
            through(&far_sender, near, &near_target);
            through(&socket((here, 0)), far, &far_target);
            // A packet that looks like a control packet but comes from beyond the link is data.
            let mut buffer = [0; 100];
            let control = [&[0x20, 0xc0, 3, 24][..], &[1; 20]].concat();
            option::set_hops(far_sender.as_fd(), 254).unwrap();
            far_sender.send_to(&control, near).unwrap();
            assert_eq!(near_target.recv(&mut buffer).unwrap(), control.len());
            let control_packets = |running: &Running| session(running).report.received;
            let before = (control_packets(&one), control_packets(&other));
            wait_until("more control", || {
                control_packets(&one) > before.0 + 2 && control_packets(&other) > before.1 + 2
            });
            let handed = session(&one).report.handed;
            assert_eq!(handed > 0, expected == Reception::Planes, "{kind}");

            // The far forwarder ends in order: it sends AdminDown, and no control packet was forwarded.
            let counts = other.drain().unwrap().remove(0);
            assert_eq!(counts.iter().map(|plane| plane.received).sum::<u64>(), 200, "{kind} {counts:?}");
            wait_until("down", || session(&one).report.state == State::Down);
            let report = session(&one).report;
            assert_eq!(report.remote_diagnostic, Diagnostic::AdministrativelyDown, "{kind}");
            // The near forwarder is not drained: no peer is left to acknowledge AdminDown.
            let counts = one.counts(0);
            assert_eq!(counts.iter().map(|plane| plane.received).sum::<u64>(), 201, "{kind} {counts:?}");
            assert!(counts.iter().all(|plane| plane.dropped.is_empty()), "{kind} {counts:?}");
            near_target.set_nonblocking(true).unwrap();
            assert!(near_target.recv(&mut buffer).is_err(), "{kind}: something else was forwarded");
        }
    }
}

#[test]
fn a_filter_separates_control_packets_from_data() {
    in_namespace(|| {
        let spread = Selector::Key(FlowKey::whole(0, 4));
        two_forwarders("a_filter_separates_control_packets_from_data", spread, 3, Reception::Filter);
    });
}

/// With one socket, the selector `hash` needs no table to separate control packets.
#[test]
fn one_plane_has_a_filter_under_every_spread() {
    in_namespace(|| {
        two_forwarders("one_plane_has_a_filter_under_every_spread", Selector::Hash, 1, Reception::Filter);
    });
}

#[test]
fn without_a_filter_planes_pass_control_packets() {
    in_namespace(|| {
        two_forwarders("without_a_filter_planes_pass_control_packets", Selector::Hash, 2, Reception::Planes);
    });
}

/// The test acts as the peer, and sends control packets from the port of the peer's data.
#[test]
fn a_silent_end_is_down_within_the_detection_time() {
    in_namespace(|| {
        let test = "a_silent_end_is_down_within_the_detection_time";
        let Some(wire) = Wire::open(test) else { return };
        let (near, far) = (SocketAddr::new(NEAR_V4, DATA_PORT), SocketAddr::new(FAR_V4, DATA_PORT));
        let peer = wire.far_away(|| socket(far));
        option::set_receive_hops(peer.as_fd(), true).unwrap();
        let target = socket((NEAR_V4, 0));
        let timers = Timers::new(ms(100), ms(100), 3).unwrap();
        let to = target.local_addr().unwrap();
        let running = start(in_band_link(near, far, to, Selector::Random, timers), PlaneKind::Batched, 2);
        // Control packets and data share one 4-tuple, and control packets have the full hop limit.
        let mut batch = Batch::new(1, 100);
        assert!(wait_readable(peer.as_fd(), Some(LONG)).unwrap(), "nothing came");
        batch.receive(peer.as_fd()).unwrap();
        let control_packets = batch.get(0).unwrap();
        assert_eq!((control_packets.from(), control_packets.hops), (Some(near), Some(255)));
        assert!(CONTROL.finds(control_packets.bytes, control_packets.hops, near.port()));
        let packet = Packet::parse(control_packets.bytes).unwrap();
        // The peer sends one packet in state Init with an interval of 20 ms, and then nothing.
        let answer = Packet {
            state: State::Init,
            poll: false,
            my_discriminator: 42,
            your_discriminator: packet.my_discriminator,
            desired_min_tx_us: 20_000,
            required_min_rx_us: 50_000,
            ..packet
        };
        // Before the send: the session may get the packet before this thread runs again.
        let sent = Instant::now();
        neighbour::send(peer.as_fd(), &answer.encode(), near, 0).unwrap();
        wait_until("up and down", || session(&running).report.transitions == 2);
        let took = sent.elapsed();
        let report = session(&running).report;
        assert_eq!((report.ups, report.downs), (1, 1));
        assert_eq!(report.last_failure, Diagnostic::DetectionTimeExpired);
        // The detection time is 3 times 100 ms, the longer of both intervals; a busy machine may detect the failure later,
        // never earlier.
        assert!(took >= ms(300), "{took:?}");
        // A packet from a neighbour that begins like a control packet but is invalid goes to the session, which discards it.
        neighbour::send(peer.as_fd(), &[&[0x20, 0, 3, 24][..], &[0; 20]].concat(), near, 0).unwrap();
        wait_until("a discard", || session(&running).report.discards.of(Discard::MyDiscriminator) == 1);
        let counts = running.drain().unwrap().remove(0);
        assert!(counts.iter().all(|plane| plane.received == 0), "{counts:?}");
    });
}

/// The settings turn the filter off, as in the comparison in docs/bfd.md.
#[test]
fn the_filter_is_optional() {
    in_namespace(|| {
        let here: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let target = socket(here);
        let peer = Peer {
            in_band: Some(InBand { port: 9, filter: false }),
            ..Peer::in_band("127.0.0.2:9".parse().unwrap())
        };
        let link = fourtuple_forward::Link {
            bfd: Some(peer),
            spread: Selector::Random,
            ..fourtuple_forward::Link::new(here, target.local_addr().unwrap())
        };
        let running = Forward::new(link, 2).start().unwrap();
        assert_eq!(session(&running).reception, Reception::Planes);
    });
}

/// The planes receive more data than they can read, while the queue of the control socket always has space.
#[test]
fn control_packets_have_queue_space_when_data_has_none() {
    in_namespace(|| {
        const CONTROLS: usize = 50;
        let filter: ControlFilter = CONTROL.to_string().parse().unwrap();
        assert_eq!(filter, CONTROL);
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let to = address.parse().unwrap();
            let group = UdpGroup::open_with_control(to, 2, &Selector::Random, &filter).unwrap();
            let sender = socket(address);
            let packet = [&[0x20, 0xc0, 3, 24][..], &[1; 20]].concat();
            let loopback = Loopback::open();
            for _ in 0..CONTROLS {
                for _ in 0..200 {
                    sender.send_to(&[0x20; 64], group.address()).unwrap();
                }
                neighbour::send(sender.as_fd(), &packet, group.address(), 0).unwrap();
                loopback.flush();
            }
            let control = group.control().unwrap();
            assert_eq!(option::dropped(control.as_fd()).unwrap(), 0, "{address}");
            let lost: u32 =
                (0..2).map(|seat| option::dropped(group.member(seat).unwrap().as_fd()).unwrap()).sum();
            assert!(lost > 0, "the data found space: {address}");
            let mut batch = Batch::new(CONTROLS + 1, 100);
            assert_eq!(batch.receive(control.as_fd()).unwrap(), CONTROLS, "{address}");
            assert!(batch.iter().all(|datagram| datagram.bytes == packet));
        }
    });
}

/// The flood passes through a forwarder and a wire, from the peer's own address and port. The test checks only results that
/// hold on any machine; `examples/bfd_overload.rs` measures how long a session with short timers stays up.
#[test]
fn a_flood_from_the_peer_delays_no_control_packet() {
    in_namespace(|| {
        let Some(wire) = Wire::open("a_flood_from_the_peer_delays_no_control_packet") else { return };
        let (near, far) = (SocketAddr::new(NEAR_V4, DATA_PORT), SocketAddr::new(FAR_V4, DATA_PORT));
        let link = in_band_link(near, far, SocketAddr::new(FAR_V4, 5000), Selector::Random, patient());
        let running = Forward { work: Duration::from_micros(20), ..Forward::new(link, 2) }.start().unwrap();
        let data: OwnedFd = wire.far_away(|| socket(far)).into();
        let receive = Receive::InBand { socket: Arc::new(data.try_clone().unwrap()), is_steered: true };
        let settings = LinkSettings {
            local: far,
            peer: near,
            timers: patient(),
            receive,
            ..LinkSettings::new(FAR_V4, NEAR_V4)
        };
        let there = wire.far_away(|| Link::start(&settings).unwrap());
        wait_until("up", || is_up(&running) && there.state().is_up());
        let before = session(&running).report;
        let flood = Flood::start(data, near);
        let lost = || {
            let planes = running.counts(0);
            planes.iter().flat_map(|plane| &plane.dropped).any(|(reason, _)| *reason == Drop::Overflow)
        };
        wait_until("too much data", lost);
        let control_packets = session(&running).report.received;
        wait_until("control beside it", || session(&running).report.received > control_packets + 10);
        assert!(flood.end() > 0);
        let report = session(&running).report;
        assert_eq!(report.overflowed, 0, "{report:?}");
        // A packet of the far end from before its handshake may have been discarded when this end was up.
        let discards = report.discards.total() - before.discards.total();
        assert_eq!((report.handed, discards), (0, 0), "{report:?}");
        assert_eq!((report.state, report.downs), (State::Up, before.downs), "{report:?}");
    });
}
