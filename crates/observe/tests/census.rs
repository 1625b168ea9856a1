//! The census of a network namespace, on real sockets.

use std::collections::BTreeMap;
use std::env;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{self, Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fourtuple_observe::host::namespace::{self, NamespaceError, Target};
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_record::snapshot::{Connections, HeldPort, Owner, Part, Snapshot};
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{netns, option};
use fourtuple_testing::process::{start, undisturbed};
use fourtuple_testing::{StopOnDrop, in_namespace, keep_time_wait, set_sysctl, skip};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn snapshot() -> Snapshot {
    undisturbed(|| Reader::new(Path::new("/")).read())
}

fn connections() -> Connections {
    match snapshot().connections {
        Part::Seen(connections) => connections,
        Part::Hidden(reason) => panic!("{reason}"),
    }
}

/// Reads until a condition holds: the kernel closes connections after the call.
fn until(condition: impl Fn(&Connections) -> bool) -> Connections {
    let begun = Instant::now();
    loop {
        let found = connections();
        if condition(&found) {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{found:?}");
    }
}

#[test]
fn held_ports_have_a_kind_and_a_process() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20019");
        set_sysctl("net.ipv4.ip_local_reserved_ports", "19001,19003,19005,19007,19009,20010");
        let bound = socket::open(Transport::Tcp, SocketAddr::new(LOOPBACK, 0), false).unwrap();
        socket::bind(bound.as_fd(), SocketAddr::new(LOOPBACK, 20_001)).unwrap();
        let _listener = TcpListener::bind((LOOPBACK, 20_002)).unwrap();
        let _udp = UdpSocket::bind((LOOPBACK, 20_003)).unwrap();
        let _reserved = TcpListener::bind((LOOPBACK, 20_010)).unwrap();
        let _outside = TcpListener::bind((LOOPBACK, 20_020)).unwrap();
        let is_own = |port: &HeldPort| port.owner.as_ref().is_some_and(|owner| owner.pid == process::id());
        let held = until(|found| found.held.len() == 3 && found.held.iter().all(is_own)).held;
        let found: Vec<_> = held.iter().map(|port| (port.port, port.address, port.kind.as_str())).collect();
        let expected =
            [(20_001, LOOPBACK, "bound"), (20_002, LOOPBACK, "listening"), (20_003, LOOPBACK, "udp")];
        assert_eq!(found, expected);
        let owner = held[0].owner.as_ref().unwrap();
        assert_eq!(owner.sockets, 1);
        let found = connections();
        assert!(found.tuples.is_empty(), "a bound socket is not a connection");
        assert_eq!((found.held_tcp, found.held_tcp_low_parity, found.held_bound), (2, 1, 1));
    });
}

#[test]
fn close_wait_names_the_process_and_the_peer() {
    in_namespace(|| {
        let listener = TcpListener::bind((LOOPBACK, 4_000)).unwrap();
        let remote = listener.local_addr().unwrap();
        let leaked: Vec<TcpStream> = (0..3).map(|_| TcpStream::connect(remote).unwrap()).collect();
        for _ in &leaked {
            drop(listener.accept().unwrap());
        }
        let found = until(|found| found.close_wait.len() == 1 && found.close_wait[0].owner.sockets == 3);
        let leak = &found.close_wait[0];
        assert_eq!((leak.owner.pid, leak.remote, leak.old), (process::id(), remote, 0));
        assert!(leak.oldest_ns < 60_000_000_000, "{leak:?}");
    });
}

#[test]
fn time_wait_belongs_to_the_side_that_closed_first() {
    in_namespace(|| {
        let address = SocketAddr::new(LOOPBACK, 4_000);
        let time_wait = |states: &BTreeMap<String, u64>| states.get("time-wait").copied().unwrap_or(0);
        let closed = || {
            keep_time_wait();
            let begun = Instant::now();
            let listener = TcpListener::bind(address).unwrap();
            for number in 0..10 {
                // connect() must not choose a port again whose TIME_WAIT socket is the server's: the kernel's search begins where connects to
                // the same address in any namespace have left it.
                let port = 20_000 + number;
                set_sysctl("net.ipv4.ip_local_port_range", &format!("{port} {port}"));
                let client = TcpStream::connect(address).unwrap();
                let server = listener.accept().unwrap().0;
                // The client closes 7 connections, the server 3.
                let (first, mut second) = if number < 7 { (client, server) } else { (server, client) };
                drop(first);
                assert_eq!(second.read(&mut [0]).unwrap(), 0);
            }
            set_sysctl("net.ipv4.ip_local_port_range", "20000 20099");
            let found = until(|found| time_wait(&found.states) == 10);
            (begun.elapsed() < Duration::from_secs(10)).then_some(found)
        };
        // The rates are of the last 10 s: where a busy host took longer, another namespace begins anew.
        let again = |_| {
            closed().or_else(|| {
                netns::enter_new().unwrap();
                None
            })
        };
        let found = (0..6).find_map(again).expect("all closes in the last 10 s");
        assert_eq!((found.tuples.len(), found.services.len()), (1, 1));
        let (tuple, service) = (&found.tuples[0], &found.services[0]);
        assert_eq!((time_wait(&tuple.states), tuple.in_use, tuple.source), (7, 7, LOOPBACK));
        assert_eq!((tuple.destination, tuple.closes_per_s), (address, 0.7));
        assert_eq!((time_wait(&service.states), service.port, service.closes_per_s), (3, 4_000, 0.3));
    });
}

#[test]
fn ipv4_mapped_addresses_count_as_ipv4() {
    in_namespace(|| {
        let listener = TcpListener::bind("[::]:4000").unwrap();
        let mapped: SocketAddr = "[::ffff:127.0.0.1]:4000".parse().unwrap();
        let _connected = ["127.0.0.1:4000".parse().unwrap(), mapped, "[::1]:4000".parse().unwrap()]
            .map(|address: SocketAddr| (TcpStream::connect(address).unwrap(), listener.accept().unwrap()));
        let found = connections();
        let tuples: Vec<_> = found.tuples.iter().map(|tuple| (tuple.destination, tuple.in_use)).collect();
        let (v4, v6) = ("127.0.0.1:4000".parse().unwrap(), "[::1]:4000".parse().unwrap());
        assert_eq!(tuples, [(v4, 2), (v6, 1)]);
        assert_eq!(found.services[0].states["established"], 3);
        assert!(found.tuples.iter().all(|tuple| tuple.owners.iter().any(|owner| owner.pid == process::id())));
    });
}

#[test]
fn lists_have_the_largest_and_sums_of_the_rest() {
    in_namespace(|| {
        let small: Vec<_> = (4_000..4_100).map(|port| TcpListener::bind((LOOPBACK, port)).unwrap()).collect();
        let large = TcpListener::bind((LOOPBACK, 9_000)).unwrap();
        let connect = |to: &TcpListener| TcpStream::connect(to.local_addr().unwrap()).unwrap();
        let _clients: Vec<_> = small.iter().map(connect).chain([(); 3].map(|()| connect(&large))).collect();
        let found = until(|found| found.states == BTreeMap::from([("established".to_owned(), 206)]));
        assert_eq!((found.tuples.len(), found.tuples_left_out), (100, 1));
        assert_eq!(found.tuples_left_out_states, BTreeMap::from([("established".to_owned(), 1)]));
        assert_eq!((found.services.len(), found.services_left_out), (100, 1));
        let last = &found.services[99];
        assert_eq!((last.port, last.states["established"]), (9_000, 3));
    });
}

#[test]
fn without_a_second_thread_the_processes_are_found() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20099");
        let _bound = TcpListener::bind((LOOPBACK, 20_050)).unwrap();
        let listener = TcpListener::bind((LOOPBACK, 4_000)).unwrap();
        let _connected = [(); 3].map(|()| TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let found = thread::spawn(|| {
            seccomp::refuse(Facility::Threads).unwrap();
            assert!(thread::Builder::new().spawn(|| ()).is_err());
            connections()
        });
        let found = found.join().unwrap();
        let own = |owner: &Owner| (owner.pid, owner.sockets);
        assert_eq!(found.tuples[0].owners.iter().map(own).collect::<Vec<_>>(), [(process::id(), 3)]);
        assert_eq!(found.held[0].owner.as_ref().map(own), Some((process::id(), 1)));
    });
}

#[test]
fn only_the_wanted_peer_is_counted() {
    in_namespace(|| {
        let listeners = [4_000, 4_001].map(|port| TcpListener::bind(("0.0.0.0", port)).unwrap());
        let other = IpAddr::from([127, 0, 0, 2]);
        let _connected: Vec<TcpStream> = [(LOOPBACK, 4_000), (LOOPBACK, 4_001), (other, 4_000)]
            .map(|address| TcpStream::connect(address).unwrap())
            .into();
        let tuples = |address, port| {
            let snapshot = Reader::new(Path::new("/")).only(address, port).read();
            let tuples = &snapshot.connections.seen().unwrap().tuples;
            tuples.iter().map(|tuple| tuple.destination).collect::<Vec<_>>()
        };
        assert_eq!(tuples(other, None), [SocketAddr::new(other, 4_000)]);
        assert_eq!(tuples(LOOPBACK, Some(4_001)), [SocketAddr::new(LOOPBACK, 4_001)]);
        assert_eq!(tuples(LOOPBACK, None).len(), 2);
        drop(listeners);
    });
}

#[test]
fn a_limited_reader_repeats_connections_with_their_age() {
    in_namespace(|| {
        let listener = TcpListener::bind((LOOPBACK, 4_000)).unwrap();
        let mut limited = Reader::new(Path::new("/")).limited_to(1e-9);
        let mut free = Reader::new(Path::new("/"));
        let number = |snapshot: &Snapshot| snapshot.connections.seen().unwrap().tuples.len();
        assert_eq!((number(&limited.read()), number(&free.read())), (0, 0));
        let descriptors = |snapshot: &Snapshot| {
            let processes = snapshot.processes.seen().unwrap();
            processes.iter().find(|found| found.pid == process::id()).unwrap().descriptors
        };
        let before = descriptors(&limited.read());
        let _connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        // Other tests of this process open and close sockets too.
        let _more: Vec<UdpSocket> = (0..200).map(|_| UdpSocket::bind((LOOPBACK, 0)).unwrap()).collect();
        let (repeated, fresh) = (limited.read(), free.read());
        assert_eq!((number(&repeated), number(&fresh)), (0, 1));
        assert!(repeated.connections.seen().unwrap().age_ns > 0);
        // The processes are a part of the pass.
        assert_eq!(descriptors(&repeated), before);
        let fresh = fresh.connections.seen().unwrap();
        assert_eq!(fresh.age_ns, 0);
        assert!(fresh.tuples[0].growth_per_s > 0.0, "a new tuple grows from 0");
    });
}

#[test]
fn sockets_may_vanish_during_the_dump() {
    in_namespace(|| {
        let listener = TcpListener::bind((LOOPBACK, 4_000)).unwrap();
        let address = listener.local_addr().unwrap();
        let _stays = [(); 5].map(|()| TcpStream::connect(address).unwrap());
        let namespace = netns::current().unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let _stop = StopOnDrop(&stop);
            scope.spawn(|| {
                netns::enter(namespace.as_fd()).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let sockets: Vec<_> = (0..20).map(|_| TcpStream::connect(address)).collect();
                    let accepted: Vec<_> = (0..20).map(|_| listener.accept()).collect();
                    // No socket stays in TIME_WAIT, so that the range does not fill.
                    let reset = |socket: &TcpStream| option::set_reset_on_close(socket.as_fd());
                    sockets.iter().flatten().for_each(|socket| reset(socket).unwrap());
                    drop((sockets, accepted));
                }
            });
            let mut reader = Reader::new(Path::new("/"));
            for _ in 0..200 {
                let snapshot = reader.read();
                let found = snapshot.connections.seen().expect("sock_diag works");
                let tuple = &found.tuples[0];
                assert!(tuple.in_use >= 5 && tuple.in_use <= 60, "{tuple:?}");
                assert_eq!((found.tuples.len(), tuple.destination), (1, address), "{:?}", found.tuples);
                assert!(!found.states.contains_key("close"), "{:?}", found.states);
            }
        });
    });
}

#[test]
fn without_sock_diag_the_rest_is_read() {
    in_namespace(|| {
        thread::spawn(|| {
            seccomp::refuse(Facility::SocketDiag).unwrap();
            let snapshot = snapshot();
            let reason = snapshot.connections.seen().unwrap_err();
            assert_eq!(reason, "sock_diag(7): EPROTONOSUPPORT");
            assert!(snapshot.ports.seen().is_ok() && snapshot.counters.seen().is_ok());
        })
        .join()
        .unwrap();
    });
}

#[test]
fn without_proc_the_sockets_are_read() {
    in_namespace(|| {
        let listener = TcpListener::bind((LOOPBACK, 4_000)).unwrap();
        let _connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let snapshot = Reader::new(Path::new("/nonexistent")).read();
        let found = snapshot.connections.seen().unwrap();
        assert_eq!((found.tuples.len(), found.processes_by.as_str()), (1, "proc"));
        assert!(found.tuples[0].owners.is_empty() && found.held.is_empty());
        assert!(snapshot.sysctls.is_empty());
        for reason in
            [snapshot.ports.seen().err(), snapshot.counters.seen().err(), snapshot.memory.seen().err()]
        {
            assert!(reason.as_ref().is_some_and(|reason| reason.ends_with("ENOENT")), "{reason:?}");
        }
    });
}

#[test]
fn without_bpf_the_processes_are_the_same() {
    in_namespace(|| {
        let listener = TcpListener::bind((LOOPBACK, 4_000)).unwrap();
        let _connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let any = connections();
        let other = thread::spawn(move || {
            seccomp::refuse(Facility::Bpf).unwrap();
            connections()
        });
        let other = other.join().unwrap();
        assert_eq!(other.processes_by, "proc");
        assert_eq!(any.tuples[0].owners, other.tuples[0].owners);
        assert_eq!(any.tuples[0].owners[0].pid, process::id());
        if any.processes_by != "bpf" {
            skip("without_bpf_the_processes_are_the_same", "bpf", "the iterator was not loaded");
        }
    });
}

/// Set in the process that reads as another user.
const OTHER_USER: &str = "FOURTUPLE_TEST_OTHER_USER";

#[test]
fn another_user_sees_sockets_without_processes() {
    if env::var_os(OTHER_USER).is_some() {
        let found = connections();
        assert_eq!((found.processes_by.as_str(), found.tuples.len()), ("proc", 1));
        assert!(found.processes_hidden > 0 && found.tuples[0].owners.is_empty(), "{found:?}");
        return;
    }
    in_namespace(|| {
        let test = "another_user_sees_sockets_without_processes";
        let listener = TcpListener::bind((LOOPBACK, 4_000)).unwrap();
        let _connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]).env(OTHER_USER, "1").uid(65_534).gid(65_534);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        match start(&mut command).and_then(Child::wait_with_output) {
            Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
            Err(error) => skip(test, "root", &format!("cannot start a process of another user: {error}")),
        }
    });
}

#[test]
fn the_namespace_of_a_process_is_read() {
    in_namespace(|| {
        let mut elsewhere = Command::new("cat");
        elsewhere.stdin(Stdio::piped());
        let (child, _sockets) = thread::spawn(move || {
            netns::enter_new().unwrap();
            let listener = TcpListener::bind((LOOPBACK, 4_000)).unwrap();
            let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            set_sysctl("net.ipv4.ip_local_port_range", "30000 30099");
            (start(&mut elsewhere).unwrap(), (listener, connected))
        })
        .join()
        .unwrap();
        let mut child = child;
        let namespace = namespace::open(&Target::Process(child.id()), Path::new("/")).unwrap();
        assert!(connections().tuples.is_empty());
        let snapshot = thread::spawn(move || {
            netns::enter(namespace.as_fd()).unwrap();
            snapshot()
        });
        let snapshot = snapshot.join().unwrap();
        let found = snapshot.connections.seen().unwrap();
        assert_eq!((found.tuples.len(), found.services.len()), (1, 1), "{found:?}");
        assert!(found.tuples[0].owners.iter().any(|owner| owner.pid == process::id()));
        assert_eq!(snapshot.ports.seen().unwrap().low, 30_000);
        drop(child.stdin.take());
        child.wait().unwrap();
        let gone = namespace::open(&Target::Process(child.id()), Path::new("/"));
        assert!(matches!(gone, Err(NamespaceError::NoProcess(_))));
    });
}
