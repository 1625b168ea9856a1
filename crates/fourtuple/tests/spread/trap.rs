//! What happens when somebody connects a member: nothing in the kernel forbids it.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use fourtuple_syscalls::socket;
use fourtuple_testing::in_namespace;

use crate::group::{lengths, open, sender, shares};

#[test]
fn a_connected_member_is_told_and_gets_all_of_its_peer() {
    in_namespace(|| {
        let test = "a_connected_member_is_told_and_gets_all_of_its_peer";
        let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
        for spread in ["random", "flow:0:4", "map:random"] {
            let Some(group) = open(test, address, 4, spread) else { return };
            let sender = sender(&group);
            assert!(lengths(&shares(&group, &sender, 400)).iter().all(|got| *got > 50));
            assert_eq!(group.connected().unwrap(), None);
            let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket::connect(group.member(2).unwrap().as_fd(), peer.local_addr().unwrap()).unwrap();
            assert_eq!(group.connected().unwrap(), Some(2));
            // Nothing is lost; how it is shared depends on the kernel: docs/spread.md.
            shares(&group, &sender, 400);
            // What the peer sends is never spread.
            assert_eq!(lengths(&shares(&group, &peer, 400)), [0, 0, 400, 0], "{spread}");
        }
    });
}
