//! The census of a network namespace, on real sockets.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::path::Path;
use std::process;

use fourtuple_host::snapshot::Reader;
use fourtuple_record::snapshot::{Connections, Part, Snapshot};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::{in_namespace, set_sysctl};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn snapshot() -> Snapshot {
    Reader::new(Path::new("/")).read()
}

fn connections() -> Connections {
    match snapshot().connections {
        Part::Seen(connections) => connections,
        Part::Hidden(reason) => panic!("{reason}"),
    }
}

/// Reads until a condition holds, because the kernel closes connections after the call.
fn until(condition: impl Fn(&Connections) -> bool) -> Connections {
    for _ in 0..2_000 {
        let found = connections();
        if condition(&found) {
            return found;
        }
    }
    panic!("{:?}", connections());
}

#[test]
fn held_ports_have_a_kind_and_a_process() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20019");
        set_sysctl("net.ipv4.ip_local_reserved_ports", "20010");
        let bound = socket::open(Transport::Tcp, SocketAddr::new(LOOPBACK, 0), false).unwrap();
        socket::bind(bound.as_fd(), SocketAddr::new(LOOPBACK, 20_001)).unwrap();
        let _listener = TcpListener::bind((LOOPBACK, 20_002)).unwrap();
        let _udp = UdpSocket::bind((LOOPBACK, 20_003)).unwrap();
        let _reserved = TcpListener::bind((LOOPBACK, 20_010)).unwrap();
        let _outside = TcpListener::bind((LOOPBACK, 20_020)).unwrap();
        let held =
            until(|found| found.held.len() == 3 && found.held.iter().all(|port| port.owner.is_some())).held;
        let found: Vec<_> = held.iter().map(|port| (port.port, port.address, port.kind.as_str())).collect();
        let expected =
            [(20_001, LOOPBACK, "bound"), (20_002, LOOPBACK, "listening"), (20_003, LOOPBACK, "udp")];
        assert_eq!(found, expected);
        let owner = held[0].owner.as_ref().unwrap();
        assert_eq!((owner.pid, owner.sockets), (process::id(), 1));
        assert!(connections().tuples.is_empty(), "a bound socket is no connection");
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
        let found = until(|found| found.close_wait.first().is_some_and(|process| process.owner.sockets == 3));
        assert_eq!(found.close_wait.len(), 1);
        let leak = &found.close_wait[0];
        assert_eq!((leak.owner.pid, leak.remote, leak.old), (process::id(), remote, 0));
        assert!(leak.oldest_ns < 60_000_000_000, "{leak:?}");
    });
}
