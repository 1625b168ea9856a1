//! Selectors that need no privilege, control packets among more data than the receiver reads, and all selectors over a wire with checksums
//! that the receiving kernel verifies.

use std::collections::BTreeSet;
use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use fourtuple::spread::{ControlFilter, Selector, UdpGroup, UdpGroupError};
use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::option;
use fourtuple_testing::stream::Loopback;
use fourtuple_testing::wire::{FAR_V4, FAR_V6, NEAR_V4, NEAR_V6, Wire};
use fourtuple_testing::{StopOnDrop, in_namespace, set_sysctl};

use crate::{
    DEADLINE, assert_even, lengths, members, open, open_with_control, sender, shares, take, when_released,
};

const DATA: u32 = 6_000;
/// The number of data packets between two control packets.
const BETWEEN: u32 = 60;
const CONTROL: usize = (DATA / BETWEEN) as usize;
/// The first byte of a control packet.
const MARK: u32 = 0xff00_0000;
const ALL: [&str; 2] = ["127.0.0.1", "::1"];

/// Sends data and control packets while no socket is read; control packets are sent from `control`.
fn overload(group: &UdpGroup, data: &UdpSocket, control: &UdpSocket) {
    let loopback = Loopback::open();
    for packet in 0..DATA {
        data.send_to(&packet.to_be_bytes(), group.address()).unwrap();
        if packet % BETWEEN == 0 {
            control.send_to(&(MARK | packet).to_be_bytes(), group.address()).unwrap();
            loopback.flush();
        }
    }
}

/// Returns the numbers of control packets and of data packets in the queues of these sockets.
fn waiting(sockets: &[OwnedFd]) -> (usize, usize) {
    let mut batch = Batch::new(64, 64);
    let mut got = Vec::new();
    for socket in sockets {
        take(socket, &mut batch, &mut got);
    }
    let control = got.iter().filter(|packet| **packet & MARK != 0).count();
    (control, got.len() - control)
}

/// Does the same as [`waiting`], but waits for `packets` packets: those that another processor has to deliver come after a flush.
fn arrived(sockets: &[OwnedFd], packets: usize) -> (usize, usize) {
    let end = Instant::now() + DEADLINE;
    let (mut control, mut data) = waiting(sockets);
    while control + data < packets && Instant::now() < end {
        thread::yield_now();
        let more = waiting(sockets);
        (control, data) = (control + more.0, data + more.1);
    }
    (control, data)
}

fn at(address: &str) -> UdpSocket {
    UdpSocket::bind((address, 0)).unwrap()
}

#[test]
fn control_without_its_own_socket_is_dropped_with_data() {
    in_namespace(|| {
        let test = "control_without_its_own_socket_is_dropped_with_data";
        for address in ALL {
            let group =
                open(test, (address.parse::<std::net::IpAddr>().unwrap(), 0).into(), 2, "random").unwrap();
            let sender = at(address);
            overload(&group, &sender, &sender);
            let (control, data) = waiting(&members(&group));
            assert!(data > 0 && control < CONTROL / 4, "{control} of {CONTROL} and {data} of {DATA} came");
        }
    });
}

fn none_is_lost(test: &str, spreads: &[&str]) {
    for address in ALL {
        for spread in spreads {
            for filter in
                ["bytes:0:1=0xff", "bytes:0:4:0xff000000=0xff000000", "neighbour:0:1=0xff", "ttl=255", "port"]
            {
                if spread.starts_with("xdp") && filter == "port" {
                    continue;
                }
                let (data, control) = (at(address), at(address));
                option::set_hops(control.as_fd(), 255).unwrap();
                let filter = match filter {
                    "port" => format!("port={}", control.local_addr().unwrap().port()),
                    other => other.to_owned(),
                };
                let to = SocketAddr::new(address.parse().unwrap(), 0);
                let Some(group) = open_with_control(test, to, 2, spread, &filter) else { return };
                overload(&group, &data, &control);
                let what = format!("{spread} {filter} {address}");
                assert_eq!(arrived(&[group.control().unwrap()], CONTROL), (CONTROL, 0), "{what}");
                let (control, data) = waiting(&members(&group));
                assert!(control == 0 && data > 0 && data < DATA as usize, "{what}: {control}, {data}");
            }
        }
    }
}

#[test]
fn a_control_socket_loses_no_control_packet() {
    in_namespace(|| none_is_lost("a_control_socket_loses_no_control_packet", &["random", "flow:0:4", "cpu"]));
}

#[cfg(feature = "bpf")]
#[test]
fn a_control_socket_with_a_table_loses_no_packet() {
    in_namespace(|| {
        none_is_lost(
            "a_control_socket_with_a_table_loses_no_packet",
            &["map:random", "map:flow:0:4", "map:hash", "xdp:64"],
        );
    });
}

/// Opens groups at an address to which a thread keeps sending control packets and data. A packet may arrive at any time, also
/// between the bind() of the first member and the bind() of the control socket: it reaches the right socket or none.
fn while_it_opens(test: &str, spreads: &[&str]) {
    const OPENED: usize = 200;
    for address in ALL {
        // Below the range from which the kernel gives ports to other sockets.
        let to = SocketAddr::new(address.parse().unwrap(), 4000);
        let ends = AtomicBool::new(false);
        thread::scope(|scope| {
            let _ends = StopOnDrop(&ends);
            scope.spawn(|| {
                let (sender, loopback) = (at(address), Loopback::open());
                option::set_hops(sender.as_fd(), 255).unwrap();
                let mut number = 0_u32;
                while !ends.load(Ordering::Relaxed) {
                    number += 1;
                    // The send fails with ECONNREFUSED while no group is open.
                    let _ = sender.send_to(&(MARK | number & 0xffff).to_be_bytes(), to);
                    let _ = sender.send_to(&(number & 0xffff).to_be_bytes(), to);
                    if number.is_multiple_of(100) {
                        loopback.flush();
                    }
                }
            });
            let (mut at_members, mut at_control) = ((0, 0), (0, 0));
            for turn in 0..OPENED {
                let spread = spreads[turn % spreads.len()];
                let Some(group) = open_with_control(test, to, 2, spread, "neighbour:0:1=0xff") else { break };
                let (control, data) = waiting_now(&members(&group));
                at_members = (at_members.0 + control, at_members.1 + data);
                let (control, data) = waiting_now(&[group.control().unwrap()]);
                at_control = (at_control.0 + control, at_control.1 + data);
            }
            assert_eq!(
                (at_members.0, at_control.1),
                (0, 0),
                "control at members, data at control: {address}"
            );
        });
    }
}

/// A selector that returns a number of no socket lets the kernel's hash choose among all sockets, the control socket included.
#[test]
fn data_never_reaches_the_control_socket() {
    const RETURN: u16 = 0x06;
    in_namespace(|| {
        for address in ALL {
            let test = "data_never_reaches_the_control_socket";
            let to = SocketAddr::new(address.parse().unwrap(), 0);
            let Some(group) = open_with_control(test, to, 2, "random", "bytes:0:1=0xff") else { return };
            let member = group.member(0).unwrap();
            let attached = option::attach_group_selector(member.as_fd(), &[(RETURN, 0, 0, 99)]).unwrap();
            assert_eq!(attached, option::Answer::Done);
            for number in 0..100_u32 {
                // Each source port has another hash.
                at(address).send_to(&number.to_be_bytes(), group.address()).unwrap();
            }
            Loopback::open().flush();
            assert_eq!(waiting(&[group.control().unwrap()]), (0, 0), "{address}");
            let (_, data) = waiting(&members(&group));
            assert!(
                (1..100).contains(&data),
                "{address}: the hash did not choose: {data} packets at members"
            );
        }
    });
}

/// Counts packets like [`waiting`], but does not wait for further packets.
fn waiting_now(sockets: &[OwnedFd]) -> (usize, usize) {
    let mut batch = Batch::new(64, 64);
    let (mut control, mut data) = (0, 0);
    for socket in sockets {
        let _ = batch.receive(socket.as_fd());
        let found = batch.iter().filter(|datagram| datagram.bytes[0] == 0xff).count();
        (control, data) = (control + found, data + batch.len() - found);
    }
    (control, data)
}

#[test]
fn control_goes_to_its_socket_while_a_group_opens() {
    in_namespace(|| while_it_opens("control_goes_to_its_socket_while_a_group_opens", &["random", "cpu"]));
}

#[cfg(feature = "bpf")]
#[test]
fn control_goes_to_its_socket_while_a_table_fills() {
    in_namespace(|| {
        while_it_opens("control_goes_to_its_socket_while_a_table_fills", &["map:random", "map:hash"]);
    });
}

/// The packets have a longer IP header, or are shorter than the bytes that the filter compares.
#[test]
fn odd_packets_are_classified_correctly() {
    in_namespace(|| {
        let mut spreads = vec!["random"];
        if cfg!(feature = "bpf") {
            spreads.push("map");
        }
        for spread in spreads {
            let to = "127.0.0.1:0".parse().unwrap();
            let sender = at("127.0.0.1");
            // The IP options are four times "no operation".
            option::set_int(sender.as_fd(), 0, 4, 0x0101_0101).unwrap();
            let filter = format!("port={}", sender.local_addr().unwrap().port());
            let test = "odd_packets_are_classified_correctly";
            let Some(group) = open_with_control(test, to, 2, spread, &filter) else { return };
            let loopback = Loopback::open();
            for _ in 0..10 {
                sender.send_to(&[0; 4], group.address()).unwrap();
                at("127.0.0.1").send_to(&[0; 4], group.address()).unwrap();
            }
            loopback.flush();
            assert_eq!(arrived(&[group.control().unwrap()], 10).1, 10, "{spread}");
            assert_eq!(arrived(&members(&group), 10).1, 10, "{spread}");

            let group = open_with_control(test, to, 2, spread, "bytes:4:4=0").unwrap();
            for length in [4, 5, 7] {
                sender.send_to(&[0; 8][..length], group.address()).unwrap();
            }
            loopback.flush();
            assert_eq!(waiting(&[group.control().unwrap()]), (0, 0), "{spread}");
            sender.send_to(&[0; 8], group.address()).unwrap();
            loopback.flush();
            assert_eq!(arrived(&[group.control().unwrap()], 1), (0, 1), "{spread}");
            assert_eq!(arrived(&members(&group), 3), (0, 3), "{spread}");
        }
    });
}

/// A packet needs both properties of a neighbour's control packet; one alone is not enough.
#[test]
fn control_lookalikes_from_afar_are_data() {
    in_namespace(|| {
        let test = "control_lookalikes_from_afar_are_data";
        let mut spreads = vec!["random"];
        if cfg!(feature = "bpf") {
            spreads.push("map");
        }
        for spread in spreads {
            for address in ALL {
                let to = SocketAddr::new(address.parse().unwrap(), 0);
                let Some(group) = open_with_control(test, to, 2, spread, "neighbour:0:1:0xe0=0x20") else {
                    return;
                };
                let sender = at(address);
                for (hops, first) in [(64, 0x3f), (254, 0x3f), (255, 0x40), (255, 0x3f)] {
                    option::set_hops(sender.as_fd(), hops).unwrap();
                    sender.send_to(&[first, 0, 0, 0], group.address()).unwrap();
                }
                sender.send_to(&[], group.address()).unwrap();
                Loopback::open().flush();
                let mut got = Batch::new(8, 64);
                // Packets that another processor has to deliver come after a flush.
                let mut received = |sockets: &[OwnedFd], packets: usize| {
                    let (end, mut count) = (Instant::now() + DEADLINE, 0);
                    while count < packets && Instant::now() < end {
                        let now = sockets.iter().map(|socket| got.receive(socket.as_fd()).unwrap_or(0));
                        count += now.sum::<usize>();
                        thread::yield_now();
                    }
                    count
                };
                assert_eq!(received(&[group.control().unwrap()], 1), 1, "{spread} {address}");
                assert_eq!(received(&members(&group), 4), 4, "{spread} {address}");
            }
        }
    });
}

#[test]
fn invalid_filters_are_refused() {
    in_namespace(|| {
        for (spread, filter) in [("hash", "ttl=255"), ("xdp:8", "port=3784")] {
            let (spread, filter) =
                (spread.parse::<Selector>().unwrap(), filter.parse::<ControlFilter>().unwrap());
            let result = UdpGroup::open_with_control("127.0.0.1:0".parse().unwrap(), 2, &spread, &filter);
            let error = result.unwrap_err();
            assert!(matches!(error, UdpGroupError::NoControl { .. }) && error.is_usage(), "{error}");
        }
    });
}

fn got(test: &str, spread: &str, members: usize, packets: u32, to: &str) -> Vec<Vec<u32>> {
    let group = open(test, to.parse().unwrap(), members, spread).unwrap();
    shares(&group, &sender(&group), packets)
}

#[test]
fn hash_sends_one_tuple_to_one_socket() {
    in_namespace(|| {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let got = got("hash_sends_one_tuple_to_one_socket", "hash", 4, 2_000, address);
            assert_eq!(got.iter().filter(|got| !got.is_empty()).count(), 1, "{address}");
        }
    });
}

#[test]
fn random_sends_one_tuple_to_all_sockets() {
    in_namespace(|| {
        // One percentage point is more than seven standard deviations of 100,000 packets, and more than five of 60,000.
        for (address, packets) in [("127.0.0.1:0", 100_000), ("[::1]:0", 60_000)] {
            assert_even(&got("random_sends_one_tuple_to_all_sockets", "random", 4, packets, address));
        }
    });
}

#[test]
fn all_ten_members_get_packets() {
    in_namespace(|| {
        for spread in ["random", "flow:0:4"] {
            let got = got("all_ten_members_get_packets", spread, 10, 2_000, "127.0.0.1:0");
            // The expected share is 200 packets; 100 are more than seven standard deviations.
            assert!(got.iter().all(|got| got.len().abs_diff(200) < 100), "{:?}", lengths(&got));
        }
    });
}

#[test]
fn a_flow_within_the_tuple_stays_with_one_socket() {
    in_namespace(|| {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let test = "a_flow_within_the_tuple_stays_with_one_socket";
            let got = got(test, "flow:0:4:0xf", 4, 4_000, address);
            for (index, got) in got.iter().enumerate() {
                assert_eq!(got.len(), 1_000);
                assert!(got.iter().all(|packet| packet & 0xf & 3 == index as u32));
                assert!(got.is_sorted(), "packets overtook each other");
            }
        }
    });
}

#[test]
fn packets_shorter_than_the_key_go_to_the_first() {
    in_namespace(|| {
        let test = "packets_shorter_than_the_key_go_to_the_first";
        assert_eq!(lengths(&got(test, "flow:8:4", 3, 30, "127.0.0.1:0")), [30, 0, 0]);
    });
}

/// The CPU that sends a packet also receives it over loopback.
#[test]
fn each_cpu_has_its_socket() {
    in_namespace(|| {
        let allowed = fourtuple_syscalls::schedule::allowed_cpus().unwrap();
        for cpu in allowed {
            fourtuple_syscalls::schedule::pin_to(cpu).unwrap();
            let got = got("each_cpu_has_its_socket", "cpu", 2, 500, "127.0.0.1:0");
            // Softirqs that fall behind run in a ksoftirqd thread, on the same CPU.
            assert_eq!(got[cpu % 2].len(), 500, "{:?}", lengths(&got));
        }
    });
}

/// Without a selector SO_REUSEPORT would let bind(2) choose the port of another group.
#[test]
fn groups_at_port_0_share_no_port() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "40000 40003");
        for selector in [Selector::Hash, Selector::Random] {
            let open = || UdpGroup::open(([127, 0, 0, 1], 0).into(), 2, &selector);
            // The ports of the selector before are free when no child of another test has copies of its sockets.
            let groups: Vec<UdpGroup> = (0..4).map(|_| when_released(open).unwrap()).collect();
            let ports: BTreeSet<u16> = groups.iter().map(|group| group.address().port()).collect();
            assert_eq!(ports.len(), 4, "{selector}: {ports:?}");
            assert!(open().is_err(), "{selector}: every port is taken");
        }
    });
}

#[test]
fn invalid_groups_are_refused() {
    in_namespace(|| {
        let open =
            |members, spread: &Selector| UdpGroup::open("127.0.0.1:0".parse().unwrap(), members, spread);
        for members in [0, 1025] {
            assert!(matches!(open(members, &Selector::Random), Err(UdpGroupError::Members { .. })));
        }
        let odd = Selector::Key(fourtuple::spread::FlowKey { offset: 0, width: 3, mask: 1 });
        assert!(matches!(open(1, &odd), Err(UdpGroupError::Impossible { .. })));
        let mut group = open(2, &Selector::Random).unwrap();
        assert!(matches!(group.steer(&[1, 1]), Err(UdpGroupError::Fixed { .. })));
        assert!(matches!(group.join(), Err(UdpGroupError::Fixed { .. })));
        assert!(matches!(group.leave(0), Err(UdpGroupError::Fixed { .. })));
        assert!(group.control().is_err() && group.member(2).is_err());
        assert_eq!(group.len(), 2);
    });
}

#[test]
fn a_udp_group_without_a_free_port_is_exhausted() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20001");
        let open = |port: u16| UdpGroup::open(([127, 0, 0, 1], port).into(), 2, &Selector::Random);
        let _held = [20_000, 20_001].map(|port| UdpSocket::bind(("127.0.0.1", port)).unwrap());
        for (port, is_exhausted) in [(0, true), (20_000, false)] {
            let error = open(port).unwrap_err();
            assert!(error.is_retryable() && error.is_exhausted() == is_exhausted, "{error}");
        }
    });
}

#[cfg(not(feature = "bpf"))]
mod not_built {
    //! A build without the feature `bpf`.

    use fourtuple::spread::{Selector, UdpGroup, UdpGroupError};
    use fourtuple_testing::in_namespace;

    #[test]
    fn selectors_absent_from_this_build_are_refused() {
        in_namespace(|| {
            let named = ["map", "xdp:64@lo", "cpumap@lo"].map(|text| text.parse().unwrap());
            let every_kind = Selector::ALL.into_iter().filter(Selector::needs_bpf);
            for spread in named.into_iter().chain(every_kind) {
                let error = UdpGroup::open("127.0.0.1:0".parse().unwrap(), 2, &spread).unwrap_err();
                assert!(matches!(error, UdpGroupError::NotBuilt { .. }), "{error}");
                assert!(error.to_string().contains("feature bpf"), "{error}");
            }
        });
    }
}

/// Returns the number of datagrams that the kernel did not deliver in this namespace, for example because of a wrong checksum.
fn errors() -> u64 {
    let old = fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
    let mut udp = old.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (udp.next().unwrap(), udp.next().unwrap());
    let v4 = names.split(' ').zip(values.split(' ')).filter(|(name, _)| is_error(name));
    let new = fs::read_to_string("/proc/thread-self/net/snmp6").unwrap();
    let v6 = new.lines().filter_map(|line| line.strip_prefix("Udp6")?.split_once(char::is_whitespace));
    let v6 = v6.filter(|(name, _)| is_error(name));
    v4.chain(v6).map(|(_, value)| value.trim().parse::<u64>().unwrap()).sum()
}

fn is_error(name: &str) -> bool {
    ["InErrors", "InCsumErrors", "NoPorts", "RcvbufErrors"].contains(&name)
}

const PACKETS: u32 = 1_000;

fn passes(test: &str, spreads: &[(&str, bool)]) {
    let Some(wire) = Wire::open(test) else { return };
    for (near, far) in [(NEAR_V4, FAR_V4), (NEAR_V6, FAR_V6)] {
        for (spread, is_even) in spreads {
            let Some(group) = open(test, SocketAddr::new(near, 0), 4, spread) else { return };
            let sender = wire.far_away(|| UdpSocket::bind((far, 0)).unwrap());
            let before = errors();
            // `shares` panics if a packet is lost.
            let got = shares(&group, &sender, PACKETS);
            assert_eq!(errors(), before, "{spread} {near}");
            let busy = got.iter().filter(|got| !got.is_empty()).count();
            assert!(!is_even || busy == 4, "{spread} {near}: {:?}", lengths(&got));
            if let Some(at) = group.at_device() {
                assert!(at.native, "{spread}");
                assert_eq!(at.changed, u64::from(PACKETS), "{spread} {near}");
            }
        }
    }
}

/// Tests the given selectors, and one of each kind, with BPF or without.
fn every_selector_passes(test: &str, bpf: bool, spreads: &[(&str, bool)]) {
    let kinds = Selector::ALL.into_iter().filter(|selector| selector.needs_bpf() == bpf);
    let kinds: Vec<String> = kinds.map(|selector| selector.to_string()).collect();
    let kinds = kinds.iter().map(|selector| (selector.as_str(), false));
    passes(test, &spreads.iter().copied().chain(kinds).collect::<Vec<_>>());
}

#[test]
fn checksums_are_right_without_a_privilege() {
    in_namespace(|| {
        let spreads = [("hash", false), ("random", true), ("flow:0:4", true), ("cpu", false)];
        every_selector_passes("checksums_are_right_without_a_privilege", false, &spreads);
    });
}

#[cfg(feature = "bpf")]
#[test]
fn checksums_are_right_by_table_and_where_packets_are_changed() {
    in_namespace(|| {
        let spreads = [
            ("map:random", true),
            ("map:flow:0:4", true),
            ("xdp:256", true),
            ("xdp:256@near", true),
            ("cpumap:1", false),
            ("cpumap", false),
            ("cpumap:flow:0:4@near", false),
        ];
        every_selector_passes("checksums_are_right_by_table_and_where_packets_are_changed", true, &spreads);
    });
}

/// The drop counters used by the other tests work: IPv6 drops a datagram without a checksum, and no device adds one.
#[test]
fn a_missing_checksum_is_dropped_by_ipv6_only() {
    // The constant is from include/uapi/linux/udp.h, the socket options are from asm-generic/socket.h.
    const UDP_NO_CHECK6_TX: i32 = 101;
    const SO_NO_CHECK: i32 = 11;
    const SOL_UDP: i32 = 17;
    const SOL_SOCKET: i32 = 1;
    in_namespace(|| {
        let test = "a_missing_checksum_is_dropped_by_ipv6_only";
        let Some(wire) = Wire::open(test) else { return };
        let spreads = if cfg!(feature = "bpf") { &["random", "map", "xdp:8"][..] } else { &["random"] };
        for spread in spreads {
            let Some(group) = open(test, SocketAddr::new(NEAR_V4, 0), 2, spread) else { return };
            let sender = wire.far_away(|| UdpSocket::bind((FAR_V4, 0)).unwrap());
            option::set_int(sender.as_fd(), SOL_SOCKET, SO_NO_CHECK, 1).unwrap();
            let before = errors();
            shares(&group, &sender, 100);
            assert_eq!(errors(), before, "{spread}");
            drop(group);

            let group = open(test, SocketAddr::new(NEAR_V6, 0), 2, spread).unwrap();
            let sender = wire.far_away(|| UdpSocket::bind((FAR_V6, 0)).unwrap());
            option::set_int(sender.as_fd(), SOL_UDP, UDP_NO_CHECK6_TX, 1).unwrap();
            sender.send_to(b"data", group.address()).unwrap();
            let end = Instant::now() + DEADLINE;
            while errors() == before {
                assert!(Instant::now() < end, "{spread}: no drop was counted");
                thread::yield_now();
            }
        }
    });
}

/// A sender on this host whose device leaves checksums incomplete, which is the default of veth. Native `cpumap` loses such
/// packets: see docs/spread.md.
#[cfg(feature = "bpf")]
#[test]
fn packets_without_a_checksum_yet_are_received_too() {
    in_namespace(|| {
        let test = "packets_without_a_checksum_yet_are_received_too";
        let Some(wire) = Wire::open(test) else { return };
        wire.far_away(|| fourtuple_syscalls::device::leave_checksums(fourtuple_testing::wire::FAR, true))
            .unwrap();
        for (near, far) in [(NEAR_V4, FAR_V4), (NEAR_V6, FAR_V6)] {
            for spread in ["map", "xdp:8"] {
                let Some(group) = open(test, SocketAddr::new(near, 0), 2, spread) else { return };
                let sender = wire.far_away(|| UdpSocket::bind((far, 0)).unwrap());
                let before = errors();
                shares(&group, &sender, 500);
                assert_eq!(errors(), before, "{spread} {near}");
            }
        }
    });
}
