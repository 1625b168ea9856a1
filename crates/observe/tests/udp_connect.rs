//! The counters of a trace of connect() over UDP equal the counts of the program.

mod traced;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_observe::trace::{Connect, Protocol};
use fourtuple_syscalls::Errno;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::{in_namespace, set_sysctl};
use traced::{count, elsewhere, own_network, to, traced, tuple, until_none_missed};

const PORTS: u64 = 600;

fn udp(destination: SocketAddr) -> Connect {
    Connect { protocol: Protocol::Udp, ..to(destination) }
}

fn connect(destination: SocketAddr) -> io::Result<OwnedFd> {
    let socket = socket::open(Transport::Udp, destination, false).unwrap();
    socket::connect(socket.as_fd(), destination).map(|_| socket)
}

fn refused(destination: SocketAddr) {
    let error = connect(destination).unwrap_err();
    assert_eq!(Errno::of(&error), Some(Errno::EAGAIN), "{error}");
}

fn ports(sockets: &[OwnedFd]) -> Vec<u16> {
    sockets.iter().map(|socket| socket::local_address(socket.as_fd()).unwrap().port()).collect()
}

/// Takes every port, fails three times, then releases a port and connects again.
fn fill(destination: SocketAddr) -> Vec<u16> {
    let mut sockets: Vec<OwnedFd> = (0..PORTS).map(|_| connect(destination).unwrap()).collect();
    let mut known = ports(&sockets);
    (0..3).for_each(|_| refused(destination));
    sockets.pop();
    let last = connect(destination).unwrap();
    // A socket that has a port does not search.
    socket::connect(last.as_fd(), destination).unwrap();
    known.extend(ports(&[last]));
    known
}

fn agrees(test: &str, destination: &str) {
    set_sysctl("net.ipv4.ip_local_port_range", &format!("20000 {}", 20_000 + PORTS - 1));
    let destination: SocketAddr = destination.parse().unwrap();
    let run = || traced(test, &udp(destination), || fill(destination));
    let Some((known, outcome)) = until_none_missed(run) else { return };
    let results = outcome.results;
    assert_eq!(outcome.validity, [], "{results:?}");
    let tuple = tuple(&results, destination);
    let even = known.iter().filter(|&port| port % 2 == 0).count() as u64;
    assert_eq!((tuple.even, tuple.odd), (even, PORTS + 1 - even), "{tuple:?}");
    assert_eq!((results.searches, results.lost, results.tier.as_str()), (PORTS + 1, 0, "cgroup+tp_btf"));
    assert_eq!((count(results.search_ns.even), count(results.search_ns.odd)), (even, PORTS + 1 - even));
    assert_eq!(results.histogram.iter().map(|step| step.even + step.odd).sum::<u64>(), PORTS + 1);
    assert_eq!(results.heat.columns.iter().flatten().sum::<u64>(), PORTS + 1);
    // UDP has no handshake.
    assert_eq!((results.handshake_ns, results.established), (None, 0));
    assert_eq!(results.failed.clone().into_iter().collect::<Vec<_>>(), [("EAGAIN".to_owned(), 3)]);
    assert_eq!((tuple.failed, tuple.no_port, tuple.retries), (3, 3, 3), "{tuple:?}");
    assert_eq!((results.given_port, tuple.given_port), (1, 1));
    assert!(!results.samples.is_empty());
    for sample in &results.samples {
        assert!(sample.source_port.is_some_and(|port| known.contains(&port)), "{sample:?}");
    }
}

#[test]
fn udp_over_ipv4_is_counted() {
    in_namespace(|| agrees("udp_over_ipv4_is_counted", "127.0.0.1:53"));
}

#[test]
fn udp_in_another_namespace_is_not_counted() {
    in_namespace(|| {
        let test = "udp_in_another_namespace_is_not_counted";
        let destination = SocketAddr::from(([127, 0, 0, 1], 54));
        let program = || {
            connect(destination).unwrap();
            elsewhere(|| (0..5).for_each(|_| drop(connect(destination).unwrap())));
            connect(destination).unwrap();
        };
        for (network, number) in [(Some(own_network()), 2), (None, 7), (Some(1), 0)] {
            let trace = Connect { network, ..udp(destination) };
            let Some(((), outcome)) = until_none_missed(|| traced(test, &trace, program)) else { return };
            assert_eq!(outcome.results.searches, number, "{:?}", outcome.results);
        }
    });
}

#[test]
fn udp_over_ipv6_is_counted() {
    in_namespace(|| agrees("udp_over_ipv6_is_counted", "[::1]:53"));
}

#[test]
fn a_search_without_an_end_counts_as_failed() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20001");
        let destination = SocketAddr::from(([127, 0, 0, 3], 53));
        let filled = || {
            let sockets = [connect(destination).unwrap(), connect(destination).unwrap()];
            refused(destination);
            ports(&sockets)
        };
        let run = || traced("a_search_without_an_end_counts_as_failed", &udp(destination), filled);
        let Some((mut known, outcome)) = until_none_missed(run) else { return };
        known.sort_unstable();
        assert_eq!(known, [20_000, 20_001]);
        let (results, tuple) = (&outcome.results, tuple(&outcome.results, destination));
        assert_eq!((tuple.even, tuple.odd, tuple.failed, tuple.no_port), (1, 1, 1, 0), "{tuple:?}");
        assert_eq!(results.failed.clone().into_iter().collect::<Vec<_>>(), [("unknown".to_owned(), 1)]);
    });
}
