//! All selectors over a wire with checksums that the receiving kernel verifies.

use std::fs;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::thread;
use std::time::Instant;

use fourtuple::spread::Selector;
use fourtuple_syscalls::option;
use fourtuple_testing::in_namespace;
use fourtuple_testing::wire::{FAR_V4, FAR_V6, NEAR_V4, NEAR_V6, Wire};

use crate::{DEADLINE, lengths, open, shares};

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
