//! Sessions bound to a device, including sessions between link-local addresses.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::spread::DeviceName;
use fourtuple_forward::bfd::{Diagnostic, Link, LinkError, LinkReport, LinkSettings, PORT, State, Timers};
use fourtuple_forward::{Forward, Peer, Running};
use fourtuple_syscalls::{device, option};
use fourtuple_testing::in_namespace;
use fourtuple_testing::wire::{FAR, FAR_V4, NEAR, NEAR_V4, Wire};

/// A time limit that no working machine reaches.
const LONG: Duration = Duration::from_secs(60);

#[track_caller]
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < LONG, "{what} did not come about");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Timers with a short interval and a long detection time: a busy machine may delay a thread for seconds.
fn patient() -> Timers {
    let interval = Duration::from_millis(50);
    Timers::new(interval, interval, 200).unwrap()
}

fn device(name: &str) -> DeviceName {
    name.parse().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
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
