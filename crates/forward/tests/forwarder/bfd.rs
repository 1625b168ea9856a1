//! BFD sessions over real sockets, in a separate namespace.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_forward::bfd::{
    Diagnostic, Discard, Link, LinkError, LinkReport, LinkSettings, LinkState, PORT, Packet, Port, Receive,
    State, Timers,
};
use fourtuple_syscalls::{Errno, datagram::Batch, netns, option, socket};
use fourtuple_testing::in_namespace;

/// A time limit that no working machine reaches.
const LONG: Duration = Duration::from_secs(60);

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// Timers with a short interval and a long detection time: a busy machine may delay a thread for seconds.
fn patient() -> Timers {
    Timers::new(ms(100), ms(100), 200).unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn settings(local: &str, peer: &str) -> LinkSettings {
    LinkSettings { timers: patient(), ..LinkSettings::new(ip(local), ip(peer)) }
}

#[track_caller]
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < LONG, "{what} did not come about");
        thread::sleep(ms(5));
    }
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
            assert_ne!(one.source().port(), other.source().port());
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
        wait_until("the first timers", || there.report().detection_time == ms(100) * 200);
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
struct Peer {
    sender: UdpSocket,
    receiver: UdpSocket,
    to: SocketAddr,
}

impl Peer {
    fn new(address: &str, link: &str) -> Peer {
        let sender = UdpSocket::bind((address, 0)).unwrap();
        option::set_hops(sender.as_fd(), 255).unwrap();
        let receiver = UdpSocket::bind((address, PORT)).unwrap();
        option::set_receive_hops(receiver.as_fd(), true).unwrap();
        Peer { sender, receiver, to: (ip(link), PORT).into() }
    }

    /// Returns the next packet of the link, with its hop limit and its source address.
    fn receive(&self) -> (Packet, Option<u8>, SocketAddr) {
        let mut batch = Batch::new(1, 100);
        assert!(socket::wait_readable(self.receiver.as_fd(), Some(LONG)).unwrap(), "nothing came");
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
            let peer = Peer::new(there, here);
            let (packet, hops, from) = peer.receive();
            assert_eq!(hops, Some(255));
            assert_eq!(from, link.source());
            assert_eq!((packet.state, packet.your_discriminator), (State::Down, 0));
            // The detection time is a second, so that the session stays Up for a while.
            let answer = Packet { desired_min_tx_us: 333_333, ..Peer::answer(&packet, State::Init) };
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
        let peer = Peer::new("127.0.0.2", "127.0.0.1");
        let (packet, ..) = peer.receive();
        let patient = Packet { desired_min_tx_us: 20_000_000, ..Peer::answer(&packet, State::Init) };
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
        let peer = Peer::new("127.0.0.2", "127.0.0.1");
        let (packet, ..) = peer.receive();
        let discards = || link.state().report().discards;
        let down = Packet { your_discriminator: 0, ..Peer::answer(&packet, State::Down) };
        option::set_hops(peer.sender.as_fd(), 254).unwrap();
        peer.send(&down);
        // The socket filter rejects the packet, so the session never receives it.
        wait_until("hops", || link.state().report().overflowed == 1);
        option::set_hops(peer.sender.as_fd(), 255).unwrap();
        let stranger = Peer::new("127.0.0.3", "127.0.0.1");
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
        stranger.send(&Peer::answer(&packet, State::Init));
        wait_until("stranger", || discards().of(Discard::Stranger) == 2);
        assert_eq!(link.state().state(), State::Down);
        peer.send(&Peer::answer(&packet, State::Init));
        wait_for(&link.state(), State::Up);
        // A forged packet without a discriminator does not take the session down.
        for state in [State::Down, State::AdminDown] {
            peer.send(&Packet { your_discriminator: 0, my_discriminator: 7, ..Peer::answer(&packet, state) });
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
                        socket::wait_readable(data.as_fd(), Some(ms(20))).unwrap();
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
            let (peer, stranger) = (Peer::new("127.0.0.2", "127.0.0.1"), Peer::new("127.0.0.3", "127.0.0.1"));
            let (packet, ..) = peer.receive();
            let at_port = || port.as_ref().map_or(0, |port| port.discards().total() + port.overflowed());
            let counted = |report: &LinkReport| {
                let LinkReport { received, discards, handed, handed_dropped, overflowed, .. } = report;
                assert!(*handed == 0 || shares);
                received + discards.total() + handed_dropped + overflowed + at_port()
            };
            let named = Peer::answer(&packet, State::Down);
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
