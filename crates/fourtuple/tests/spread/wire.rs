//! Every way over a wire on which packets have checksums, that the receiving kernel looks at.

use std::fs;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use fourtuple_testing::in_namespace;
use fourtuple_testing::wire::{FAR_V4, FAR_V6, NEAR_V4, NEAR_V6, Wire};

use crate::group::{lengths, open, shares};

/// Datagrams that this namespace's kernel did not deliver: wrong checksums among others.
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
            // None is lost, or this fails.
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

#[test]
fn checksums_are_right_without_a_privilege() {
    in_namespace(|| {
        let spreads = [("hash", false), ("random", true), ("flow:0:4", true), ("cpu", false)];
        passes("checksums_are_right_without_a_privilege", &spreads);
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
        passes("checksums_are_right_by_table_and_where_packets_are_changed", &spreads);
    });
}

/// The counters that the other tests look at do count.
#[test]
fn a_wrong_checksum_is_seen() {
    in_namespace(|| {
        let Some(wire) = Wire::open("a_wrong_checksum_is_seen") else { return };
        let nobody: (IpAddr, u16) = (NEAR_V4, 9);
        let sender = wire.far_away(|| UdpSocket::bind((FAR_V4, 0)).unwrap());
        let before = errors();
        sender.send_to(b"data", nobody).unwrap();
        let end = std::time::Instant::now() + crate::group::DEADLINE;
        while errors() == before {
            assert!(std::time::Instant::now() < end);
            std::thread::yield_now();
        }
    });
}
