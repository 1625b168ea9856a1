//! Selectors that need no privilege.

use std::collections::BTreeSet;
use std::net::UdpSocket;

use fourtuple::spread::{Selector, UdpGroup, UdpGroupError};
use fourtuple_testing::{in_namespace, set_sysctl};

use crate::group::{assert_even, lengths, open, sender, shares};

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
            let groups: Vec<UdpGroup> = (0..4).map(|_| open().unwrap()).collect();
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
