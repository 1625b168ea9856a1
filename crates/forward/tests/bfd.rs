//! Sessions with each other over real sockets, in a namespace of their own.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_forward::bfd::{
    Diagnostic, Discard, Link, LinkError, LinkSettings, LinkState, PORT, Packet, Port, Receive, State, Timers,
};
use fourtuple_syscalls::{datagram::Batch, netns, option, socket};
use fourtuple_testing::in_namespace;

/// Nothing takes as long on a machine that works.
const LONG: Duration = Duration::from_secs(60);

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// Quick to come up, and slow to give up: a busy machine may let a thread wait for seconds.
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

/// Two addresses of this host, of either family.
fn pairs() -> [(&'static str, &'static str); 2] {
    netns::add_loopback_address("fd00::2".parse::<Ipv6Addr>().unwrap()).expect("an address");
    [("127.0.0.1", "127.0.0.2"), ("::1", "fd00::2")]
}

#[test]
fn two_links_come_up_and_one_that_is_drained_takes_the_other_down() {
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
fn a_link_that_is_dropped_says_so_too() {
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
fn the_administrator_holds_it_down_and_timers_change_while_it_is_up() {
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

/// A peer in the hands of the test: what it sends, from where, with how many hops.
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
        option::set_hops_told(receiver.as_fd(), true).unwrap();
        Peer { sender, receiver, to: (ip(link), PORT).into() }
    }

    /// The next packet of the link, how many hops it had left, and where it came from.
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

    /// An answer to a packet of the link: what a peer says that asks for nothing.
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
fn a_peer_that_falls_silent_is_down_with_the_diagnostic_of_it() {
    in_namespace(|| {
        for (here, there) in pairs() {
            let timers = Timers::new(ms(100), ms(100), 3).unwrap();
            let link = Link::start(&LinkSettings { timers, ..settings(here, there) }).unwrap();
            let peer = Peer::new(there, here);
            let (packet, hops, from) = peer.receive();
            assert_eq!(hops, Some(255));
            assert_eq!(from, link.source());
            assert_eq!((packet.state, packet.your_discriminator), (State::Down, 0));
            // Of a second, so that it is up for a while.
            let answer = Packet { desired_min_tx_us: 333_333, ..Peer::answer(&packet, State::Init) };
            peer.send(&answer);
            wait_until("up and down", || link.state().transitions() == 2);
            let report = link.state().report();
            assert_eq!((report.state, report.diagnostic), (State::Down, Diagnostic::DetectionTimeExpired));
            assert_eq!(report.remote_discriminator, None);
            // All of what was said comes from one port.
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

/// A drain does not wait for ever for whoever does not answer.
#[test]
fn a_peer_that_does_not_hear_the_farewell_is_left_when_it_has_to_know() {
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
fn what_comes_from_beyond_the_link_or_from_strangers_is_discarded_and_counted() {
    in_namespace(|| {
        let link = Link::start(&settings("127.0.0.1", "127.0.0.2")).unwrap();
        let peer = Peer::new("127.0.0.2", "127.0.0.1");
        let (packet, ..) = peer.receive();
        let discards = || link.state().report().discards;
        let down = Packet { your_discriminator: 0, ..Peer::answer(&packet, State::Down) };
        option::set_hops(peer.sender.as_fd(), 254).unwrap();
        peer.send(&down);
        wait_until("hops", || discards().of(Discard::Hops) == 1);
        option::set_hops(peer.sender.as_fd(), 255).unwrap();
        let stranger = Peer::new("127.0.0.3", "127.0.0.1");
        stranger.send(&down);
        wait_until("stranger", || discards().of(Discard::Stranger) == 1);
        peer.send(&Packet { your_discriminator: !packet.my_discriminator, ..down });
        wait_until("no session", || discards().of(Discard::NoSession) == 1);
        for junk in [&b""[..], b"x", &[0; 24], &[0xff; 1000]] {
            peer.sender.send_to(junk, peer.to).unwrap();
        }
        wait_until("junk", || discards().total() == 7);
        assert_eq!(link.state().state(), State::Down);
        // A discriminator that is right is right from everywhere: RFC 5881, section 6.
        stranger.send(&Peer::answer(&packet, State::Init));
        wait_for(&link.state(), State::Up);
    });
}

#[test]
fn planes_hand_over_what_comes_in_band() {
    in_namespace(|| {
        let ends = Arc::new(AtomicBool::new(false));
        let planes = ["127.0.0.1:4000", "127.0.0.2:4000"].map(|address| {
            let data = UdpSocket::bind(address).unwrap();
            option::set_hops_told(data.as_fd(), true).unwrap();
            data
        });
        let links = [("127.0.0.1", 1), ("127.0.0.2", 0)].map(|(local, peer)| {
            Link::start(&LinkSettings {
                peer: planes[peer].local_addr().unwrap(),
                receive: Receive::Handed,
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
            assert!(link.state().report().handed >= 2);
        }
        // A socket that does not tell the hops is no proof of where a packet comes from.
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

/// The link is not kept from its timers by whoever floods its port, nor by planes that hand over nonsense.
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
                // A full queue is no error of a sender on loopback.
                let _ = stranger.send_to(&[0x20; 24], "127.0.0.1:3784");
                inbox.offer(&[0x20; 24], stranger.local_addr().unwrap(), Some(255));
            }
        }
        wait_until("packets that got through", || one.state().report().received > before.received);
        let report = one.state().report();
        assert!(report.discards.total() > 100, "{report:?}");
        assert!(report.transmitted > before.transmitted);
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
        // Its peer goes on calling, and meets nobody.
        wait_until("strangers", || {
            port.discards().of(Discard::Stranger) + port.discards().of(Discard::NoSession) > 0
        });
        here.push(Link::start(&shared("127.0.0.3")).unwrap());
        wait_for(&there[1].state(), State::Up);
    });
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
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
                assert_eq!((peer, source.raw_os_error()), (ip("192.0.2.2"), Some(101)));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(LinkSettings::towards(ip("127.0.0.2")).unwrap().local.ip(), ip("127.0.0.1"));
        let _first = Link::start(&settings("127.0.0.1", "127.0.0.2")).unwrap();
        let message = refused(&settings("127.0.0.1", "127.0.0.3"));
        assert!(message.starts_with("bind() of 127.0.0.1:3784: Address already in use"), "{message}");
        let device =
            LinkSettings { device: Some("nosuch0".to_owned()), ..settings("127.0.0.5", "127.0.0.6") };
        assert!(refused(&device).starts_with("setsockopt(SO_BINDTODEVICE)"));
    });
}
