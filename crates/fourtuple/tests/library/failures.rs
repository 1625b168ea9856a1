//! Dials that meet a failure. Of pools in which some source addresses fail: the dials continue from sources that work, and errors name the
//! source. Of calls: every errno of connect(2) with every strategy; kernels that do not list their sockets (the dialers report that they
//! cannot list them, never that there is no socket); systems without threads for a tokio runtime (RLIMIT_NPROC, pids.max).

use std::cell::Cell;
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use fourtuple::dial::{
    BuildError, ConnectError, Connector, DialError, DialReport, Dialer, Sharing, SourcePool, Strategy,
    UdpDialer, Uncounted, Unseen,
};
use fourtuple::listen::{AcceptPolicy, ListenError, ListenerGroupBuilder};
use fourtuple_syscalls::seccomp::{self, Facility, FailingCall};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Errno, device, netns, option, route};
use fourtuple_testing::stream::arrives;
use fourtuple_testing::wire::{FAR, FAR_V4, NEAR, NEAR_V4, Wire};
use fourtuple_testing::{each_in_namespace, errnos, in_namespace, listener, print, set_sysctl};
use tokio::runtime::{Builder, Runtime};
use tokio::task;

use crate::runtime;

const POOL: &str = "10.9.0.12,10.9.0.13,10.9.0.14,10.9.0.15";

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Adds four sources to the near end of a wire, and opens a listener at its far end.
fn four_sources(wire: &Wire) -> (OwnedFd, SocketAddr) {
    for source in POOL.split(',') {
        device::add_address(NEAR, address(source), 32).unwrap();
    }
    wire.far_away(|| listener(&FAR_V4.to_string(), 4096))
}

type Dial<'a> = &'a dyn Fn() -> Result<(TcpStream, DialReport), DialError>;

/// Runs `check` with each form of a dial.
fn with_each_form(destination: SocketAddr, pool: &str, check: impl Fn(&Dialer, Dial<'_>, &str)) {
    let builder = || Dialer::builder(destination).sources(pool.parse().unwrap());
    for strategy in [Strategy::Auto, Strategy::KernelDefault, Strategy::SELECT_TEST_REPEAT] {
        let dialer = builder().strategy(strategy).build().unwrap();
        check(&dialer, &|| dialer.dial(), &format!("{strategy}, blocking"));
    }
    let dialer = builder().timeout(Duration::from_secs(60)).build().unwrap();
    check(&dialer, &|| dialer.dial(), "with a timeout");
    #[cfg(feature = "tokio")]
    {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let dialer = runtime.block_on(builder().build_tokio()).unwrap();
        let dial = || {
            let (stream, report) = runtime.block_on(dialer.dial_tokio())?;
            Ok((stream.into_std().unwrap(), report))
        };
        check(&dialer, &dial, "tokio");
    }
}

/// Makes `number` dials, each of which must succeed, and returns how many came from each source.
///
/// The connections stay open until the last dial: a strategy that draws ports at random could otherwise draw one port twice, and
/// the ledger would count it once.
fn dials(dial: Dial<'_>, number: u32, form: &str) -> HashMap<IpAddr, u32> {
    let mut counts = HashMap::new();
    let mut streams = Vec::new();
    for _ in 0..number {
        let (stream, report) = dial().unwrap_or_else(|error| panic!("{form}: {error}"));
        option::set_reset_on_close(stream.as_fd()).unwrap();
        streams.push(stream);
        *counts.entry(report.source.ip()).or_default() += 1;
    }
    counts
}

#[test]
fn a_source_taken_off_the_host_fails_no_dial() {
    in_namespace(|| {
        let Some(wire) = Wire::open("a_source_taken_off_the_host_fails_no_dial") else { return };
        // The range has few ports, so that a random choice often draws the same port twice.
        set_sysctl("net.ipv4.ip_local_port_range", "40000 40255");
        let (_listener, destination) = four_sources(&wire);
        let (gone, succeeded) = (address("10.9.0.14"), Cell::new(0));
        with_each_form(destination, POOL, |dialer, dial, form| {
            assert_eq!(dials(dial, 40, form)[&gone], 10, "{form}");
            device::remove_address(NEAR, gone, 32).unwrap();
            let counts = dials(dial, 80, form);
            assert_eq!(counts.get(&gone), None, "{form}");
            succeeded.set(succeeded.get() + counts.values().sum::<u32>());
            dialer.refresh().unwrap();
            assert_eq!(dials(dial, 40, form).get(&gone), None, "{form}");
            device::add_address(NEAR, gone, 32).unwrap();
            dialer.refresh().unwrap();
            assert!(dials(dial, 40, form).contains_key(&gone), "{form}: back, and forgiven");
        });
        eprintln!(
            "all of {} dials succeeded after one of four sources was taken off the host",
            succeeded.get()
        );
    });
}

#[test]
fn a_source_that_a_rule_prohibits_fails_no_dial() {
    in_namespace(|| {
        let Some(wire) = Wire::open("a_source_that_a_rule_prohibits_fails_no_dial") else { return };
        let (_listener, destination) = four_sources(&wire);
        let prohibited = address("10.9.0.13");
        route::prohibit_from(prohibited).unwrap();
        with_each_form(destination, POOL, |_, dial, form| {
            assert_eq!(dials(dial, 80, form).get(&prohibited), None, "{form}");
        });
        // A dial from this source alone fails, and the error names the source.
        with_each_form(destination, "10.9.0.13", |_, dial, form| match dial().unwrap_err() {
            error @ DialError::Call { call: "connect", source_address, .. } => {
                assert_eq!(source_address, Some(prohibited), "{form}");
                let said = error.to_string();
                assert!(said.contains("from 10.9.0.13: EACCES"), "{said}");
            }
            other => panic!("{form}: {other:?}"),
        });
    });
}

#[test]
fn a_udp_pool_passes_over_a_prohibited_source() {
    in_namespace(|| {
        let Some(wire) = Wire::open("a_udp_pool_passes_over_a_prohibited_source") else { return };
        let (_listener, destination) = four_sources(&wire);
        let prohibited = address("10.9.0.13");
        route::prohibit_from(prohibited).unwrap();
        for sharing in [Sharing::Exclusive, Sharing::Shared] {
            let from = |sources: &str| {
                let dialer = UdpDialer::new(destination, None, sharing).unwrap();
                dialer.sources(sources.parse().unwrap()).unwrap()
            };
            let pool = from(POOL);
            for _ in 0..80 {
                assert_ne!(pool.dial().unwrap().1.source.ip(), prohibited);
            }
            match from("10.9.0.13").dial() {
                Err(DialError::Call { call: "connect", source_address, .. }) => {
                    assert_eq!(source_address, Some(prohibited));
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn an_address_of_another_host_fails_no_dial() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        for pool in ["127.0.0.1,192.0.2.1", "192.0.2.1,127.0.0.1"] {
            with_each_form(destination, pool, |_, dial, form| {
                assert_eq!(dials(dial, 100, form)[&address("127.0.0.1")], 100, "{form}");
            });
        }
    });
}

#[test]
fn sources_that_all_fail_are_each_named() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 64);
        with_each_form(destination, "192.0.2.1,192.0.2.2,192.0.2.3", |_, dial, form| {
            let named: Vec<IpAddr> = (0..3)
                .map(|_| match dial() {
                    Err(DialError::SourceNotLocal { source_address, .. }) => source_address,
                    other => panic!("{form}: {other:?}"),
                })
                .collect();
            assert_eq!(named.len(), 3);
        });
    });
}

#[test]
fn a_source_whose_ports_others_hold_fails_no_dial() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20015");
        let (_listener, destination) = listener("127.0.0.1", 4096);
        with_each_form(destination, "127.0.0.7,127.0.0.8", |_, dial, form| {
            // The dialer's ledger page of this source was read when no port was in use.
            let other = Dialer::builder(destination).sources("127.0.0.7".parse().unwrap()).build().unwrap();
            let held: Vec<_> = (0..16).map(|_| other.dial().unwrap()).collect();
            let mut free = Vec::new();
            // A hundred draws may miss the last of 16 ports.
            for _ in 0..12 {
                let (stream, report) = dial().unwrap_or_else(|error| panic!("{form}: {error}"));
                assert_eq!(report.source.ip(), address("127.0.0.8"), "{form}");
                free.push(stream);
            }
            let error = loop {
                match dial() {
                    Ok((stream, _)) => free.push(stream),
                    Err(error) => break error,
                }
            };
            assert!(free.len() <= 16 && matches!(error, DialError::PortsExhausted { .. }), "{form}: {error}");
            for stream in free.iter().chain(held.iter().map(|(stream, _)| stream)) {
                option::set_reset_on_close(stream.as_fd()).unwrap();
            }
        });
    });
}

#[test]
fn exhaustion_costs_one_search_of_the_range() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20015");
        let (_listener, destination) = listener("127.0.0.1", 4096);
        for pool in ["127.0.0.7", "127.0.0.7,127.0.0.8"] {
            let dialer = Dialer::builder(destination)
                .sources(pool.parse().unwrap())
                .strategy(Strategy::KernelDefault)
                .build()
                .unwrap();
            let held: Vec<_> = std::iter::from_fn(|| dialer.dial().ok()).collect();
            assert_eq!(held.len(), 16 * pool.split(',').count());
            // Both sources of the pool had no port in the dial before this one: one of them is searched. A tenth of a second later each is
            // tried again.
            let in_use = || io::Error::from(Errno::EADDRNOTAVAIL);
            let searches = (0..20).map(|_| {
                let mut attempt = dialer.begin().unwrap();
                1 + std::iter::from_fn(|| attempt.connect_failed(in_use()).ok()).take(100).count()
            });
            let searches: Vec<usize> = searches.collect();
            let is_bounded = searches.iter().all(|number| *number <= pool.split(',').count());
            assert!(is_bounded && searches.contains(&1), "{pool}: {searches:?}");
            for (stream, _) in &held {
                option::set_reset_on_close(stream.as_fd()).unwrap();
            }
        }
    });
}

#[test]
fn a_source_without_answers_is_not_always_the_first() {
    in_namespace(|| {
        let Some(wire) = Wire::open("a_source_without_answers_is_not_always_the_first") else { return };
        let (_listener, destination) = four_sources(&wire);
        // The failed neighbour lookup of the silent source would affect all sources.
        TcpStream::connect(destination).unwrap();
        // The other host drops packets whose source address is its own.
        let silent = address("10.9.0.12");
        wire.far_away(|| device::add_address(FAR, silent, 32).unwrap());
        // Long enough for a source that answers, on any machine.
        let timeout = Duration::from_secs(2);
        let dialer =
            Dialer::builder(destination).sources(POOL.parse().unwrap()).timeout(timeout).build().unwrap();
        let mut failed = 0;
        for _ in 0..12 {
            match dialer.dial() {
                Ok((_, report)) => assert_ne!(report.source.ip(), silent),
                Err(error @ DialError::TimedOut { source_address, .. }) => {
                    assert_eq!(source_address, Some(silent));
                    assert!(error.to_string().contains("did not answer from 10.9.0.12 within"), "{error}");
                    failed += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert!((1..=6).contains(&failed), "{failed} of 12");
    });
}

/// A limit around the dial drops it, so that the dialer does not see its end.
#[cfg(feature = "tokio")]
#[test]
fn a_source_without_answers_fails_at_a_limit_of_the_caller() {
    use fourtuple::dial::{Connector, Dialers};
    in_namespace(|| {
        let test = "a_source_without_answers_fails_at_a_limit_of_the_caller";
        let Some(wire) = Wire::open(test) else { return };
        let (_listener, destination) = four_sources(&wire);
        TcpStream::connect(destination).unwrap();
        let silent = address("10.9.0.12");
        wire.far_away(|| device::add_address(FAR, silent, 32).unwrap());
        let limit = Duration::from_secs(2);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for form in ["connector", "timeout"] {
                // The silent source is the first.
                let dialers = Dialers::default()
                    .settings(|dialer| dialer.sources("10.9.0.12,10.9.0.13".parse().unwrap()));
                let connector = Connector::builder().dialers(dialers.clone()).timeout(limit).build();
                let mut failed = 0;
                for _ in 0..6 {
                    let source = if form == "connector" {
                        connector.connect_to(destination).await.ok().map(|stream| stream.report().source)
                    } else {
                        let dialer = dialers.get(destination).await.unwrap();
                        let dialed = tokio::time::timeout(limit, dialer.dial_tokio()).await;
                        dialed.ok().map(|dialed| dialed.unwrap().1.source)
                    };
                    assert_ne!(source.map(|source| source.ip()), Some(silent), "{form}");
                    failed += u32::from(source.is_none());
                }
                // The back-off of the silent source ends during the test.
                assert!((1..=4).contains(&failed), "{form}: {failed} of 6");
            }
        });
    });
}

/// connect() of a blocking socket fails after 3 s if a neighbour does not answer: the caller must not wait for it again.
#[test]
fn a_late_error_of_a_prepared_socket_ends_the_dial() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 64);
        let dialer =
            Dialer::builder(destination).sources("127.0.0.2,127.0.0.3".parse().unwrap()).build().unwrap();
        let socket = socket::open(Transport::Tcp, destination, false).unwrap();
        let mut attempt = dialer.prepare(socket.as_fd()).unwrap();
        std::thread::sleep(Duration::from_millis(101));
        let late = attempt.connect_failed(io::Error::from(Errno::EHOSTUNREACH));
        assert!(matches!(late, Err(DialError::Call { call: "connect", .. })), "{late:?}");
    });
}

#[test]
fn the_census_counts_the_source_that_the_error_names() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 64);
        let pool = ["127.0.0.2", "127.0.0.3"].map(address);
        let one = Dialer::builder(destination).sources(SourcePool::one(pool[0])).build().unwrap();
        // The first source has 8 connections, the second has none: its ports are bound.
        let _streams: Vec<_> = (0..8).map(|_| one.dial().unwrap()).collect();
        let _bound: Vec<_> = (20000..20008)
            .map(|port| {
                let socket = socket::open(Transport::Tcp, destination, false).unwrap();
                socket::bind(socket.as_fd(), SocketAddr::new(pool[1], port)).unwrap();
                socket
            })
            .collect();
        with_each_form(destination, "127.0.0.2,127.0.0.3", |_, dial, form| {
            for _ in 0..4 {
                match dial().unwrap_err() {
                    DialError::PortsExhausted {
                        source_address: Some(source), census: Ok(census), ..
                    } => {
                        let established = if source == pool[0] { 8 } else { 0 };
                        assert_eq!(census.established, established, "{form}: {source}");
                    }
                    other => panic!("{form}: {other:?}"),
                }
            }
        });
    });
}

#[test]
fn callers_with_their_own_calls_try_another_source() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let dialer =
            Dialer::builder(destination).sources("192.0.2.1,127.0.0.1".parse().unwrap()).build().unwrap();
        for _ in 0..20 {
            let mut attempt = dialer.begin().unwrap();
            let stream = loop {
                let socket = socket::open(Transport::Tcp, destination, false).unwrap();
                assert_eq!(option::set_bind_address_no_port(socket.as_fd()).unwrap(), option::Answer::Done);
                match socket::bind(socket.as_fd(), attempt.request().source.unwrap()) {
                    Ok(()) => {
                        socket::connect(socket.as_fd(), destination).unwrap();
                        break TcpStream::from(socket);
                    }
                    Err(error) => attempt.bind_failed(error).unwrap(),
                }
            };
            assert_eq!(stream.local_addr().unwrap().ip(), address("127.0.0.1"));
            attempt.keep();
        }
        let mut attempt = dialer.begin().unwrap();
        let error = loop {
            if let Err(error) = attempt.bind_failed(io::ErrorKind::AddrNotAvailable.into()) {
                break error;
            }
        };
        assert!(matches!(error, DialError::SourceNotLocal { .. }), "{error}");
        // One dial tries 16 sources of a larger pool.
        let pool = (1..=20).map(|last| format!("192.0.2.{last}")).collect::<Vec<_>>().join(",");
        let dialer = Dialer::builder(destination).sources(pool.parse().unwrap()).build().unwrap();
        let mut attempt = dialer.begin().unwrap();
        let next = || attempt.bind_failed(io::ErrorKind::AddrNotAvailable.into()).ok();
        assert_eq!(1 + std::iter::from_fn(next).count(), 16);
    });
}

#[test]
fn link_local_sources_have_the_scope_of_the_destination() {
    in_namespace(|| {
        let Some(wire) = Wire::open("link_local_sources_have_the_scope_of_the_destination") else { return };
        let (near, far): (Ipv6Addr, Ipv6Addr) = ("fe80::1".parse().unwrap(), "fe80::2".parse().unwrap());
        device::add_address(NEAR, near.into(), 64).unwrap();
        let (_listener, to) = wire.far_away(|| {
            device::add_address(FAR, far.into(), 64).unwrap();
            listener("::", 64)
        });
        let scope = device::index(NEAR).unwrap();
        let destination: SocketAddr = SocketAddrV6::new(far, to.port(), 0, scope).into();
        for sharing in [Sharing::Exclusive, Sharing::Shared] {
            for source in [None, Some(near.into())] {
                let dial = |to| UdpDialer::new(to, source, sharing).unwrap().dial();
                let (_socket, report) = dial(destination).unwrap();
                let SocketAddr::V6(local) = report.source else { panic!("{report:?}") };
                assert_eq!((local.ip().is_unicast_link_local(), local.scope_id()), (true, scope));
            }
            let unscoped = UdpDialer::new(SocketAddr::new(far.into(), 9), None, sharing).unwrap();
            unscoped.device(NEAR).unwrap().dial().unwrap();
        }
        with_each_form(destination, "fe80::1", |dialer, dial, form| {
            let (_stream, report) = dial().unwrap_or_else(|error| panic!("{form}: {error}"));
            assert_eq!(
                report.source,
                SocketAddrV6::new(near, report.source.port(), 0, scope).into(),
                "{form}"
            );
            let bound = dialer.begin().unwrap().request().source.unwrap();
            assert_eq!(bound, SocketAddrV6::new(near, bound.port(), 0, scope).into(), "{form}");
        });
    });
}

#[test]
fn udp_uses_the_source_of_the_route_through_the_device() {
    in_namespace(|| {
        let destination = "10.9.0.2:9".parse().unwrap();
        let any = UdpDialer::new(destination, None, Sharing::Exclusive).unwrap();
        match any.dial() {
            Err(error @ DialError::Call { call: "RTM_GETROUTE", .. }) => assert!(error.is_retryable()),
            other => panic!("{other:?}"),
        }
        let Some(_wire) = Wire::open("udp_uses_the_source_of_the_route_through_the_device") else { return };
        // A second pair of devices, with a route to the same network.
        let namespace = netns::current().unwrap();
        device::make_pair("other", "end", namespace.as_fd()).unwrap();
        device::set_up("other").unwrap();
        device::add_address("other", address("10.9.0.20"), 24).unwrap();
        let through = |name: &str| any.clone().device(name).unwrap().dial().unwrap().1.source.ip();
        assert_eq!((through(NEAR), through("other")), (NEAR_V4, address("10.9.0.20")));
        assert_eq!(any.dial().unwrap().1.source.ip(), NEAR_V4);
    });
}

#[test]
fn udp_looks_up_the_route_again_without_its_address() {
    in_namespace(|| {
        let Some(wire) = Wire::open("udp_looks_up_the_route_again_without_its_address") else { return };
        let server = wire.far_away(|| UdpSocket::bind((FAR_V4, 4000)).unwrap());
        let destination = server.local_addr().unwrap();
        let other = address("10.9.0.20");
        device::add_address(NEAR, other, 24).unwrap();
        let dialer = |source| UdpDialer::new(destination, source, Sharing::Shared).unwrap();
        let (by_route, given) = (dialer(None), dialer(Some(NEAR_V4)));
        assert_eq!(by_route.dial().unwrap().1.source.ip(), NEAR_V4);
        set_sysctl("net.ipv4.conf.all.promote_secondaries", "1");
        device::remove_address(NEAR, NEAR_V4, 24).unwrap();
        assert_eq!(by_route.dial().unwrap().1.source.ip(), other);
        assert!(
            matches!(given.dial(), Err(DialError::SourceNotLocal { source_address, .. }) if source_address == NEAR_V4)
        );
    });
}

/// The errors of connect(2), and of the route and the neighbour of its SYN (`ip_route_connect`, `ip_queue_xmit`). EINPROGRESS and EINTR are
/// left out: a connect() with these errors goes on.
const ERRNOS: [Errno; 27] = errnos![
    EACCES EPERM EADDRINUSE EADDRNOTAVAIL EAFNOSUPPORT EAGAIN EALREADY EBADF ECONNREFUSED ECONNRESET
    ECONNABORTED EFAULT EINVAL EISCONN ENETDOWN ENETUNREACH EHOSTDOWN EHOSTUNREACH ENONET ENOBUFS ENOMEM
    ENOPROTOOPT ENOTSOCK EOPNOTSUPP EPROTO EPROTOTYPE ETIMEDOUT
];
const STRATEGIES: [Strategy; 4] =
    [Strategy::KernelDefault, Strategy::FullRange, Strategy::RANDOM_WINDOW, Strategy::SELECT_TEST_REPEAT];
/// The ports of the range.
const PORTS: usize = 4;

fn dial_tcp(dialer: &Dialer, with_tokio: bool) -> Result<Box<dyn AsFd + Send>, DialError> {
    if !with_tokio {
        return dialer.dial().map(|(stream, _)| Box::new(stream) as Box<dyn AsFd + Send>);
    }
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let dialed = runtime.block_on(async { dialer.dial_tokio().await.map(|(stream, _)| stream.into_std()) });
    dialed.map(|stream| Box::new(stream.unwrap()) as Box<dyn AsFd + Send>)
}

/// Calls `dial` on a thread whose connect() fails, then for every port of the range. Returns the row of the matrix.
fn row(
    name: &str,
    of: impl Fn(Errno) -> Errno,
    dial: impl Fn() -> Result<Box<dyn AsFd + Send>, DialError> + Sync,
) -> String {
    let mut row = format!("MATRIX Connect {name}: Returned:");
    for errno in ERRNOS {
        let failing = || {
            seccomp::fail(FailingCall::Connect, errno).unwrap();
            dial().map(drop)
        };
        let error = thread::scope(|scope| scope.spawn(failing).join().unwrap()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(of(errno).number()), "{name}, {errno}: {error:?}");
        let held: Vec<_> =
            (0..PORTS).map(|_| dial().unwrap_or_else(|error| panic!("{name}, {errno}: {error}"))).collect();
        // No TIME_WAIT socket may hold the ports.
        held.iter().for_each(|socket| option::set_reset_on_close(socket.as_fd()).unwrap());
        row += &format!(" {errno}");
    }
    row
}

#[test]
fn every_errno_of_connect_is_returned_and_costs_no_port() {
    in_namespace(|| {
        let rows = Mutex::new(Vec::new());
        each_in_namespace(STRATEGIES, |strategy| {
            set_sysctl("net.ipv4.ip_local_port_range", &format!("20000 {}", 20000 + PORTS - 1));
            let (_listener, destination) = listener("127.0.0.1", 4096);
            for with_tokio in [false, true] {
                let dialer = Dialer::builder(destination).strategy(strategy).build().unwrap();
                let name = format!("{strategy} {}", if with_tokio { "tokio" } else { "blocking" });
                rows.lock().unwrap().push(row(&name, |errno| errno, || dial_tcp(&dialer, with_tokio)));
            }
        });
        each_in_namespace([Sharing::Exclusive, Sharing::Shared], |sharing| {
            set_sysctl("net.ipv4.ip_local_port_range", &format!("20000 {}", 20000 + PORTS - 1));
            let destination = SocketAddr::from(([127, 0, 0, 1], 4000));
            let dialer = UdpDialer::new(destination, None, sharing).unwrap();
            // EAGAIN: no free port (`inet_autobind`).
            let of = |errno| if errno == Errno::EAGAIN { Errno::EADDRNOTAVAIL } else { errno };
            let dial = || dialer.dial().map(|(socket, _)| Box::new(socket) as Box<dyn AsFd + Send>);
            rows.lock().unwrap().push(row(&format!("udp {sharing:?}"), of, dial));
        });
        let mut rows = rows.into_inner().unwrap();
        rows.sort();
        rows.iter().for_each(|row| print(row));
    });
}

/// Refuses sock_diag on this thread, and returns the errno. A kernel that lacks only tcp_diag and udp_diag answers ENOENT.
fn without_sock_diag() -> Errno {
    seccomp::refuse(Facility::SocketDiag).unwrap();
    Errno::EPROTONOSUPPORT
}

fn assert_unseen(unseen: Unseen, errno: Errno) {
    assert_eq!(unseen.call, "sock_diag");
    assert_eq!(Errno::new(unseen.errno), errno);
}

fn exhaustion_names_what_cannot_be_seen(errno: Errno) {
    set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
    let (_listener, destination) = listener("127.0.0.1", 64);
    let dialer = Dialer::builder(destination).build().unwrap();
    assert_unseen(dialer.choice().unseen.expect("the ledger was not read"), errno);
    assert!(
        dialer.choice().to_string().ends_with("loaded?)") == (errno == Errno::ENOENT),
        "{}",
        dialer.choice()
    );
    assert_eq!(Errno::of(&dialer.refresh().unwrap_err()), Some(errno));
    let held: Vec<_> = (0..8).map(|_| dialer.dial().unwrap()).collect();
    let error = dialer.dial().unwrap_err();
    let said = error.to_string();
    let DialError::PortsExhausted { census: Err(Uncounted::Unseen(unseen)), .. } = error else {
        panic!("{error:?}")
    };
    assert_unseen(unseen, errno);
    assert!(said.contains("the holders cannot be listed (sock_diag: "), "{said}");
    drop(held);
}

fn a_shared_tuple_is_not_risked(errno: Errno) {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let destination = server.local_addr().unwrap();
    // The owner of the 4-tuple has SO_REUSEADDR, so a dialer that does not see it could take over the 4-tuple.
    let owner = socket::open(Transport::Udp, destination, false).unwrap();
    option::set_reuse_address(owner.as_fd(), true).unwrap();
    socket::bind(owner.as_fd(), SocketAddr::from(([127, 0, 0, 1], 20005))).unwrap();
    socket::connect(owner.as_fd(), destination).unwrap();
    let dialer = |sharing| UdpDialer::new(destination, None, sharing).unwrap();
    for shared in [dialer(Sharing::Shared).source_port(20005), dialer(Sharing::Shared)] {
        match shared.dial() {
            Err(DialError::CannotSee { unseen, .. }) => assert_unseen(unseen, errno),
            other => panic!("{other:?}"),
        }
    }
    dialer(Sharing::Exclusive).dial().unwrap();
    let owner = UdpSocket::from(owner);
    let send = || {
        server.send_to(b"mine", owner.local_addr().unwrap()).unwrap();
    };
    assert_eq!(arrives(send, &owner, &mut [0; 8]).0, 4);
}

#[test]
fn exhaustion_without_sock_diag_is_reported() {
    in_namespace(|| exhaustion_names_what_cannot_be_seen(without_sock_diag()));
}

#[test]
fn udp_without_sock_diag_shares_nothing() {
    in_namespace(|| a_shared_tuple_is_not_risked(without_sock_diag()));
}

#[test]
#[ignore = "needs a kernel without tcp_diag: cargo xtask kernels boots one"]
fn exhaustion_without_tcp_diag_is_reported() {
    in_namespace(|| exhaustion_names_what_cannot_be_seen(Errno::ENOENT));
}

#[test]
#[ignore = "needs a kernel without udp_diag: cargo xtask kernels boots one"]
fn udp_without_udp_diag_shares_nothing() {
    in_namespace(|| a_shared_tuple_is_not_risked(Errno::ENOENT));
}

/// Waits for the future on a thread that cannot start threads.
fn without_threads<T: Send>(runtime: &Runtime, future: impl Future<Output = T> + Send) -> T {
    let refused = || {
        seccomp::refuse(Facility::Threads).unwrap();
        runtime.block_on(future)
    };
    thread::scope(|scope| scope.spawn(refused).join().unwrap())
}

fn assert_no_thread(call: &str, error: &io::Error) {
    assert_eq!((call, Errno::of(error)), ("spawn_blocking", Some(Errno::EAGAIN)));
}

#[test]
fn a_long_search_fails_with_eagain() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 64);
        let dialer = Dialer::builder(destination).strategy(Strategy::KernelDefault).build().unwrap();
        let error = without_threads(&runtime(), dialer.dial_tokio()).unwrap_err();
        assert!(error.is_retryable());
        let DialError::Call { call, error, .. } = error else { panic!("{error:?}") };
        assert_no_thread(call, &error);
    });
}

#[test]
fn exhaustion_is_reported_without_a_census() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 64);
        // Binds to free ports on the thread of the runtime.
        let dialer = Dialer::builder(destination).strategy(Strategy::SELECT_TEST_REPEAT).build().unwrap();
        let _held: Vec<_> = (0..8).map(|_| dialer.dial().unwrap()).collect();
        let error = without_threads(&runtime(), dialer.dial_tokio()).unwrap_err();
        let DialError::PortsExhausted { census: Err(Uncounted::Unseen(unseen)), .. } = error else {
            panic!("{error:?}")
        };
        assert_no_thread(unseen.call, &Errno::new(unseen.errno).into());
    });
}

#[test]
fn builds_udp_dials_and_names_fail_with_eagain() {
    in_namespace(|| {
        let destination = "127.0.0.1:4000".parse().unwrap();
        let error = without_threads(&runtime(), Dialer::builder(destination).build_tokio()).unwrap_err();
        assert!(error.is_retryable());
        let BuildError::Probe(error) = error else { panic!("{error:?}") };
        assert_no_thread(error.call, &error.error);
        let dialer = UdpDialer::new(destination, None, Sharing::Exclusive).unwrap();
        let error = without_threads(&runtime(), dialer.dial_tokio()).unwrap_err();
        let DialError::Call { call, error, .. } = error else { panic!("{error:?}") };
        assert_no_thread(call, &error);
        let connector = Connector::builder().build();
        let error = without_threads(&runtime(), connector.connect("localhost", 4000)).unwrap_err();
        let ConnectError::Resolve { error, .. } = error else { panic!("{error:?}") };
        assert_eq!(Errno::of(&error), Some(Errno::EAGAIN));
    });
}

/// The runtime queues the work before it panics.
#[test]
fn a_failed_drain_does_not_begin_later() {
    in_namespace(|| {
        let group =
            ListenerGroupBuilder::at(([127, 0, 0, 1], 0)).policy(AcceptPolicy::Exclusive).open().unwrap();
        let runtime = runtime();
        let error = without_threads(&runtime, group.drain_tokio(Duration::ZERO)).unwrap_err();
        assert!(matches!(error, ListenError::Call { call: "spawn_blocking()", .. }), "{error:?}");
        // This thread can start threads, and the runtime runs its queue in order.
        runtime.block_on(async { task::spawn_blocking(|| ()).await.unwrap() });
        assert!(!group.is_drained());
        runtime.block_on(group.drain_tokio(Duration::ZERO)).unwrap();
        assert!(group.is_drained());
    });
}
