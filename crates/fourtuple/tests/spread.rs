//! Which socket of a group gets a packet, asked of the kernel.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use fourtuple::spread::{Group, Spread};
use fourtuple_syscalls::datagram::Batch;
use fourtuple_testing::in_namespace;

/// What `members` sockets get of `packets` from one sender, whose payload is the packet's number.
fn shares(spread: &str, members: usize, packets: u32, to: &str) -> Vec<Vec<u32>> {
    let spread: Spread = spread.parse().unwrap();
    let group = Group::open(to.parse::<SocketAddr>().unwrap(), members, &spread).unwrap();
    let sender = UdpSocket::bind((group.address().ip(), 0)).unwrap();
    let mut got = vec![Vec::new(); members];
    let mut batch = Batch::new(64, 64);
    for packet in 0..packets {
        sender.send_to(&packet.to_be_bytes(), group.address()).unwrap();
        // A queue holds some hundred; over loopback they are there when send() returns.
        if packet % 64 == 63 || packet + 1 == packets {
            for (index, got) in got.iter_mut().enumerate() {
                while batch.receive(group.member(index).unwrap().as_fd()).is_ok() {
                    got.extend(
                        batch.iter().map(|datagram| u32::from_be_bytes(datagram.bytes.try_into().unwrap())),
                    );
                }
            }
        }
    }
    got
}

#[test]
fn one_tuple_meets_one_socket_by_hash() {
    in_namespace(|| {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let got = shares("hash", 4, 2_000, address);
            assert_eq!(got.iter().filter(|got| !got.is_empty()).count(), 1, "{address}");
            assert_eq!(got.iter().map(Vec::len).sum::<usize>(), 2_000);
        }
    });
}

#[test]
fn one_tuple_meets_all_at_random() {
    in_namespace(|| {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let got = shares("random", 4, 20_000, address);
            assert_eq!(got.iter().map(Vec::len).sum::<usize>(), 20_000);
            // 5,000 each; 200 are more than three times the standard deviation.
            assert!(got.iter().all(|got| got.len().abs_diff(5_000) < 300), "{:?}", lengths(&got));
        }
    });
}

#[test]
fn a_flow_within_the_tuple_stays_with_one_socket() {
    in_namespace(|| {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let got = shares("flow:0:4:0xf", 4, 4_000, address);
            for (index, got) in got.iter().enumerate() {
                assert_eq!(got.len(), 1_000);
                assert!(got.iter().all(|packet| packet & 0xf & 3 == index as u32));
                assert!(got.is_sorted(), "packets overtook each other");
            }
        }
    });
}

#[test]
fn what_is_too_short_for_its_key_goes_to_the_first() {
    in_namespace(|| {
        let got = shares("flow:8:4", 3, 30, "127.0.0.1:0");
        assert_eq!(lengths(&got), [30, 0, 0]);
    });
}

fn lengths(got: &[Vec<u32>]) -> Vec<usize> {
    got.iter().map(Vec::len).collect()
}
