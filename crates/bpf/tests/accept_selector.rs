//! Selectors for groups of listeners that know nothing of the maps: the choice, the counts, and the end of both.
#![forbid(unsafe_code)]

mod group;

use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use fourtuple_bpf::fix_accept::{GroupSelector, Heartbeat, SELECTOR, Selection};
use fourtuple_bpf::{Chooser, Control, FixAccept};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket;
use fourtuple_testing::in_namespace;
use fourtuple_testing::stream::Loopback;

use self::group::{DEADLINE, listen, loaded, until};

/// A thread that sends heartbeats beside the test, which may wait for a CPU between its own heartbeat and a connect.
struct Beats {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Beats {
    fn start(fix: &FixAccept) -> Beats {
        let (heartbeat, over) = (fix.heartbeat(), Arc::new(AtomicBool::new(false)));
        heartbeat.beat();
        let is_over = Arc::clone(&over);
        let thread = thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                heartbeat.beat();
                thread::sleep(Duration::from_millis(Heartbeat::TIMEOUT_MS / 20));
            }
        });
        Beats { over, thread: Some(thread) }
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}

/// Listeners of one group whose selector is attached, with the entries from `first` on.
struct Server {
    fix: FixAccept,
    beats: Option<Beats>,
    selector: GroupSelector,
    listeners: Vec<Option<OwnedFd>>,
    address: SocketAddr,
}

impl Server {
    fn open(test: &str, count: usize, selection: Selection) -> Option<Server> {
        let mut fix = loaded(test, FixAccept::attach())?;
        let (first, address) = listen("127.0.0.1", 0);
        let mut listeners = vec![Some(first)];
        listeners.extend((1..count).map(|_| Some(listen("127.0.0.1", address.port()).0)));
        let selector = fix.selector(selection, None).unwrap();
        for (entry, listener) in listeners.iter().flatten().enumerate() {
            let found = fix.learner().learn(listener.as_fd()).unwrap();
            assert_eq!((found.members as usize, found.program.as_ref()), (count, None));
            fix.enter(entry, listener.as_fd(), &found, true).unwrap();
        }
        selector.set_members(&(0..count).collect::<Vec<_>>());
        selector.attach(listeners[0].as_ref().unwrap().as_fd()).unwrap();
        let beats = Some(Beats::start(&fix));
        Some(Server { fix, beats, selector, listeners, address })
    }

    fn connect(&self) -> TcpStream {
        // The thread of the heartbeats may wait for a CPU for longer than the timeout.
        self.fix.heartbeat().beat();
        TcpStream::connect(self.address).unwrap()
    }

    fn open_counts(&self) -> Vec<u64> {
        (0..self.listeners.len()).map(|entry| self.fix.counts(entry).unwrap().open).collect()
    }

    fn chosen(&self) -> Vec<u64> {
        (0..self.listeners.len()).map(|entry| self.fix.counts(entry).unwrap().chosen).collect()
    }

    fn accept(&self, listener: usize) -> OwnedFd {
        let listener = self.listeners[listener].as_ref().unwrap();
        assert!(socket::wait_readable(listener.as_fd(), Some(DEADLINE)).unwrap(), "none is queued");
        socket::accept(listener.as_fd()).unwrap()
    }
}

#[test]
fn the_shortest_queue_gets_the_connection() {
    in_namespace(|| {
        let test = "the_shortest_queue_gets_the_connection";
        let Some(server) = Server::open(test, 4, Selection::LeastBusy) else { return };
        // Nothing is accepted, so that each round adds one connection to each queue.
        let mut clients = Vec::new();
        for round in 1..=5 {
            for _ in 0..4 {
                clients.push(server.connect());
                let queued = clients.len() as u64;
                until("it is queued", || server.open_counts().iter().sum::<u64>() == queued);
            }
            assert_eq!(server.chosen(), [round; 4]);
        }
        // An accepted connection is not in the queue.
        let _accepted = server.accept(2);
        clients.push(server.connect());
        assert_eq!(server.chosen(), [5, 5, 6, 5]);
        assert_eq!(server.selector.left(), (0, 0));
    });
}

#[test]
fn open_connections_break_ties() {
    in_namespace(|| {
        let test = "open_connections_break_ties";
        let Some(server) = Server::open(test, 3, Selection::LeastBusy) else { return };
        // One connection of each listener stays open.
        let mut kept: Vec<Option<(TcpStream, OwnedFd)>> = vec![None, None, None];
        for round in 1..=3 {
            let before = server.open_counts();
            let client = server.connect();
            until("it is queued", || server.open_counts().iter().sum::<u64>() == round);
            let index = (0..3).find(|index| server.open_counts()[*index] > before[*index]).unwrap();
            kept[index] = Some((client, server.accept(index)));
        }
        assert_eq!(server.chosen(), [1, 1, 1]);
        // The listener with a connection less gets the next connection.
        for index in [2, 0, 1, 1] {
            let chosen = server.chosen()[index];
            kept[index] = None;
            until("it is closed", || server.open_counts()[index] == 0);
            let client = server.connect();
            assert_eq!(server.chosen()[index], chosen + 1);
            kept[index] = Some((client, server.accept(index)));
            until("each has one", || server.open_counts() == [1, 1, 1]);
        }
    });
}

#[test]
fn counts_end_with_the_connection_in_every_way() {
    in_namespace(|| {
        let test = "counts_end_with_the_connection_in_every_way";
        let Some(server) = Server::open(test, 1, Selection::LeastBusy) else { return };
        for round in 0..60 {
            let client = server.connect();
            until("it is queued", || server.open_counts() == [1]);
            match round % 4 {
                // The server closes first, the client closes first, the client resets, the server resets.
                0 => drop((server.accept(0), client)),
                1 => {
                    let accepted = server.accept(0);
                    drop(client);
                    drop(accepted);
                }
                2 => {
                    option::set_reset_on_close(client.as_fd()).unwrap();
                    drop(client);
                    let _accepted = server.accept(0);
                }
                _ => {
                    let accepted = server.accept(0);
                    option::set_reset_on_close(accepted.as_fd()).unwrap();
                    drop(accepted);
                }
            }
            until("it is closed", || server.open_counts() == [0]);
        }
        assert_eq!(server.fix.counts(0).unwrap().connections, 60);
    });
}

#[test]
fn without_a_heartbeat_the_hash_chooses() {
    in_namespace(|| {
        let test = "without_a_heartbeat_the_hash_chooses";
        let Some(mut server) = Server::open(test, 2, Selection::LeastBusy) else { return };
        let _one = server.connect();
        assert_eq!(server.chosen().iter().sum::<u64>(), 1);
        server.beats = None;
        thread::sleep(Duration::from_millis(Heartbeat::TIMEOUT_MS + 50));
        let _two = TcpStream::connect(server.address).unwrap();
        assert_eq!((server.chosen().iter().sum::<u64>(), server.selector.left().0), (1, 1));
        server.beats = Some(Beats::start(&server.fix));
        let _three = server.connect();
        assert_eq!(server.chosen().iter().sum::<u64>(), 2);
    });
}

#[test]
fn a_closed_listener_leaves_by_itself() {
    in_namespace(|| {
        let test = "a_closed_listener_leaves_by_itself";
        let Some(mut server) = Server::open(test, 3, Selection::LeastBusy) else { return };
        server.listeners[1] = None;
        let _clients: Vec<_> = (0..30).map(|_| server.connect()).collect();
        let chosen = server.chosen();
        assert_eq!((chosen[1], chosen[0] + chosen[2]), (0, 30), "{chosen:?}");
        // Another listener gets the entry, with counts from 0.
        let (listener, _) = listen("127.0.0.1", server.address.port());
        let found = server.fix.learner().learn(listener.as_fd()).unwrap();
        assert_eq!(found.program.as_ref().map(|program| program.name.as_str()), Some(SELECTOR));
        assert_eq!(found.program.as_ref().map(|program| program.id), Some(server.selector.id().unwrap()));
        server.fix.leave(1);
        server.fix.enter(1, listener.as_fd(), &found, true).unwrap();
        server.listeners[1] = Some(listener);
        let _more: Vec<_> = (0..10).map(|_| server.connect()).collect();
        assert_eq!(server.chosen()[1], 10, "its queue was empty");
        // All are closed but one that the selector does not know: the hash finds this one.
        server.listeners[0] = None;
        server.listeners[1] = None;
        server.listeners[2] = None;
        let (_unknown, _) = listen("127.0.0.1", server.address.port());
    });
}

#[test]
fn a_detached_group_has_the_hash_again() {
    in_namespace(|| {
        let test = "a_detached_group_has_the_hash_again";
        let one_place = Selection::Place(Chooser::Key { offset: 0, width: 1, mask: 0xff });
        let Some(server) = Server::open(test, 16, one_place) else { return };
        // A SYN has no payload, so that the key is 0.
        let _clients: Vec<_> = (0..40).map(|_| server.connect()).collect();
        assert_eq!((server.chosen()[0], server.chosen().iter().sum::<u64>()), (40, 40));
        let first = server.listeners[0].as_ref().unwrap();
        option::detach_group_selector(first.as_fd()).unwrap();
        assert!(option::detach_group_selector(first.as_fd()).is_err(), "ENOENT");
        assert_eq!(server.fix.learner().learn(first.as_fd()).unwrap().program, None);
        let _more: Vec<_> = (0..100).map(|_| server.connect()).collect();
        let entered = |entry: usize| server.fix.counts(entry).unwrap().connections;
        until("all entered", || (0..16).map(entered).sum::<u64>() == 140);
        assert!((1..16).filter(|entry| entered(*entry) > 0).count() > 3);
        assert_eq!(server.chosen().iter().sum::<u64>(), 40);
    });
}

#[test]
fn datagrams_go_by_key_queue_and_control_filter() {
    in_namespace(|| {
        let test = "datagrams_go_by_key_queue_and_control_filter";
        let Some(mut fix) = loaded(test, FixAccept::attach()) else { return };
        let bind = |port| {
            let wanted = SocketAddr::from(([127, 0, 0, 1], port));
            let member = socket::open(socket::Transport::Udp, wanted, true).unwrap();
            assert_eq!(option::set_reuse_port(member.as_fd()).unwrap(), Answer::Done);
            socket::bind(member.as_fd(), wanted).unwrap();
            member
        };
        let first = bind(0);
        let address = socket::local_address(first.as_fd()).unwrap();
        let sockets: Vec<_> = std::iter::once(first).chain((0..3).map(|_| bind(address.port()))).collect();
        let key = Chooser::Key { offset: 0, width: 1, mask: 0xff };
        let by_key = fix.selector(Selection::Place(key), Some(Control::SourcePort(9_999))).unwrap();
        let by_queue = fix.selector(Selection::LeastBusy, None).unwrap();
        for (entry, member) in sockets.iter().enumerate() {
            let found = fix.learner().learn(member.as_fd()).unwrap();
            fix.enter(entry, member.as_fd(), &found, true).unwrap();
        }
        let chosen = |fix: &FixAccept| [0, 1, 2, 3].map(|entry| fix.counts(entry).unwrap().chosen);
        by_key.set_members(&[0, 1, 2, 3]);
        by_key.attach(sockets[0].as_fd()).unwrap();
        let _beats = Beats::start(&fix);
        let (heartbeat, loopback) = (fix.heartbeat(), Loopback::open());
        let send = |client: &UdpSocket, bytes: Range<u8>| {
            for byte in bytes {
                // As for a connect.
                heartbeat.beat();
                assert_eq!(client.send_to(&[byte], address).unwrap(), 1);
            }
            loopback.flush();
        };
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        send(&client, 0..30);
        // The first socket is for control packets.
        assert_eq!(chosen(&fix), [0, 10, 10, 10]);
        let control = UdpSocket::bind("127.0.0.1:9999").unwrap();
        send(&control, 0..7);
        assert_eq!(chosen(&fix), [7, 10, 10, 10]);
        by_queue.set_members(&[0, 1, 2, 3]);
        by_queue.attach(sockets[0].as_fd()).unwrap();
        send(&client, 0..3);
        assert_eq!(chosen(&fix), [10, 10, 10, 10], "the first socket has the shortest queue");
        send(&client, 0..4);
        assert_eq!(chosen(&fix), [11, 11, 11, 11]);
    });
}

#[test]
fn a_socket_without_a_group_is_known_as_such() {
    in_namespace(|| {
        let Some(fix) = loaded("a_socket_without_a_group_is_known_as_such", FixAccept::attach()) else {
            return;
        };
        let (alone, _) = fourtuple_testing::listener("127.0.0.1", 1);
        assert_eq!(fix.learner().learn(alone.as_fd()).unwrap().group, None);
        let file = std::fs::File::open("/proc/self/status").unwrap();
        assert!(fix.learner().learn(file.as_fd()).is_err(), "no socket");
    });
}
