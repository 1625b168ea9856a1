//! The traps of port selection, one test each, on tiny ranges in namespaces of their own. No test here starts a process: until exec() a
//! child has copies of the sockets of all tests, which then stay open.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::Duration;

use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple::dial::{BuildError, DialError, Dialer, SourcePool, Strategy};
use fourtuple::ports::PortRange;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Errno, option};
use fourtuple_testing::{in_namespace, listener, set_sysctl};

use crate::{has_option, range};

fn found() -> LocalPortRange {
    capabilities::probe().unwrap().local_port_range
}

fn tcp(destination: SocketAddr) -> OwnedFd {
    socket::open(Transport::Tcp, destination, false).unwrap()
}

fn port_of(socket: &impl AsFd) -> u16 {
    socket::local_address(socket.as_fd()).unwrap().port()
}

/// Connects with a window set, by hand.
fn connect_within(destination: SocketAddr, low: u16, high: u16) -> std::io::Result<OwnedFd> {
    let fd = tcp(destination);
    assert_eq!(option::set_local_port_range(fd.as_fd(), low, high)?, option::Answer::Done);
    socket::connect(fd.as_fd(), destination)?;
    Ok(fd)
}

#[test]
fn trap_1_the_probe_tells_linear_search_from_search_by_parity() {
    in_namespace(|| {
        range("20000 20999");
        let (_listener, destination) = listener("127.0.0.1", 2048);
        let claimed = found();
        if !has_option("trap_1_the_probe_tells_linear_search_from_search_by_parity") {
            return;
        }
        let ports: Vec<(OwnedFd, u16)> = (0..200)
            .map(|_| {
                let fd = connect_within(destination, 0, 65535).unwrap();
                let port = port_of(&fd);
                (fd, port)
            })
            .collect();
        let odd = ports.iter().filter(|(_, port)| port % 2 == 1).count();
        match claimed {
            LocalPortRange::Linear => assert!((50..150).contains(&odd), "{odd} of 200 ports are odd"),
            LocalPortRange::Parity => assert_eq!(odd, 0, "even ports are used up first"),
            other => panic!("loopback is up, yet the probe says {other:?}"),
        }
    });
}

#[test]
fn trap_2_windows_skip_reserved_ports_and_binds_do_not() {
    in_namespace(|| {
        range("20000 20063");
        set_sysctl("net.ipv4.ip_local_reserved_ports", "20000-20031");
        let (_listener, destination) = listener("127.0.0.1", 1024);
        if found() != LocalPortRange::Absent {
            let error = connect_within(destination, 20000, 20031).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::AddrNotAvailable);
        }
        let auto = Dialer::builder(destination).build().unwrap();
        let streams: Vec<TcpStream> = (0..32).map(|_| auto.dial().unwrap().0).collect();
        assert!(streams.iter().all(|stream| stream.local_addr().unwrap().port() >= 20032));
        match auto.dial() {
            Err(DialError::PortsExhausted { census: Ok(census), .. }) => {
                assert_eq!((census.ports, census.established), (32, 32));
            }
            other => panic!("{other:?}"),
        }
        // The other source has no port in use. Draws of reserved ports do not count: 400 tries miss the last of 32 ports once in 300,000.
        let strategy = Strategy::SelectTestRepeat { tries: NonZeroU16::new(400).unwrap() };
        let source = SourcePool::one("127.0.0.2".parse::<IpAddr>().unwrap());
        let repeat = Dialer::builder(destination).sources(source).strategy(strategy).build().unwrap();
        let streams: Vec<TcpStream> = (0..32).map(|_| repeat.dial().unwrap().0).collect();
        assert!(streams.iter().all(|stream| stream.local_addr().unwrap().port() >= 20032));
        assert!(matches!(repeat.dial(), Err(DialError::PortsExhausted { .. })));
        // The caller is responsible for a port that it requests by number.
        let fixed = Dialer::builder(destination).source_port(20001).build().unwrap();
        assert_eq!(fixed.dial().unwrap().1.source.port(), 20001);
    });
}

/// procfs returns a list to one read(2) only, cut to the size of its buffer.
#[test]
fn reserved_lists_of_any_length_are_read() {
    in_namespace(|| {
        for odd in [6, 11_000, 32_767] {
            let first = u16::MAX - 2 * odd;
            let list: Vec<String> = (first..u16::MAX).step_by(2).map(|port| port.to_string()).collect();
            set_sysctl("net.ipv4.ip_local_reserved_ports", &list.join(","));
            let (_, reserved) = capabilities::local_ports().unwrap();
            assert_eq!(reserved.count_in(PortRange::ALL), u32::from(odd), "{} bytes", list.join(",").len());
        }
    });
}

#[test]
fn trap_3_no_automatic_choice_takes_a_bound_port() {
    in_namespace(|| {
        range("20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 1024);
        // The socket is bound to another address and is not connected.
        let holders: Vec<OwnedFd> = (20000..20004)
            .map(|port| {
                let fd = tcp(destination);
                socket::bind(fd.as_fd(), SocketAddr::from(([127, 9, 9, 9], port))).unwrap();
                fd
            })
            .collect();
        let dialer = Dialer::builder(destination).strategy(Strategy::KernelDefault).build().unwrap();
        let streams: Vec<TcpStream> = (0..4).map(|_| dialer.dial().unwrap().0).collect();
        match dialer.dial() {
            Err(DialError::PortsExhausted { census: Ok(census), .. }) => {
                assert_eq!((census.established, census.otherwise), (4, 4));
            }
            other => panic!("{other:?}"),
        }
        drop((holders, streams));
    });
}

#[test]
fn trap_3_a_socket_without_reuse_makes_a_bind_busy() {
    in_namespace(|| {
        range("20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 1024);
        let (_other_listener, other) = listener("127.0.0.1", 1024);
        let holdout = tcp(other);
        socket::bind(holdout.as_fd(), SocketAddr::from(([0, 0, 0, 0], 20003))).unwrap();
        socket::connect(holdout.as_fd(), other).unwrap();
        let fixed = Dialer::builder(destination).source_port(20003).build().unwrap();
        match fixed.dial() {
            Err(DialError::TupleBusy { local, .. }) => assert_eq!(local.port(), 20003),
            other => panic!("{other:?}"),
        }
        // 400 draws miss the last of 8 ports once in 1e23.
        let strategy = Strategy::SelectTestRepeat { tries: NonZeroU16::new(400).unwrap() };
        let repeat = Dialer::builder(destination).strategy(strategy).build().unwrap();
        let streams: Vec<TcpStream> = (0..7).map(|_| repeat.dial().unwrap().0).collect();
        assert!(streams.iter().all(|stream| stream.local_addr().unwrap().port() != 20003));
        assert!(matches!(repeat.dial(), Err(DialError::PortsExhausted { .. })));
    });
}

#[test]
fn trap_4_full_windows_lead_to_the_full_range() {
    in_namespace(|| {
        if !has_option("trap_4_full_windows_lead_to_the_full_range") {
            return;
        }
        range("20000 20063");
        let (_listener, destination) = listener("127.0.0.1", 1024);
        let filler = Dialer::builder(destination).strategy(Strategy::KernelDefault).build().unwrap();
        let _streams: Vec<TcpStream> = (0..63).map(|_| filler.dial().unwrap().0).collect();
        let strategy = "random-window:1".parse().unwrap();
        let dialer = Dialer::builder(destination).strategy(strategy).build().unwrap();
        let fd = tcp(destination);
        let mut attempt = dialer.prepare(fd.as_fd()).unwrap();
        while let Err(error) = socket::connect(fd.as_fd(), destination) {
            // The result must never be a request for another socket.
            let retry = attempt.connect_failed(error).unwrap();
            assert_eq!(retry, fourtuple::dial::Retry::SameSocket);
            attempt.prepare(fd.as_fd()).unwrap();
        }
        let report = attempt.finish(fd.as_fd()).unwrap();
        assert!((1..=3).contains(&report.attempts), "{report:?}");
    });
}

#[test]
fn trap_5_a_refused_connection_burns_no_port_and_no_retry() {
    in_namespace(|| {
        range("20000 20007");
        let refusing: SocketAddr = "127.0.0.1:4999".parse().unwrap();
        for strategy in [Strategy::Auto, Strategy::KernelDefault, Strategy::SELECT_TEST_REPEAT] {
            let builder = Dialer::builder(refusing).strategy(strategy);
            let blocking = builder.clone().build().unwrap();
            let polling = builder.timeout(Duration::from_secs(60)).build().unwrap();
            for dialer in [blocking, polling] {
                for _ in 0..32 {
                    assert!(
                        matches!(dialer.dial(), Err(DialError::Refused { destination, .. }) if destination == refusing)
                    );
                }
            }
        }
        // If a refused dial kept its port in the ledger, eight refused dials would use up the range.
        let (_listener, destination) = listener("127.0.0.1", 64);
        let dialer = Dialer::builder(destination).build().unwrap();
        drop(_listener);
        for _ in 0..32 {
            assert!(matches!(dialer.dial(), Err(DialError::Refused { .. })));
        }
        let again = TcpListener::bind(destination).unwrap();
        let (_stream, report) = dialer.dial().unwrap();
        assert_eq!(report.attempts, 1);
        drop(again);
    });
}

#[test]
fn trap_5_no_answer_is_a_timeout_in_time() {
    in_namespace(|| {
        range("20000 20007");
        // A listener whose queue is full answers no further SYN.
        let (_listener, destination) = listener("127.0.0.1", 0);
        let dialer = Dialer::builder(destination).timeout(Duration::from_millis(50)).build().unwrap();
        let mut held = Vec::new();
        let error = loop {
            match dialer.dial() {
                Ok((stream, _)) => held.push(stream),
                Err(error) => break error,
            }
            assert!(held.len() < 8, "a backlog of 0 holds one or two connections");
        };
        let DialError::TimedOut { destination: to, after, .. } = error else { panic!("{error:?}") };
        assert_eq!(to, destination);
        assert!(after >= Duration::from_millis(50), "{after:?}");
    });
}

#[test]
fn trap_8_a_socket_is_never_connected_to_itself() {
    in_namespace(|| {
        // The range consists of the dialed port only, and no socket listens on it.
        range("20000 20000");
        let itself: SocketAddr = "127.0.0.1:20000".parse().unwrap();
        let sources = SourcePool::one("127.0.0.1".parse::<IpAddr>().unwrap());
        for strategy in [Strategy::KernelDefault, Strategy::Auto] {
            let dialer = Dialer::builder(itself).sources(sources.clone()).strategy(strategy).build().unwrap();
            for _ in 0..3 {
                match dialer.dial() {
                    Err(DialError::SelfConnect { destination: address, .. }) => assert_eq!(address, itself),
                    other => panic!("{strategy}: {other:?}"),
                }
            }
        }
        // The kernel connects to loopback, or over IPv4 to the source address.
        for (unspecified, source, connected) in [
            ("0.0.0.0:20000", None, "127.0.0.1:20000"),
            ("0.0.0.0:20000", Some("127.0.0.9"), "127.0.0.9:20000"),
            ("[::]:20000", None, "[::1]:20000"),
        ] {
            let dialer = Dialer::builder(unspecified.parse().unwrap());
            let dialer = match source {
                Some(source) => dialer.sources(source.parse().unwrap()),
                None => dialer,
            };
            let dialer = dialer.build().unwrap();
            assert_eq!(dialer.destination(), connected.parse().unwrap());
            let dialed = dialer.dial();
            assert!(matches!(dialed, Err(DialError::SelfConnect { .. })), "{unspecified}: {dialed:?}");
        }
    });
}

#[test]
fn trap_9_each_namespace_has_a_range_of_its_own() {
    in_namespace(|| {
        range("20000 20007");
        let (outer, _) = capabilities::local_ports().unwrap();
        let inner = thread::spawn(|| {
            fourtuple_syscalls::netns::enter_new().unwrap();
            range("30000 30009");
            capabilities::local_ports().unwrap().0
        })
        .join()
        .unwrap();
        assert_eq!(outer, PortRange::new(20000, 20007).unwrap());
        assert_eq!(inner, PortRange::new(30000, 30009).unwrap());
    });
}

#[test]
fn trap_9_a_timeout_separates_search_and_handshake() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 16);
        let dialer = Dialer::builder(destination).timeout(Duration::from_secs(60)).build().unwrap();
        let (stream, report) = dialer.dial().unwrap();
        assert!(report.connect > Duration::ZERO && report.handshake > Duration::ZERO, "{report:?}");
        // The stream must block again: a read of nothing would otherwise fail at once.
        stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        drop(stream);
        let blocking = Dialer::builder(destination).build().unwrap();
        assert_eq!(blocking.dial().unwrap().1.handshake, Duration::ZERO);
    });
}

#[test]
fn trap_10_device_and_freebind_keep_working() {
    in_namespace(|| {
        range("20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 64);
        let dialer = Dialer::builder(destination).device("lo").build().unwrap();
        dialer.dial().unwrap();
        let missing = Dialer::builder(destination).device("nosuch0").build().unwrap();
        match missing.dial() {
            Err(DialError::Call { call: "setsockopt SO_BINDTODEVICE", .. }) => {}
            other => panic!("{other:?}"),
        }
        // 192.0.2.1 is not an address of this namespace; the caller's own option makes it one.
        let foreign: IpAddr = "192.0.2.1".parse().unwrap();
        let dialer = Dialer::builder(destination).sources(SourcePool::one(foreign)).build().unwrap();
        assert!(
            matches!(dialer.dial(), Err(DialError::SourceNotLocal { source_address, .. }) if source_address == foreign)
        );
        const IP_FREEBIND: i32 = 15;
        let fd = socket::open(Transport::Tcp, destination, true).unwrap();
        option::set_int(fd.as_fd(), 0, IP_FREEBIND, 1).unwrap();
        dialer.prepare(fd.as_fd()).unwrap();
        assert_eq!(socket::local_address(fd.as_fd()).unwrap().ip(), foreign);
    });
}

#[test]
fn trap_10_a_transparent_socket_gets_its_port_at_connect() {
    in_namespace(|| {
        range("20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 64);
        // The address of a proxied client, which is not an address of this namespace.
        let client: IpAddr = "192.0.2.1".parse().unwrap();
        const IP_TRANSPARENT: i32 = 19;
        for strategy in [Strategy::KernelDefault, Strategy::Auto, Strategy::SELECT_TEST_REPEAT] {
            let pool = SourcePool::one(client);
            let dialer = Dialer::builder(destination).sources(pool).strategy(strategy).build().unwrap();
            let fd = socket::open(Transport::Tcp, destination, true).unwrap();
            option::set_int(fd.as_fd(), 0, IP_TRANSPARENT, 1).unwrap();
            let attempt = dialer.prepare(fd.as_fd()).unwrap();
            // No route leads back to this namespace, so the handshake never completes.
            assert_eq!(socket::connect(fd.as_fd(), destination).unwrap(), socket::Connect::Pending);
            let report = attempt.finish(fd.as_fd()).unwrap();
            assert_eq!(report.source.ip(), client, "{strategy}");
            assert!((20000..=20007).contains(&report.source.port()), "{strategy}: {report:?}");
            assert_eq!(option::get_int(fd.as_fd(), 0, IP_TRANSPARENT).unwrap(), 1, "{strategy}");
        }
    });
}

#[test]
fn trap_10_fast_open_finds_its_port_when_connect_is_called() {
    in_namespace(|| {
        // The listener's port lies outside of the range: a steered dial that drew it would need a second attempt.
        let (_listener, destination) = listener("127.0.0.1", 64);
        range("20000 20007");
        set_sysctl("net.ipv4.tcp_fastopen", "1027");
        const TCP_FASTOPEN_CONNECT: i32 = 30;
        let dialer = Dialer::builder(destination).build().unwrap();
        let open = || {
            let fd = tcp(destination);
            option::set_int(fd.as_fd(), 6, TCP_FASTOPEN_CONNECT, 1).unwrap();
            fd
        };
        let mut fd = open();
        let mut attempt = dialer.prepare(fd.as_fd()).unwrap();
        // A kernel that searches by parity gets a random window of the range, whose ports the sockets of the probe may still hold.
        while let Err(error) = socket::connect(fd.as_fd(), destination) {
            if attempt.connect_failed(error).unwrap() == fourtuple::dial::Retry::FreshSocket {
                fd = open();
            }
            attempt.prepare(fd.as_fd()).unwrap();
        }
        let report = attempt.finish(fd.as_fd()).unwrap();
        assert!((20000..=20007).contains(&report.source.port()));
    });
}

#[test]
fn trap_12_only_a_search_by_parity_misses_a_port() {
    in_namespace(|| {
        let found = found();
        range("20000 20006");
        // The search rounds the length down to 6 and starts at a random offset: it skips one port, which varies.
        let (_listener, anywhere) = listener("0.0.0.0", 4096);
        let count = |host: u8, strategy| {
            let destination = SocketAddr::from(([127, 1, 1, host], anywhere.port()));
            let dialer = Dialer::builder(destination).strategy(strategy).build().unwrap();
            let mut streams = Vec::new();
            while let Ok((stream, _)) = dialer.dial() {
                streams.push(stream);
            }
            streams.len()
        };
        let by_parity: Vec<usize> = (1..200).map(|host| count(host, Strategy::KernelDefault)).collect();
        assert!(by_parity.iter().all(|count| [6, 7].contains(count)), "{by_parity:?}");
        assert!(by_parity.contains(&6), "no search missed a port: {by_parity:?}");
        if found == LocalPortRange::Linear {
            assert!((200..=250).all(|host| count(host, Strategy::FullRange) == 7));
        }
    });
}

#[test]
fn a_failed_bind_to_port_zero_is_exhaustion() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
        // Without IP_BIND_ADDRESS_NO_PORT bind() itself chooses the port, and fails with EADDRINUSE if none is free.
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let held: Vec<_> = (0..8).map(|_| TcpListener::bind(any).unwrap()).collect();
        let error = TcpListener::bind(any).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
        let (_listener, destination) = listener("127.0.0.1", 64);
        let dialer = Dialer::builder(destination).strategy(Strategy::KernelDefault).build().unwrap();
        match dialer.dial() {
            Err(DialError::PortsExhausted { census: Ok(census), .. }) => {
                assert_eq!((census.established, census.otherwise), (0, 8));
            }
            other => panic!("{other:?}"),
        }
        drop(held);
    });
}

#[test]
fn windows_outside_of_the_range_are_clamped_bound_by_bound() {
    in_namespace(|| {
        if !has_option("windows_outside_of_the_range_are_clamped_bound_by_bound") {
            return;
        }
        range("20000 20063");
        let (_listener, destination) = listener("127.0.0.1", 1024);
        let port = |low, high| {
            let fd = connect_within(destination, low, high).unwrap();
            option::set_reset_on_close(fd.as_fd()).unwrap();
            port_of(&fd)
        };
        for _ in 0..8 {
            assert!((20000..=20063).contains(&port(30000, 30009)), "wholly outside: the full range");
            assert!((20000..=20003).contains(&port(10, 20003)), "the lower bound is clamped");
            assert!((20060..=20063).contains(&port(20060, 60000)), "the upper bound is clamped");
        }
        let backwards = connect_within(destination, 20009, 20000).unwrap_err();
        assert_eq!(Errno::of(&backwards), Some(Errno::EINVAL));
    });
}

#[test]
fn bad_settings_are_refused_before_any_call() {
    let to = |text: &str| Dialer::builder(text.parse().unwrap());
    assert!(matches!(to("127.0.0.1:0").build(), Err(BuildError::PortZero { .. })));
    let v6 = SourcePool::one("::1".parse().unwrap());
    assert!(matches!(to("127.0.0.1:1").sources(v6).build(), Err(BuildError::Family { .. })));
    assert!(matches!(to("127.0.0.1:1").device("").build(), Err(BuildError::Device { .. })));
    assert!(matches!(to("127.0.0.1:1").device("a-name-too-long!").build(), Err(BuildError::Device { .. })));
    assert!(matches!(to("127.0.0.1:1").source_port(0).build(), Err(BuildError::SourcePort)));
}
