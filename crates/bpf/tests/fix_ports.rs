//! The ports that `fix_ports` binds, in a network namespace and a cgroup of this process.
#![forbid(unsafe_code)]

mod cgroup;

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use cgroup::Cgroup;
use fourtuple_bpf::FixPorts;
use fourtuple_bpf::fix_ports::{Destination, FixPortsSettings, LeftAlone, NamespacePorts};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{netns, option};
use fourtuple_testing::{in_namespace, listener, set_sysctl};

const LOW: u16 = 20_000;
const PORTS: u16 = 400;

fn settings() -> FixPortsSettings {
    FixPortsSettings { past: 0.25, ..FixPortsSettings::default() }
}

fn ports() -> NamespacePorts {
    NamespacePorts {
        low: LOW,
        high: LOW + PORTS - 1,
        reserved: Vec::new(),
        time_wait_reuse: 2,
        has_sources: false,
    }
}

/// Attaches the programs for these destinations, which loopback reaches from themselves; `None` after a skip.
fn attach(
    test: &str,
    settings: &FixPortsSettings,
    ports: &NamespacePorts,
    destinations: &[SocketAddr],
) -> Option<(FixPorts, Cgroup)> {
    set_sysctl("net.ipv4.ip_local_port_range", &format!("{LOW} {}", LOW + PORTS - 1));
    let cgroup = match Cgroup::enter() {
        Ok(cgroup) => cgroup,
        Err(error) => {
            fourtuple_testing::skip(test, "cgroup", &error.to_string());
            return None;
        }
    };
    let mut fix = match FixPorts::load(settings) {
        Ok(fix) => fix,
        Err(
            error @ (fourtuple_bpf::BpfError::NotPermitted { .. } | fourtuple_bpf::BpfError::Absent { .. }),
        ) => {
            fourtuple_testing::skip(test, "bpf", &error.to_string());
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let cookie = netns::identity().unwrap();
    fix.set_namespace(cookie, ports).unwrap();
    for destination in destinations {
        let source = destination.ip().to_canonical();
        fix.set_route(&Destination::new(cookie, source), Some(source)).unwrap();
    }
    fix.attach(cgroup.directory()).unwrap();
    Some((fix, cgroup))
}

fn connect(destination: SocketAddr) -> io::Result<OwnedFd> {
    let socket = socket::open(Transport::Tcp, destination, false).unwrap();
    socket::connect(socket.as_fd(), destination).map(|_| socket)
}

fn port(socket: &OwnedFd) -> u16 {
    socket::local_address(socket.as_fd()).unwrap().port()
}

/// Connects once for every port of the range: no connect fails, and no port is used twice.
fn fill(destination: SocketAddr) -> Vec<OwnedFd> {
    let connected =
        (0..PORTS).map(|number| connect(destination).unwrap_or_else(|error| panic!("{number}: {error}")));
    let sockets: Vec<OwnedFd> = connected.collect();
    let ports: HashSet<u16> = sockets.iter().map(port).collect();
    assert_eq!(ports.len(), usize::from(PORTS));
    assert!(ports.iter().all(|port| (LOW..LOW + PORTS).contains(port)));
    sockets
}

fn fills_every_port(test: &str, address: &str, name: &str) {
    let (_listener, first) = listener(address, 4096);
    let (_other, second) = listener(address, 4096);
    let Some((fix, _cgroup)) = attach(test, &settings(), &ports(), &[first, second]) else { return };
    let named = |destination: SocketAddr| SocketAddr::new(name.parse().unwrap(), destination.port());
    let _held = fill(named(first));
    let counters = fix.counters().unwrap();
    let (drawn, below) = (counters.drawn, counters.left(LeftAlone::Below));
    assert_eq!(drawn + below + counters.fallbacks, u64::from(PORTS), "{counters:?}");
    // The share in use is an average over random samples and follows with a delay of about 64 connects.
    assert!(drawn > u64::from(PORTS) / 4, "{counters:?}");
    assert!(below > u64::from(PORTS) / 20, "{counters:?}");
    let error = connect(named(first)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(99), "EADDRNOTAVAIL: {error}");
    // Another destination uses the same ports again.
    let _shared = fill(named(second));
    let again = fix.counters().unwrap();
    assert!(again.drawn - drawn > u64::from(PORTS) / 4, "{again:?}");
}

#[test]
fn every_port_of_a_range_is_found_for_two_destinations() {
    in_namespace(|| {
        fills_every_port("every_port_of_a_range_is_found_for_two_destinations", "127.0.0.1", "127.0.0.1")
    });
}

#[test]
fn every_port_is_found_over_ipv6() {
    in_namespace(|| fills_every_port("every_port_is_found_over_ipv6", "::1", "::1"));
}

#[test]
fn every_port_is_found_by_v4_mapped_addresses() {
    in_namespace(|| {
        fills_every_port("every_port_is_found_by_v4_mapped_addresses", "127.0.0.1", "::ffff:127.0.0.1")
    });
}

#[test]
fn reserved_ports_are_not_drawn() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let reserved = (LOW + 100, LOW + 199);
        set_sysctl("net.ipv4.ip_local_reserved_ports", &format!("{}-{}", reserved.0, reserved.1));
        let known = NamespacePorts { reserved: vec![reserved], ..ports() };
        let Some((fix, _cgroup)) =
            attach("reserved_ports_are_not_drawn", &settings(), &known, &[destination])
        else {
            return;
        };
        let held: Vec<OwnedFd> = (0..PORTS - 100).map(|_| connect(destination).unwrap()).collect();
        assert!(held.iter().all(|socket| !(reserved.0..=reserved.1).contains(&port(socket))));
        assert!(connect(destination).is_err());
        assert!(fix.counters().unwrap().drawn > 50);
    });
}

#[test]
fn sockets_with_their_own_settings_are_left_alone() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let test = "sockets_with_their_own_settings_are_left_alone";
        let always = FixPortsSettings { past: 0.0, ..settings() };
        let Some((fix, _cgroup)) = attach(test, &always, &ports(), &[destination]) else { return };
        let held: Vec<OwnedFd> = (0..PORTS / 2).map(|_| connect(destination).unwrap()).collect();
        let before = fix.counters().unwrap();
        assert!(before.drawn > u64::from(PORTS) / 4, "{before:?}");
        let open = || socket::open(Transport::Tcp, destination, false).unwrap();
        let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let by_port = open();
        socket::bind(by_port.as_fd(), address(5_999)).unwrap();
        socket::connect(by_port.as_fd(), destination).unwrap();
        assert_eq!(port(&by_port), 5_999);
        let by_address = open();
        let _ = option::set_bind_address_no_port(by_address.as_fd()).unwrap();
        socket::bind(by_address.as_fd(), address(0)).unwrap();
        socket::connect(by_address.as_fd(), destination).unwrap();
        let by_device = open();
        option::set_device(by_device.as_fd(), "lo").unwrap();
        socket::connect(by_device.as_fd(), destination).unwrap();
        let by_range = open();
        let has_range = option::set_local_port_range(by_range.as_fd(), LOW, LOW + PORTS - 1).unwrap();
        socket::connect(by_range.as_fd(), destination).unwrap();
        let udp = socket::open(Transport::Udp, destination, false).unwrap();
        socket::connect(udp.as_fd(), destination).unwrap();
        let after = fix.counters().unwrap();
        let more = |reason| after.left(reason) - before.left(reason);
        assert_eq!(after.drawn, before.drawn, "{after:?}");
        assert_eq!((more(LeftAlone::BoundPort), more(LeftAlone::BoundAddress)), (1, 1), "{after:?}");
        assert_eq!((more(LeftAlone::Device), more(LeftAlone::Udp)), (1, 1), "{after:?}");
        assert_eq!(more(LeftAlone::Range), u64::from(has_range == option::Answer::Done), "{after:?}");
        drop(held);
    });
}

#[test]
fn an_unknown_destination_is_requested_once() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let test = "an_unknown_destination_is_requested_once";
        let Some((mut fix, _cgroup)) = attach(test, &settings(), &ports(), &[]) else { return };
        let held: Vec<OwnedFd> = (0..5).map(|_| connect(destination).unwrap()).collect();
        let cookie = netns::identity().unwrap();
        let mut requested = Vec::new();
        fix.requested(|wanted| requested.push((wanted.namespace, wanted.address())));
        requested.retain(|(namespace, _)| *namespace == cookie);
        assert_eq!(requested, [(cookie, IpAddr::from([127, 0, 0, 1]))]);
        assert!(fix.counters().unwrap().left(LeftAlone::Route) >= 5);
        drop(held);
    });
}

#[test]
fn a_dry_run_binds_nothing() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let dry = FixPortsSettings { dry_run: true, ..settings() };
        let Some((fix, _cgroup)) = attach("a_dry_run_binds_nothing", &dry, &ports(), &[destination]) else {
            return;
        };
        let held: Vec<OwnedFd> = (0..PORTS).map(|_| connect(destination).unwrap()).collect();
        let counters = fix.counters().unwrap();
        assert!(counters.would_draw > u64::from(PORTS) / 4, "{counters:?}");
        assert_eq!((counters.drawn, counters.probes), (0, 0), "{counters:?}");
        drop(held);
    });
}

#[test]
fn more_source_addresses_give_more_connections() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let sources = vec!["127.0.0.5".parse().unwrap(), "127.0.0.6".parse().unwrap()];
        let settings = FixPortsSettings { sources, ..settings() };
        let known = NamespacePorts { has_sources: true, ..ports() };
        let test = "more_source_addresses_give_more_connections";
        let Some((fix, _cgroup)) = attach(test, &settings, &known, &[destination]) else { return };
        let held: Vec<OwnedFd> = (0..2 * PORTS).map(|_| connect(destination).unwrap()).collect();
        let sources: HashSet<IpAddr> =
            held.iter().map(|socket| socket::local_address(socket.as_fd()).unwrap().ip()).collect();
        assert_eq!(sources.len(), 3, "{sources:?}");
        let counters = fix.counters().unwrap();
        assert!(counters.spread > 0 && counters.drawn > 0, "{counters:?}");
    });
}

#[test]
fn two_programs_on_one_cgroup_both_run() {
    in_namespace(|| {
        let (_listener, destination) = listener("127.0.0.1", 4096);
        let test = "two_programs_on_one_cgroup_both_run";
        let dry = FixPortsSettings { dry_run: true, ..settings() };
        let Some((other, _first)) = attach(test, &dry, &ports(), &[destination]) else { return };
        let Some((fix, _second)) = attach(test, &settings(), &ports(), &[destination]) else { return };
        let _held: Vec<OwnedFd> = (0..PORTS - 1).map(|_| connect(destination).unwrap()).collect();
        assert!(fix.counters().unwrap().drawn > 0);
        drop(fix);
        let before = other.counters().unwrap().connects;
        let _last = connect(destination).unwrap();
        assert!(before >= u64::from(PORTS) - 1 && other.counters().unwrap().connects > before);
    });
}
