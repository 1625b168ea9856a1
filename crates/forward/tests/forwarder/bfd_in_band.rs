//! In-band BFD: two forwarders over a wire, with control packets and data at one port.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::flood::Flood;
use crate::kinds::kinds;
use fourtuple::spread::{ControlFilter, FlowKey, Selector, UdpGroup};
use fourtuple_forward::bfd::{self, Diagnostic, Discard, LinkSettings, Receive, State, Timers};
use fourtuple_forward::{
    CONTROL, Drop, Forward, InBand, Link, Peer, PlaneKind, Reception, Running, SessionReport,
};
use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::{neighbour, option, socket};
use fourtuple_testing::in_namespace;
use fourtuple_testing::loopback::Loopback;
use fourtuple_testing::wire::{FAR_V4, FAR_V6, NEAR_V4, NEAR_V6, Wire};

/// A time limit that no working machine reaches.
const LONG: Duration = Duration::from_secs(60);
/// The port of data and of control packets, at both ends.
const PORT: u16 = 4000;

fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

/// Timers with a short interval and a long detection time: a busy machine may delay a thread for seconds.
fn patient() -> Timers {
    Timers::new(ms(50), ms(50), 200).unwrap()
}

#[track_caller]
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < LONG, "{what} did not come about");
        thread::sleep(ms(5));
    }
}

fn socket_at(address: impl std::net::ToSocketAddrs) -> UdpSocket {
    let socket = UdpSocket::bind(address).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

/// Returns a link with an in-band BFD peer.
fn link(here: SocketAddr, there: SocketAddr, to: SocketAddr, spread: Selector, timers: Timers) -> Link {
    let peer = Peer { timers, ..Peer::in_band(there) };
    Link { bfd: Some(peer), spread, ..Link::new(here, to) }
}

fn start(link: Link, kind: PlaneKind, planes: usize) -> Running {
    Forward { kind, ..Forward::new(link, planes) }.start().unwrap()
}

fn session(running: &Running) -> SessionReport {
    let mut sessions = running.bfd();
    assert_eq!(sessions.len(), 1);
    sessions.remove(0)
}

fn is_up(running: &Running) -> bool {
    session(running).report.state == State::Up
}

/// Sends numbered packets from `sender`, and checks that `target` receives exactly these packets.
fn through(sender: &UdpSocket, to: SocketAddr, target: &UdpSocket) {
    let mut room = [0; 2048];
    for number in 0..200_u32 {
        let mut payload = [0x20; 100];
        payload[..4].copy_from_slice(&number.to_be_bytes());
        sender.send_to(&payload, to).unwrap();
        assert_eq!(target.recv(&mut room).unwrap(), payload.len());
        assert_eq!(room[..100], payload);
    }
}

/// Tests that both ends come up and forward data, and that a forwarder detects the end of its peer.
fn two_forwarders(test: &str, spread: Selector, planes: usize, expected: Reception) {
    let Some(wire) = Wire::open(test) else { return };
    for (here, there) in [(NEAR_V4, FAR_V4), (NEAR_V6, FAR_V6)] {
        for kind in kinds(test) {
            let (near, far) = (SocketAddr::new(here, PORT), SocketAddr::new(there, PORT));
            let near_target = socket_at((here, 0));
            let far_target = wire.far_away(|| socket_at((there, 0)));
            let one =
                start(link(near, far, near_target.local_addr().unwrap(), spread, patient()), kind, planes);
            let other = wire.far_away(|| {
                start(link(far, near, far_target.local_addr().unwrap(), spread, patient()), kind, planes)
            });
            wait_until("up", || is_up(&one) && is_up(&other));
            assert_eq!(session(&one).reception, expected);
            // Data may begin with any bytes, also when a neighbour at the far end of the wire sends it.
            let far_sender = wire.far_away(|| socket_at((there, 0)));
            through(&far_sender, near, &near_target);
            through(&socket_at((here, 0)), far, &far_target);
            // A packet that looks like a control packet but comes from beyond the link is data.
            let mut room = [0; 100];
            let control = [&[0x20, 0xc0, 3, 24][..], &[1; 20]].concat();
            option::set_hops(far_sender.as_fd(), 254).unwrap();
            far_sender.send_to(&control, near).unwrap();
            assert_eq!(near_target.recv(&mut room).unwrap(), control.len());
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
            assert!(near_target.recv(&mut room).is_err(), "{kind}: something else was forwarded");
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
        let (near, far) = (SocketAddr::new(NEAR_V4, PORT), SocketAddr::new(FAR_V4, PORT));
        let peer = wire.far_away(|| socket_at(far));
        option::set_receive_hops(peer.as_fd(), true).unwrap();
        let target = socket_at((NEAR_V4, 0));
        let timers = Timers::new(ms(100), ms(100), 3).unwrap();
        let to = target.local_addr().unwrap();
        let running = start(link(near, far, to, Selector::Random, timers), PlaneKind::Batched, 2);
        // Control packets and data share one 4-tuple, and control packets have the full hop limit.
        let mut batch = Batch::new(1, 100);
        assert!(socket::wait_readable(peer.as_fd(), Some(LONG)).unwrap(), "nothing came");
        batch.receive(peer.as_fd()).unwrap();
        let control_packets = batch.get(0).unwrap();
        assert_eq!((control_packets.from(), control_packets.hops), (Some(near), Some(255)));
        assert!(CONTROL.finds(control_packets.bytes, control_packets.hops, near.port()));
        let packet = fourtuple_forward::bfd::Packet::parse(control_packets.bytes).unwrap();
        // The peer sends one packet in state Init with an interval of 20 ms, and then nothing.
        let answer = fourtuple_forward::bfd::Packet {
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
        let target = socket_at(here);
        let peer = Peer {
            in_band: Some(InBand { port: 9, filter: false }),
            ..Peer::in_band("127.0.0.2:9".parse().unwrap())
        };
        let link = Link {
            bfd: Some(peer),
            spread: Selector::Random,
            ..Link::new(here, target.local_addr().unwrap())
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
            let sender = socket_at(address);
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
            assert!(lost > 0, "the data found room: {address}");
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
        let (near, far) = (SocketAddr::new(NEAR_V4, PORT), SocketAddr::new(FAR_V4, PORT));
        let link = link(near, far, SocketAddr::new(FAR_V4, 5000), Selector::Random, patient());
        let running = Forward { work: Duration::from_micros(20), ..Forward::new(link, 2) }.start().unwrap();
        let data: OwnedFd = wire.far_away(|| socket_at(far)).into();
        let receive = Receive::InBand { socket: Arc::new(data.try_clone().unwrap()), is_steered: true };
        let settings = LinkSettings {
            local: far,
            peer: near,
            timers: patient(),
            receive,
            ..LinkSettings::new(FAR_V4, NEAR_V4)
        };
        let there = wire.far_away(|| bfd::Link::start(&settings).unwrap());
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
