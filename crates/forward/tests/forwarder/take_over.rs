//! Takeover of a forwarder by another one while packets arrive: no packet is lost or sent twice. Here both are in one process;
//! `crates/cli/tests/commands/forward.rs` runs two processes.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::spread::{FlowKey, Selector};
use fourtuple_forward::bfd::{Diagnostic, State, Timers};
use fourtuple_forward::{
    Forward, ForwardError, HandoverError, Link, Peer, PlaneKind, Predecessor, Reception, Running, TakenOver,
    TakeoverOutcome, TakeoverSocket,
};
use fourtuple_syscalls::unix_socket;
use fourtuple_syscalls::unix_socket::Kind;
use fourtuple_testing::in_namespace;
use fourtuple_testing::stream::{LONG, Stream, socket};

use crate::{is_up, kinds, until};

fn restarts() -> usize {
    let number = std::env::var("FOURTUPLE_RESTARTS").ok();
    number.map_or(5, |number| number.parse().expect("FOURTUPLE_RESTARTS is a number"))
}

/// A directory that is removed on drop.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("fourtuple-{name}-{}", std::process::id()));
        // A killed process with the same ID may have left it.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    fn takeover_socket(&self) -> PathBuf {
        self.0.join("door")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Polls the takeover socket until a takeover completes or fails.
fn hand_over(running: &mut Running, takeover_socket: &mut TakeoverSocket) -> TakeoverOutcome {
    let begun = Instant::now();
    loop {
        match running.hand_over(takeover_socket).unwrap() {
            TakeoverOutcome::Nothing => assert!(begun.elapsed() < LONG, "no process takes over"),
            outcome => return outcome,
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Starts a new forwarder that takes over from the old one, and drives the old one until it is done.
fn replace(
    old: &mut Running,
    takeover_socket: &mut TakeoverSocket,
    new: &Forward,
    directory: &Directory,
) -> Result<TakenOver, ForwardError> {
    thread::scope(|scope| {
        let path = directory.takeover_socket();
        let new =
            scope.spawn(move || new.take_over(Predecessor::at(&path).unwrap().expect("a process listens")));
        let outcome = hand_over(old, takeover_socket);
        let result = new.join().unwrap();
        assert_eq!(matches!(outcome, TakeoverOutcome::Done { .. }), result.is_ok(), "{outcome:?}");
        result
    })
}

fn received(running: Running) -> u64 {
    let planes = running.drain().unwrap().remove(0);
    assert!(planes.iter().all(|plane| plane.dropped.is_empty()), "{planes:?}");
    planes.iter().map(|plane| plane.received).sum()
}

#[test]
fn no_packet_is_lost_when_a_forwarder_takes_over() {
    in_namespace(|| {
        for kind in kinds::kinds("no_packet_is_lost_when_a_forwarder_takes_over") {
            for replies in [false, true] {
                let directory = Directory::new("take-over");
                let mut streams = Stream::new(replies);
                let mut link = Link::new("127.0.0.1:0".parse().unwrap(), streams.target());
                link.spread = Selector::Key(FlowKey::whole(0, 4));
                link.replies = replies;
                let forward = Forward { kind, ..Forward::new(link, 3) };
                let (mut running, mut takeover_socket) =
                    (forward.start().unwrap(), TakeoverSocket::open(&directory.takeover_socket()).unwrap());
                let to = running.address(0).unwrap();
                let mut in_all = 0;
                let sent = streams.run(to, || {
                    for restart in 0..restarts() {
                        // The new forwarder may also have fewer planes than the old one has sockets.
                        let new = Forward { planes: 1 + restart % 3, ..forward.clone() };
                        let taken = replace(&mut running, &mut takeover_socket, &new, &directory).unwrap();
                        assert_eq!(taken.running.at_work().len(), new.planes);
                        in_all += received(std::mem::replace(&mut running, taken.running));
                        takeover_socket = taken.takeover_socket;
                    }
                    running.check().unwrap();
                });
                assert_eq!(in_all + received(running), sent, "{kind}");
                drop(takeover_socket);
                assert!(!directory.takeover_socket().exists());
            }
        }
    });
}

#[test]
fn a_misfit_is_refused_and_the_old_process_continues() {
    in_namespace(|| {
        let directory = Directory::new("refused");
        let (client, target, other) = (socket(), socket(), socket());
        let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
        let forward = Forward::new(link.clone(), 2);
        let (mut running, mut takeover_socket) =
            (forward.start().unwrap(), TakeoverSocket::open(&directory.takeover_socket()).unwrap());
        let to = running.address(0).unwrap();
        let with = |link: Link| Forward { links: vec![link], ..forward.clone() };
        let elsewhere = other.local_addr().unwrap();
        let wrong = [
            (with(Link { listen: elsewhere, ..link.clone() }), "does not listen at"),
            (with(Link { spread: Selector::Random, ..link.clone() }), "spread by hash"),
            (Forward { planes: 3, ..forward.clone() }, "fewer than the 3 planes"),
            (Forward { kind: PlaneKind::Batched, ..forward.clone() }, "put together"),
            (Forward { links: vec![link.clone(), link.clone()], ..forward.clone() }, "it has 1 links"),
            (with(Link::new(link.listen, to)), "itself"),
        ];
        for (new, why) in wrong {
            let error = replace(&mut running, &mut takeover_socket, &new, &directory).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
            client.send_to(b"x", to).unwrap();
            assert_eq!(target.recv(&mut [0; 4]).unwrap(), 1);
        }
        // The link names the real address and another route: settings that do not belong to the sockets may differ.
        let new = with(Link::new(to, elsewhere));
        let TakenOver { running: new, process, .. } =
            replace(&mut running, &mut takeover_socket, &new, &directory).unwrap();
        assert_eq!((new.address(0), process), (Some(to), std::process::id()));
        client.send_to(b"x", to).unwrap();
        assert_eq!(other.recv(&mut [0; 4]).unwrap(), 1);
    });
}

/// The first message of the takeover protocol.
const HELLO: &[u8] = b"fourtuple forward takes over, 1";

fn read_messages(line: impl AsFd, until: &str) {
    loop {
        let line = line.as_fd();
        assert!(fourtuple_syscalls::socket::wait_readable(line, Some(LONG)).unwrap());
        let mut buffer = [0; 65_536];
        let (count, _) = unix_socket::receive_all(line, &mut buffer).unwrap();
        if buffer[..count].starts_with(until.as_bytes()) {
            return;
        }
    }
}

#[test]
fn a_dead_successor_leaves_the_predecessor_running() {
    in_namespace(|| {
        for dies_when_ready in [false, true] {
            let directory = Directory::new("dies");
            let mut streams = Stream::new(true);
            let mut link = Link::new("127.0.0.1:0".parse().unwrap(), streams.target());
            link.spread = Selector::Key(FlowKey::whole(0, 4));
            link.replies = true;
            let mut running = Forward::new(link, 2).start().unwrap();
            let mut takeover_socket = TakeoverSocket::open(&directory.takeover_socket()).unwrap();
            let to = running.address(0).unwrap();
            let sent = streams.run(to, || {
                for _ in 0..restarts() {
                    let (outcome, ()) = thread::scope(|scope| {
                        let path = directory.takeover_socket();
                        let dying = scope.spawn(move || {
                            let line = Kind::Packets.connect(&path).unwrap();
                            unix_socket::send(line.as_fd(), HELLO, None).unwrap();
                            read_messages(&line, "that is all");
                            if dies_when_ready {
                                unix_socket::send(line.as_fd(), b"ready", None).unwrap();
                                read_messages(&line, "that is all");
                            }
                        });
                        (hand_over(&mut running, &mut takeover_socket), dying.join().unwrap())
                    });
                    assert!(
                        matches!(outcome, TakeoverOutcome::Failed(HandoverError::Gone { .. })),
                        "{outcome:?}"
                    );
                    assert_eq!(running.at_work(), [0, 1]);
                }
            });
            assert_eq!(received(running), sent);
        }
    });
}

#[test]
fn invalid_messages_are_not_a_takeover() {
    in_namespace(|| {
        let directory = Directory::new("nonsense");
        let target = socket();
        let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
        let mut running = Forward::new(link, 1).start().unwrap();
        let mut takeover_socket = TakeoverSocket::open(&directory.takeover_socket()).unwrap();
        assert!(matches!(running.hand_over(&mut takeover_socket).unwrap(), TakeoverOutcome::Nothing));
        for said in [&b"ready?"[..], b"fourtuple forward takes over, 2", b"\xff\0", &[b'x'; 60_000]] {
            let line = Kind::Packets.connect(&directory.takeover_socket()).unwrap();
            unix_socket::send(line.as_fd(), said, None).unwrap();
            let outcome = hand_over(&mut running, &mut takeover_socket);
            assert!(
                matches!(outcome, TakeoverOutcome::Failed(HandoverError::Unexpected { .. })),
                "{outcome:?}"
            );
            read_messages(&line, "no\n");
        }
        drop(Kind::Packets.connect(&directory.takeover_socket()).unwrap());
        let outcome = hand_over(&mut running, &mut takeover_socket);
        assert!(matches!(outcome, TakeoverOutcome::Failed(HandoverError::Gone { .. })), "{outcome:?}");
        running.check().unwrap();
    });
}

/// Waits until both sessions have received further control packets.
#[track_caller]
fn wait_for_control_packets(one: &Running, other: &Running) {
    let control_packets = |running: &Running| running.bfd()[0].report.received;
    let before = (control_packets(one), control_packets(other));
    until(|| control_packets(one) >= before.0 + 2 && control_packets(other) >= before.1 + 2);
}

#[test]
fn the_bfd_peer_of_a_forwarder_notices_nothing() {
    in_namespace(|| {
        let directory = Directory::new("bfd");
        let target: SocketAddr = ([127, 0, 0, 2], 4000).into();
        let start = |here: [u8; 4], there: SocketAddr| {
            let mut link = Link::new((here, 0).into(), there);
            // The detection multiplier is high enough for any busy machine.
            let often = Duration::from_millis(100);
            let timers = Timers::new(often, often, 200).unwrap();
            link.bfd = Some(Peer { local: Some(here.into()), timers, ..Peer::new(there.ip()) });
            Forward::new(link, 1)
        };
        let one = start([127, 0, 0, 1], target);
        let other = start([127, 0, 0, 2], ([127, 0, 0, 1], 4000).into()).start().unwrap();
        let (mut running, mut takeover_socket) =
            (one.start().unwrap(), TakeoverSocket::open(&directory.takeover_socket()).unwrap());
        until(|| is_up(&running) && is_up(&other));
        let before = other.bfd()[0].report.clone();
        for _ in 0..restarts() {
            let taken = replace(&mut running, &mut takeover_socket, &one, &directory).unwrap();
            (running, takeover_socket) = (taken.running, taken.takeover_socket);
            wait_for_control_packets(&running, &other);
        }
        let (here, there) = (running.bfd()[0].report.clone(), other.bfd()[0].report.clone());
        assert_eq!((there.state, there.transitions), (State::Up, before.transitions));
        assert_eq!(there.remote_discriminator, before.remote_discriminator);
        assert_eq!((here.state, here.ups, here.downs), (State::Up, 1, 0));
        // A successor without a session for this peer ends the session with AdminDown, long before 200 packets are missing.
        let mut without = one.clone();
        without.links[0].bfd = None;
        let taken = replace(&mut running, &mut takeover_socket, &without, &directory).unwrap();
        until(|| !is_up(&other));
        let there = other.bfd()[0].report.clone();
        assert_eq!((there.state, there.diagnostic), (State::Down, Diagnostic::NeighborSignaledDown));
        assert!(taken.running.bfd().is_empty());
    });
}

#[test]
fn an_in_band_session_survives_a_takeover() {
    in_namespace(|| {
        // Two sockets selected by hash have no filter: the planes look for control packets.
        let spreads = [
            (Selector::Random, 2, Reception::Filter),
            (Selector::Hash, 1, Reception::Filter),
            (Selector::Hash, 2, Reception::Planes),
        ];
        for (spread, planes, reception) in spreads {
            let directory = Directory::new("in-band");
            let (here, there): (SocketAddr, SocketAddr) =
                (([127, 0, 0, 1], 4000).into(), ([127, 0, 0, 2], 4000).into());
            let mut streams = Stream::new(false);
            let start = |here, there, to| {
                let often = Duration::from_millis(100);
                let timers = Timers::new(often, often, 200).unwrap();
                let bfd = Some(Peer { timers, ..Peer::in_band(there) });
                Forward::new(Link { bfd, spread, ..Link::new(here, to) }, planes)
            };
            let one = start(here, there, streams.target());
            let other = start(there, here, socket().local_addr().unwrap()).start().unwrap();
            let (mut running, mut takeover_socket) =
                (one.start().unwrap(), TakeoverSocket::open(&directory.takeover_socket()).unwrap());
            until(|| is_up(&running) && is_up(&other));
            let before = other.bfd()[0].report.clone();
            let mut in_all = 0;
            let sent = streams.run(here, || {
                for _ in 0..restarts() {
                    let taken = replace(&mut running, &mut takeover_socket, &one, &directory).unwrap();
                    in_all += received(std::mem::replace(&mut running, taken.running));
                    takeover_socket = taken.takeover_socket;
                    assert_eq!(running.bfd()[0].reception, reception, "{spread}");
                    wait_for_control_packets(&running, &other);
                }
            });
            let (mine, theirs) = (running.bfd()[0].report.clone(), other.bfd()[0].report.clone());
            assert_eq!((theirs.state, theirs.transitions), (State::Up, before.transitions), "{spread}");
            assert_eq!((mine.state, mine.ups, mine.downs), (State::Up, 1, 0), "{spread}");
            assert_eq!(in_all + received(running), sent, "{spread}");
        }
    });
}

#[test]
fn in_band_sessions_neither_begin_nor_end_with_a_successor() {
    in_namespace(|| {
        let directory = Directory::new("in-band-refused");
        let (client, target) = (socket(), socket());
        let without = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
        // No process replies at this address.
        let peer = Peer::in_band(([127, 0, 0, 9], 4000).into());
        let with = Link { spread: Selector::Random, bfd: Some(peer), ..without.clone() };
        let without = Link { spread: Selector::Random, ..without };
        for (first, second, why) in [(&without, &with, "cannot begin"), (&with, &without, "have to go on")] {
            let (first, second) = (Forward::new(first.clone(), 1), Forward::new(second.clone(), 1));
            let (mut running, mut takeover_socket) =
                (first.start().unwrap(), TakeoverSocket::open(&directory.takeover_socket()).unwrap());
            let error = replace(&mut running, &mut takeover_socket, &second, &directory).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
            client.send_to(b"x", running.address(0).unwrap()).unwrap();
            assert_eq!(target.recv(&mut [0; 64]).unwrap(), 1);
        }
    });
}
