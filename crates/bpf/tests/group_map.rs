//! The table of a group of UDP sockets when sockets are closed without a call to the table.
#![forbid(unsafe_code)]

mod group;

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};

use fourtuple_bpf::{BpfError, Chooser, GroupMap};
use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::option;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::in_namespace;
use fourtuple_testing::stream::Loopback;

use self::group::loaded;

fn open(address: SocketAddr) -> OwnedFd {
    let socket = socket::open(Transport::Udp, address, true).unwrap();
    assert_eq!(option::set_reuse_port(socket.as_fd()).unwrap(), option::Answer::Done);
    socket
}

/// Returns a group with a socket at each seat, or skips the test.
fn open_group(
    test: &str,
    seats: usize,
    chooser: Chooser,
) -> Option<(GroupMap, Vec<Option<OwnedFd>>, SocketAddr)> {
    let map = loaded(test, GroupMap::load(chooser, None))?;
    let mut address: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let mut sockets = Vec::new();
    for seat in 0..seats {
        let socket = open(address);
        if seat == 0 {
            map.attach(socket.as_fd()).unwrap();
        }
        socket::bind(socket.as_fd(), address).unwrap();
        address = socket::local_address(socket.as_fd()).unwrap();
        map.seat(seat, socket.as_fd()).unwrap();
        sockets.push(Some(socket));
    }
    for slot in 0..GroupMap::SLOTS {
        map.give(slot, slot % seats).unwrap();
    }
    Some((map, sockets, address))
}

fn received(socket: &OwnedFd) -> usize {
    let mut batch = Batch::new(64, 64);
    let mut received = 0;
    while let Ok(more) = batch.receive(socket.as_fd()) {
        received += more;
    }
    received
}

#[test]
fn the_next_seat_inherits_the_packets_of_a_closed_socket() {
    in_namespace(|| {
        let test = "the_next_seat_inherits_the_packets_of_a_closed_socket";
        let key = Chooser::Key { offset: 0, width: 4, mask: u32::MAX };
        let Some((map, mut sockets, address)) = open_group(test, 4, key) else { return };
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        let loopback = Loopback::open();
        let send = || {
            (0..100_u32).for_each(|packet| drop(sender.send_to(&packet.to_be_bytes(), address)));
            loopback.flush();
        };
        sockets[1] = None;
        send();
        let got: Vec<_> = sockets.iter().map(|socket| socket.as_ref().map_or(0, received)).collect();
        assert_eq!((got, map.strays()), (vec![25, 0, 50, 25], 0));
        // All slots point to a seat without a socket: the kernel's hash chooses.
        for slot in 0..GroupMap::SLOTS {
            map.give(slot, 1000).unwrap();
        }
        send();
        let got: usize = sockets.iter().flatten().map(received).sum();
        assert_eq!((got, map.strays()), (100, 100));
    });
}

#[test]
fn invalid_seats_are_refused() {
    in_namespace(|| {
        let Some((map, sockets, address)) = open_group("invalid_seats_are_refused", 1, Chooser::Random)
        else {
            return;
        };
        let first = sockets[0].as_ref().unwrap();
        assert!(matches!(map.seat(GroupMap::SEATS, first.as_fd()), Err(BpfError::NoSuchSeat { .. })));
        assert!(map.seat(1, first.as_fd()).is_err(), "two seats for one socket");
        let unbound = open(address);
        assert!(map.seat(1, unbound.as_fd()).unwrap_err().to_string().contains("EINVAL"));
        map.leave(5).unwrap();
        map.give(GroupMap::SLOTS, 0).unwrap();
        // The seat after the last is for control packets; the low half of the longer number would be a valid seat.
        for seat in [GroupMap::SEATS, 1 << 32] {
            assert!(matches!(map.leave(seat), Err(BpfError::NoSuchSeat { .. })), "{seat}");
            assert!(matches!(map.give(0, seat), Err(BpfError::NoSuchSeat { .. })), "{seat}");
        }
    });
}
