//! UDP: exhaustion, and 4-tuples that never have two owners.

use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::thread;

use fourtuple::dial::{BuildError, DialError, Sharing, SourcePool, Strategy, UdpDialer};
use fourtuple_syscalls::option;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::in_namespace;
use fourtuple_testing::stream::arrives;

use crate::range;

fn dialer(destination: &str, sharing: Sharing) -> UdpDialer {
    UdpDialer::new(destination.parse().unwrap(), None, sharing).unwrap()
}

fn dial_all(dialer: &UdpDialer) -> (Vec<UdpSocket>, DialError) {
    let mut sockets = Vec::new();
    loop {
        match dialer.dial() {
            Ok((socket, report)) => {
                assert_eq!(socket.local_addr().unwrap(), report.source);
                sockets.push(socket);
            }
            Err(error) => return (sockets, error),
        }
        assert!(sockets.len() < 1000);
    }
}

#[test]
fn exclusive_sockets_are_as_many_as_there_are_ports() {
    in_namespace(|| {
        range("20000 20015");
        let (first, error) = dial_all(&dialer("127.0.0.1:9", Sharing::Exclusive));
        assert_eq!(first.len(), 16);
        assert!(matches!(error, DialError::PortsExhausted { .. }), "{error:?}");
        let (second, _) = dial_all(&dialer("127.0.0.1:10", Sharing::Exclusive));
        assert!(second.is_empty(), "exclusive ports are gone for every destination");
    });
}

#[test]
fn shared_ports_serve_every_destination() {
    in_namespace(|| {
        range("20000 20015");
        let mut all = Vec::new();
        for port in 9..13 {
            let destination = format!("127.0.0.1:{port}");
            let (sockets, error) = dial_all(&dialer(&destination, Sharing::Shared));
            assert_eq!(sockets.len(), 16, "{destination}");
            match error {
                DialError::PortsExhausted { census: Ok(census), .. } => {
                    assert_eq!((census.ports, census.established), (16, 16));
                }
                other => panic!("{other:?}"),
            }
            all.extend(sockets);
        }
        assert_unique(&all);
    });
}

#[test]
fn the_report_names_what_the_mode_does() {
    in_namespace(|| {
        for (sharing, strategy) in
            [(Sharing::Exclusive, Strategy::KernelDefault), (Sharing::Shared, Strategy::SELECT_TEST_REPEAT)]
        {
            assert_eq!(dialer("127.0.0.1:9", sharing).dial().unwrap().1.strategy, strategy);
        }
    });
}

#[test]
fn shared_ports_of_ipv6_too() {
    in_namespace(|| {
        range("20000 20007");
        let (sockets, _) = dial_all(&dialer("[::1]:9", Sharing::Shared));
        assert_eq!(sockets.len(), 8);
        assert_unique(&sockets);
    });
}

#[test]
fn a_tuple_with_an_owner_is_not_taken_over() {
    in_namespace(|| {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = server.local_addr().unwrap().to_string();
        let shared = dialer(&to, Sharing::Shared).source_port(20005);
        let (owner, report) = shared.dial().unwrap();
        match shared.dial() {
            Err(DialError::WouldShadow { local, .. }) => assert_eq!(local, report.source),
            other => panic!("{other:?}"),
        }
        // Plain system calls without the dialer succeed, and then the newest socket gets the packets.
        let destination: SocketAddr = to.parse().unwrap();
        let thief = socket::open(Transport::Udp, destination, false).unwrap();
        option::set_reuse_address(thief.as_fd(), true).unwrap();
        socket::bind(thief.as_fd(), report.source).unwrap();
        socket::connect(thief.as_fd(), destination).unwrap();
        let thief = UdpSocket::from(thief);
        let send = || {
            server.send_to(b"mine", report.source).unwrap();
        };
        let (length, _) = arrives(send, &thief, &mut [0; 8]);
        assert_eq!(length, 4, "the newest socket on a 4-tuple gets its packets");
        drop((owner, thief));
    });
}

#[test]
fn a_mapped_destination_has_the_owners_of_ipv4() {
    in_namespace(|| {
        let (plain, mapped) = ("127.0.0.1:9", "[::ffff:127.0.0.1]:9");
        for (first, second) in [(plain, mapped), (mapped, plain)] {
            let (_owner, report) = dialer(first, Sharing::Shared).dial().unwrap();
            let again = dialer(second, Sharing::Shared).source_port(report.source.port()).dial();
            assert!(matches!(again, Err(DialError::WouldShadow { .. })), "{first}, {second}: {again:?}");
        }
        let source = Some("::ffff:127.0.0.2".parse().unwrap());
        let dialer = UdpDialer::new(mapped.parse().unwrap(), source, Sharing::Exclusive).unwrap();
        assert_eq!(dialer.dial().unwrap().1.source.ip(), std::net::Ipv4Addr::new(127, 0, 0, 2));
    });
}

#[test]
fn a_port_without_reuse_is_distinguished_from_an_owner() {
    in_namespace(|| {
        let _holdout = UdpSocket::bind("127.0.0.1:20005").unwrap();
        let shared = dialer("127.0.0.1:9", Sharing::Shared).source_port(20005);
        assert!(matches!(shared.dial(), Err(DialError::TupleBusy { .. })));
        let exclusive = dialer("127.0.0.1:9", Sharing::Exclusive).source_port(20005);
        assert!(matches!(exclusive.dial(), Err(DialError::TupleBusy { .. })));
        let foreign = Some("192.0.2.1".parse().unwrap());
        let foreign = UdpDialer::new("127.0.0.1:9".parse().unwrap(), foreign, Sharing::Shared).unwrap();
        assert!(matches!(foreign.dial(), Err(DialError::SourceNotLocal { .. })));
    });
}

#[test]
fn threads_that_dial_the_same_destinations_never_share_a_tuple() {
    in_namespace(|| {
        range("20000 20031");
        let workers: Vec<_> = (0..4)
            .map(|_| {
                thread::Builder::new()
                    .spawn(|| {
                        let mut sockets = Vec::new();
                        for port in 9..13 {
                            let shared = dialer(&format!("127.0.0.1:{port}"), Sharing::Shared);
                            for _ in 0..6 {
                                sockets.push(shared.dial().unwrap().0);
                            }
                        }
                        sockets
                    })
                    .unwrap()
            })
            .collect();
        let sockets: Vec<UdpSocket> = workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect();
        assert_eq!(sockets.len(), 96);
        assert_unique(&sockets);
    });
}

#[test]
fn exhaustion_is_eagain_of_connect_and_eaddrinuse_of_bind() {
    in_namespace(|| {
        range("20000 20001");
        let destination: SocketAddr = "127.0.0.1:9".parse().unwrap();
        let open = || socket::open(Transport::Udp, destination, false).unwrap();
        let held = [open(), open()];
        for fd in &held {
            socket::connect(fd.as_fd(), destination).unwrap();
        }
        let fd = open();
        let error = socket::connect(fd.as_fd(), destination).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        assert_eq!(socket::bind(fd.as_fd(), any).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    });
}

fn assert_unique(sockets: &[UdpSocket]) {
    let mut owners: HashMap<(SocketAddr, SocketAddr), u32> = HashMap::new();
    for socket in sockets {
        *owners.entry((socket.local_addr().unwrap(), socket.peer_addr().unwrap())).or_default() += 1;
    }
    assert!(owners.values().all(|count| *count == 1), "{owners:?}");
}

#[test]
fn a_pool_gives_every_port_of_every_source() {
    in_namespace(|| {
        range("20000 20015");
        let pool: SourcePool = "127.0.0.2,127.0.0.3,127.0.0.4".parse().unwrap();
        for sharing in [Sharing::Exclusive, Sharing::Shared] {
            let dialer = dialer("127.0.0.1:9", sharing).sources(pool.clone()).unwrap();
            let (sockets, error) = dial_all(&dialer);
            assert_eq!(sockets.len(), 48, "{sharing:?}");
            assert!(error.is_exhausted(), "{error}");
        }
        let foreign = dialer("127.0.0.1:9", Sharing::Exclusive).sources("::1".parse().unwrap());
        assert!(matches!(foreign, Err(BuildError::Family { .. })));
    });
}

#[test]
fn a_pool_has_a_fixed_port_once_per_source() {
    in_namespace(|| {
        let pool: SourcePool = "127.0.0.2,127.0.0.3,127.0.0.4".parse().unwrap();
        for (sharing, port) in [(Sharing::Exclusive, 4000), (Sharing::Shared, 4001)] {
            let dialer = dialer("127.0.0.1:9", sharing).sources(pool.clone()).unwrap().source_port(port);
            // Without SO_REUSEADDR, as another program holds a port.
            let _held = UdpSocket::bind(("127.0.0.3", port)).unwrap();
            let (sockets, error) = dial_all(&dialer);
            assert_eq!(sockets.len(), 2, "{sharing:?}");
            assert!(
                matches!(error, DialError::TupleBusy { .. } | DialError::WouldShadow { .. }),
                "{sharing:?}: {error}"
            );
        }
    });
}

#[test]
fn a_device_is_set_on_the_socket() {
    in_namespace(|| {
        let dialer = dialer("127.0.0.1:9", Sharing::Exclusive);
        dialer.clone().device("lo").unwrap().dial().unwrap();
        let absent = dialer.clone().device("nosuch").unwrap().dial().unwrap_err();
        assert!(matches!(absent, DialError::Call { call: "if_nametoindex", .. }), "{absent}");
        assert!(matches!(dialer.device("sixteen-bytes---"), Err(BuildError::Device { .. })));
    });
}
