//! A path to the next hop whose MTU shrinks and grows again.

use std::net::SocketAddr;
use std::time::Instant;

use fourtuple_forward::{Drop, Link, PlaneKind};
use fourtuple_syscalls::device;
use fourtuple_testing::wire::{FAR_V4, FAR_V6, NEAR, Wire};
use fourtuple_testing::{each_in_namespace, in_namespace};

use super::{LONG, burst, drain, gathering_socket, kinds, reach, require_balance, socket, start, take};

const PACKETS: usize = 10;
const BYTES: usize = 1400;

/// With IP_PMTUDISC_WANT the kernel fragments packets, but not messages that it has to segment (UDP_SEGMENT). The plane sends
/// such packets one by one while the MTU is too small, and in batches again afterwards.
#[test]
fn packets_beyond_the_mtu_are_fragmented() {
    in_namespace(|| {
        let cases: Vec<_> = kinds().flat_map(|kind| [(kind, FAR_V4), (kind, FAR_V6)]).collect();
        each_in_namespace(cases, |(kind, far)| {
            let Some(wire) = Wire::open("mtu::packets_beyond_the_mtu_are_fragmented") else { return };
            // Older kernels segment only for devices with checksum offload.
            device::leave_checksums(NEAR, true).unwrap();
            reach(&wire.far_away(|| socket(&SocketAddr::new(far, 0).to_string())));
            let what = format!("{kind} to {far}");
            let target = wire.far_away(|| gathering_socket(SocketAddr::new(far, 0)));
            let sender = socket("127.0.0.1:0");
            let link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
            let running = start(link, kind);
            let mut bursts = 0;
            let mut pass = || {
                bursts += PACKETS as u64;
                burst(&sender, running.address(0).unwrap(), PACKETS, BYTES);
                take(&target, PACKETS, BYTES)
            };
            // How a plane batches a burst depends on its kind. The plane must batch again once the MTU allows it.
            let is_cut_there = pass();
            assert!(is_cut_there || kind != PlaneKind::Offload, "{what}");
            assert_eq!(running.counts(0)[0].unsegmented, 0, "{what}");
            device::set_mtu(NEAR, 1280).unwrap();
            for _ in 0..3 {
                assert!(!pass(), "no fragment is of many packets: {what}");
            }
            let refused = running.counts(0)[0].unsegmented;
            assert_eq!(refused > 0, is_cut_there, "{what}");
            device::set_mtu(NEAR, 1500).unwrap();
            let end = Instant::now() + LONG;
            while pass() != is_cut_there {
                assert!(Instant::now() < end, "the kernel is not asked again: {what}");
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            let counts = drain(running);
            require_balance(&counts, &what);
            assert_eq!((counts.received, counts.dropped_in_all()), (bursts, 0), "{what}: {counts:?}");
            assert_eq!(counts.sent_bytes, bursts * BYTES as u64, "{what}");
        });
    });
}

/// A packet that exceeds the maximum length of IPv4 is not sent at all.
#[test]
fn oversized_datagrams_count_as_too_long() {
    in_namespace(|| {
        for kind in kinds() {
            let target = socket("127.0.0.1:0");
            let running = start(Link::new("[::1]:0".parse().unwrap(), target.local_addr().unwrap()), kind);
            let sender = socket("[::1]:0");
            // The length field of IPv6 does not include the header, so that 20 more bytes fit.
            sender.send_to(&vec![1; 65_527], running.address(0).unwrap()).unwrap();
            sender.send_to(b"short", running.address(0).unwrap()).unwrap();
            let mut room = [0; 100];
            assert_eq!(target.recv(&mut room).unwrap(), 5, "{kind}");
            let counts = drain(running);
            require_balance(&counts, kind.name());
            assert_eq!((counts.received, counts.sent), (2, 1), "{kind} {counts:?}");
            // Some planes have too small a buffer for such a packet.
            let reasons: Vec<Drop> = counts.dropped.iter().map(|(reason, _)| *reason).collect();
            assert!(
                reasons == [Drop::TooLong]
                    || reasons == [Drop::Truncated]
                        && ![PlaneKind::OneByOne, PlaneKind::Offload].contains(&kind),
                "{kind} {counts:?}"
            );
        }
    });
}
