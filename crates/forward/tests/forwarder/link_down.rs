//! The failure of a link to a next hop: two veth wires, with a next hop behind each.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use crate::kinds::kinds;
use fourtuple::spread::FlowKey;
use fourtuple_forward::bfd::{self, Diagnostic, LinkSettings, State, Timers};
use fourtuple_forward::{Drop, Forward, Link, Peer, PlaneCounts, PlaneKind, Routes, Rule, Running};
use fourtuple_syscalls::{device, netns, socket};
use fourtuple_testing::{each_in_namespace, in_namespace, skip};

/// A time limit that no working machine reaches.
const LONG: Duration = Duration::from_secs(60);
/// The port at which next hops receive.
const PORT: u16 = 5000;
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
            UdpSocket::bind(("0.0.0.0", PORT)).unwrap()
        });
        hop.set_nonblocking(true).unwrap();
        Some(Neighbour { namespace, here, there, hop })
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::new(self.there, PORT)
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

#[track_caller]
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < LONG, "{what} did not come about");
        thread::sleep(Duration::from_millis(5));
    }
}

fn is_up(running: &Running) -> bool {
    running.bfd()[0].report.state == State::Up
}

fn counts(running: &Running) -> PlaneCounts {
    running.counts(0).remove(0)
}

fn link_downs(running: &Running) -> u64 {
    let dropped = counts(running).dropped;
    dropped.iter().find(|(reason, _)| *reason == Drop::LinkDown).map_or(0, |(_, number)| *number)
}

/// Starts a forwarder that sends packets with the key to the watched neighbour, and all others to `default`.
fn start(kind: PlaneKind, watched: &Neighbour, default: Option<SocketAddr>) -> Running {
    let rules = [Rule::Key(WATCHED.into(), watched.address())];
    let mut link = Link::new("127.0.0.1:0".parse().unwrap(), watched.address());
    link.routes = Routes::new(default, &rules, Some(FlowKey::whole(0, 1))).unwrap();
    let peer = Peer { timers: timers(), local: Some(watched.here), ..Peer::new(watched.there) };
    link.bfd = Some(peer);
    Forward { kind, ..Forward::new(link, 1) }.start().unwrap()
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
        each_in_namespace(kinds(test), |kind| {
            let (Some(watched), Some(other)) = (Neighbour::open(test, 1), Neighbour::open(test, 2)) else {
                return;
            };
            let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
            let running = start(kind, &watched, Some(other.address()));
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
        let cases: Vec<_> = kinds(test).into_iter().flat_map(|kind| [(kind, true), (kind, false)]).collect();
        each_in_namespace(cases, |(kind, has_default)| {
            let Some(watched) = Neighbour::open(test, 1) else { return };
            let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
            let default = has_default.then(|| watched.address());
            let running = start(kind, &watched, default);
            let there = watched.speak();
            wait_until("up", || is_up(&running));
            arrives(&running, &sender, &watched);
            inside(&watched.namespace, || device::set_down("far1").unwrap());
            wait_until("down", || !is_up(&running));
            let before = counts(&running);
            assert_eq!(link_downs(&running), 0, "{kind}");
            for _ in 0..5 {
                sender.send_to(&[WATCHED], running.address(0).unwrap()).unwrap();
            }
            wait_until("the drops", || link_downs(&running) == 5);
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
