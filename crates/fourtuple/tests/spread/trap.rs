//! The effect of a connected member, which the kernel permits.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use fourtuple_syscalls::socket;
use fourtuple_testing::in_namespace;

use crate::group::{lengths, open, sender, shares};

#[test]
fn a_connected_member_gets_all_packets_of_its_peer() {
    in_namespace(|| {
        let test = "a_connected_member_gets_all_packets_of_its_peer";
        let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
        for spread in ["random", "flow:0:4", "map:random"] {
            let Some(group) = open(test, address, 4, spread) else { return };
            let sender = sender(&group);
            assert!(lengths(&shares(&group, &sender, 400)).iter().all(|got| *got > 50));
            assert_eq!(group.connected().unwrap(), None);
            let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket::connect(group.member(2).unwrap().as_fd(), peer.local_addr().unwrap()).unwrap();
            assert_eq!(group.connected().unwrap(), Some(2));
            // No packet is lost; the shares depend on the kernel: see docs/spread.md.
            shares(&group, &sender, 400);
            // The connected member gets all packets of its peer.
            assert_eq!(lengths(&shares(&group, &peer, 400)), [0, 0, 400, 0], "{spread}");
        }
    });
}
