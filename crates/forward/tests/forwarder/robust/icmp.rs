//! ICMP errors (RFC 792) from routers and next hops for packets that the forwarder sent.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_forward::{Drop, Link, PlaneKind};
use fourtuple_syscalls::device;
use fourtuple_syscalls::socket::{bind, connect, open_raw_icmp, send};
use fourtuple_testing::in_namespace;
use fourtuple_testing::wire::{FAR, FAR_V4, NEAR, NEAR_V4, Wire};

use super::{burst, drain, gathering_socket, kinds, reach, require_balance, socket, start, take, until};

/// ICMP type "destination unreachable", followed by some of its codes.
const UNREACHABLE: u8 = 3;
const PROTOCOL: u8 = 2;
const PORT: u8 = 3;
const TOO_LONG: u8 = 4;
const FILTERED: u8 = 13;
const UDP: u8 = 17;

/// Opens a raw socket that sends ICMP messages from `here` to `sender`. Needs CAP_NET_RAW, which the test's namespace grants.
fn router(here: IpAddr, sender: IpAddr) -> OwnedFd {
    let router = open_raw_icmp().unwrap();
    bind(router.as_fd(), SocketAddr::new(here, 0)).unwrap();
    connect(router.as_fd(), SocketAddr::new(sender, 0)).unwrap();
    router
}

fn octets(address: SocketAddr) -> [u8; 4] {
    let SocketAddr::V4(address) = address else { panic!("{address} is not of IPv4") };
    address.ip().octets()
}

/// Sends an ICMP error `code` for a packet from `from` to `to`, with the next hop's MTU.
fn send_icmp_error(router: &OwnedFd, code: u8, mtu: u16, from: SocketAddr, to: SocketAddr) {
    let mut message = vec![UNREACHABLE, code, 0, 0, 0, 0];
    message.extend(mtu.to_be_bytes());
    // The ICMP message quotes the packet: the IPv4 header (20 bytes) with a total length of 28, and the UDP header (8 bytes).
    message.extend([0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, UDP, 0, 0]);
    message.extend([octets(from), octets(to)].concat());
    message.extend([from.port(), to.port(), 8, 0].iter().flat_map(|word| word.to_be_bytes()));
    let sum: u32 = message.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let checksum = !((folded & 0xffff) + (folded >> 16)) as u16;
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    assert_eq!(send(router.as_fd(), &message).unwrap(), message.len());
}

/// The kernel reports the ICMP error at the next send. The plane counts the error and still forwards that packet.
#[test]
fn an_icmp_error_drops_no_later_packet() {
    in_namespace(|| {
        let router = router(Ipv4Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into());
        for kind in kinds() {
            for replies in [false, true] {
                for (code, reason) in [
                    (PORT, Drop::Refused),
                    (FILTERED, Drop::Unreachable),
                    (TOO_LONG, Drop::TooLong),
                    (PROTOCOL, Drop::Other),
                ] {
                    let what = format!("{kind}, code {code}, with replies: {replies}");
                    let (sender, target) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
                    let mut link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
                    link.replies = replies;
                    let running = start(link, kind);
                    let mut packets = 0;
                    let mut pass = || {
                        sender.send_to(b"x", running.address(0).unwrap()).unwrap();
                        packets += 1;
                        let (length, from) = target.recv_from(&mut [0; 10]).expect(&what);
                        assert_eq!(length, 1, "{what}");
                        from
                    };
                    for complaints in 1..=3 {
                        send_icmp_error(&router, code, 1500, pass(), target.local_addr().unwrap());
                        // With replies the plane polls the socket for the error. Without replies it sees the error at the next
                        // send.
                        until(|| {
                            if !replies {
                                pass();
                            }
                            running.counts(0)[0].dropped == [(reason, complaints)]
                        });
                    }
                    let counts = drain(running);
                    require_balance(&counts, &what);
                    assert_eq!((counts.received, counts.sent), (packets, packets - 3), "{what}");
                    assert_eq!((counts.failed_later, counts.sent_bytes), (3, packets), "{what}");
                }
            }
        }
    });
}

/// A link on the path has a smaller MTU than the link to the next router.
#[test]
fn a_smaller_path_mtu_is_learnt() {
    const BYTES: usize = 1400;
    in_namespace(|| {
        let Some(wire) = Wire::open("icmp::a_smaller_path_mtu_is_learnt") else { return };
        device::leave_checksums(NEAR, true).unwrap();
        let router = wire.far_away(|| router(FAR_V4, NEAR_V4));
        for (kind, last) in kinds().zip(100..) {
            let sender = socket("127.0.0.1:0");
            // The kernel caches the path MTU per destination; it has no entry for the next address yet.
            let address = IpAddr::from([10, 9, 0, last]);
            wire.far_away(|| device::add_address(FAR, address, 24)).unwrap();
            reach(&wire.far_away(|| socket(&SocketAddr::new(address, 0).to_string())));
            let target = wire.far_away(|| gathering_socket(SocketAddr::new(address, 0)));
            let there = target.local_addr().unwrap();
            let running = start(Link::new("127.0.0.1:0".parse().unwrap(), there), kind);
            burst(&sender, running.address(0).unwrap(), 10, BYTES);
            take(&target, 10, BYTES);
            let from = source(&running, &sender, &target);
            send_icmp_error(&router, TOO_LONG, 1280, from, there);
            let mut packets = 11;
            until(|| {
                burst(&sender, running.address(0).unwrap(), 10, BYTES);
                take(&target, 10, BYTES);
                packets += 10;
                let counts = &running.counts(0)[0];
                counts.unsegmented > 0 || !counts.dropped.is_empty()
            });
            let counts = drain(running);
            require_balance(&counts, kind.name());
            assert_eq!(counts.received, packets, "{kind}");
            // If the kernel also returns the error for a packet that it would segment, the plane does not learn that there were
            // two packets.
            let is_known = counts.dropped == [(Drop::TooLong, 1)];
            assert!(is_known || counts.unsegmented > 0 && counts.dropped.is_empty(), "{kind} {counts:?}");
            assert!(counts.unsegmented > 0 || kind != PlaneKind::Offload, "{kind} {counts:?}");
        }
    });
}

/// Returns the address from which a plane sends to the target.
fn source(running: &fourtuple_forward::Running, sender: &UdpSocket, target: &UdpSocket) -> SocketAddr {
    sender.send_to(b"?", running.address(0).unwrap()).unwrap();
    target.recv_from(&mut [0; 10]).unwrap().1
}
