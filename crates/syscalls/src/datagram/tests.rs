use std::net::UdpSocket;
use std::os::fd::AsFd;

use super::*;
use crate::option;

fn pair() -> (UdpSocket, UdpSocket) {
    let one = UdpSocket::bind("127.0.0.1:0").expect("bind");
    let other = UdpSocket::bind("127.0.0.1:0").expect("bind");
    (one, other)
}

fn receive(batch: &mut Batch, socket: &UdpSocket) -> usize {
    assert!(crate::socket::wait_readable(socket.as_fd(), None).expect("poll"));
    batch.receive(socket.as_fd()).expect("recvmmsg")
}

#[test]
fn received_data_is_forwarded_without_a_copy() {
    let (sender, router) = pair();
    let target = UdpSocket::bind("127.0.0.1:0").expect("bind");
    for text in ["one", "", "three"] {
        sender.send_to(text.as_bytes(), router.local_addr().unwrap()).expect("send");
    }
    let mut batch = Batch::new(8, 2048);
    assert_eq!(receive(&mut batch, &router), 3);
    assert_eq!(batch.get(0).unwrap().from(), Some(sender.local_addr().unwrap()));
    let mut outgoing = Outgoing::new();
    for (index, datagram) in batch.iter().enumerate() {
        outgoing.message(Some(target.local_addr().unwrap()), None);
        outgoing.part(index, 0..datagram.bytes.len());
    }
    assert_eq!(outgoing.send(router.as_fd(), &batch, 0).expect("sendmmsg"), 3);
    let mut there = Batch::new(8, 2048);
    assert_eq!(receive(&mut there, &target), 3);
    let texts: Vec<_> = there.iter().map(|datagram| datagram.bytes.to_vec()).collect();
    assert_eq!(texts, [&b"one"[..], b"", b"three"]);
    assert!(there.get(3).is_none());
}

#[test]
fn one_message_is_split_and_coalesced() {
    let (sender, receiver) = pair();
    let (source, _) = pair();
    let answer = option::set_udp_gro(receiver.as_fd(), true).expect("UDP_GRO");
    assert_eq!(answer, option::Answer::Done);
    source.send_to(&[7; 250], sender.local_addr().unwrap()).expect("send");
    let mut batch = Batch::new(1, 2048);
    assert_eq!(receive(&mut batch, &sender), 1);
    let mut outgoing = Outgoing::new();
    outgoing.message(Some(receiver.local_addr().unwrap()), Some(100));
    outgoing.part(0, 0..250);
    assert_eq!(outgoing.size(0), (3, 250));
    assert_eq!(outgoing.send(sender.as_fd(), &batch, 0).expect("sendmmsg"), 1);
    let mut there = Batch::new(4, 65_536);
    let mut bytes = 0;
    while bytes < 250 {
        receive(&mut there, &receiver);
        for datagram in there.iter() {
            assert!(datagram.segment.is_none_or(|segment| segment == 100), "{datagram:?}");
            bytes += datagram.bytes.len();
        }
    }
    assert_eq!(bytes, 250);
}

#[test]
fn truncated_datagrams_are_marked() {
    let (sender, receiver) = pair();
    sender.send_to(&[1; 100], receiver.local_addr().unwrap()).expect("send");
    let mut batch = Batch::new(1, 60);
    receive(&mut batch, &receiver);
    let datagram = batch.get(0).unwrap();
    assert!(datagram.truncated);
    assert_eq!(datagram.bytes.len(), 60);
}

#[test]
fn the_destination_address_is_reported() {
    let (sender, _) = pair();
    let receiver = UdpSocket::bind("0.0.0.0:0").expect("bind");
    option::set_packet_info(receiver.as_fd(), true).expect("IP_PKTINFO");
    let port = receiver.local_addr().unwrap().port();
    sender.send_to(b"x", ("127.0.0.7", port)).expect("send");
    let mut batch = Batch::new(1, 60);
    receive(&mut batch, &receiver);
    assert_eq!(batch.get(0).unwrap().arrived_at, Some(Ipv4Addr::new(127, 0, 0, 7).into()));
}

#[test]
fn a_reply_leaves_from_the_requested_address() {
    for (bind, to) in [("0.0.0.0:0", "127.0.0.7"), ("[::]:0", "127.0.0.8"), ("[::]:0", "::1")] {
        // The host has no IPv6.
        let Ok(receiver) = UdpSocket::bind(bind) else { continue };
        option::set_packet_info(receiver.as_fd(), true).expect("IP_PKTINFO");
        let there = SocketAddr::new(to.parse().unwrap(), receiver.local_addr().unwrap().port());
        let asks = if there.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" };
        let sender = UdpSocket::bind(asks).expect("bind");
        sender.send_to(b"question", there).expect("send");
        let mut batch = Batch::new(1, 60);
        receive(&mut batch, &receiver);
        let datagram = batch.get(0).unwrap();
        let (client, from) = (datagram.from().unwrap(), datagram.answer_from.unwrap());
        assert_eq!(from, there.ip(), "{bind}");
        let mut outgoing = Outgoing::new();
        // With a segment size the message needs a second control message, which must fit too.
        outgoing.message(Some(client), Some(4));
        outgoing.from_last(from, client);
        outgoing.part(0, 0..8);
        assert_eq!(outgoing.send(receiver.as_fd(), &batch, 0).expect("sendmmsg"), 1);
        let mut room = [0; 60];
        for part in ["ques", "tion"] {
            let (length, from) = sender.recv_from(&mut room).expect("recv");
            assert_eq!((&room[..length], from), (part.as_bytes(), there), "{bind}");
        }
    }
}

#[test]
fn the_ttl_of_a_datagram_is_reported() {
    for (to, bind) in [("127.0.0.1", "127.0.0.1:0"), ("::1", "[::1]:0"), ("127.0.0.1", "[::]:0")] {
        // The host has no IPv6.
        let Ok(receiver) = UdpSocket::bind(bind) else { continue };
        option::set_receive_hops(receiver.as_fd(), true).expect("IP_RECVTTL");
        let target = (to.parse::<IpAddr>().unwrap(), receiver.local_addr().unwrap().port());
        let mut batch = Batch::new(1, 60);
        for hops in [255, 64, 1] {
            let sender = UdpSocket::bind((if to == "::1" { "::1" } else { "127.0.0.1" }, 0)).expect("bind");
            option::set_hops(sender.as_fd(), hops).expect("IP_TTL");
            sender.send_to(b"x", target).expect("send");
            receive(&mut batch, &receiver);
            assert_eq!(batch.get(0).unwrap().hops, Some(hops), "{bind}");
        }
    }
}
