//! Source addresses of replies from a forwarder with several addresses.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use fourtuple_forward::{Drop, Link, PlaneKind};
use fourtuple_syscalls::device;
use fourtuple_testing::in_namespace;

use super::{burst, drain, kinds, reach, require_balance, socket, start, until};

/// Returns each packet to its sender.
fn echo(target: &UdpSocket) {
    let mut room = [0; 2000];
    let (length, from) = target.recv_from(&mut room).unwrap();
    target.send_to(&room[..length], from).unwrap();
}

fn addresses(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// A client that sends to several addresses of a forwarder gets each reply from the address that it sent to.
#[test]
fn replies_come_from_the_requested_address() {
    in_namespace(|| {
        let v4 = addresses(&["127.0.0.1", "127.0.0.9", "192.0.2.7"]);
        let v6 = addresses(&["::1", "2001:db8::7", "2001:db8::8"]);
        device::add_address("lo", v4[2], 32).unwrap();
        device::add_address("lo", v6[1], 128).unwrap();
        device::add_address("lo", v6[2], 128).unwrap();
        for ip in v4.iter().chain(&v6) {
            reach(&socket(&SocketAddr::new(*ip, 0).to_string()));
        }
        let target = socket("127.0.0.1:0");
        for kind in kinds() {
            for (listen, asked) in [("0.0.0.0:0", &v4), ("[::]:0", &v4), ("[::]:0", &v6)] {
                let mut link = Link::new(listen.parse().unwrap(), target.local_addr().unwrap());
                link.replies = true;
                let running = start(link, kind);
                let port = running.address(0).unwrap().port();
                let client = socket(if asked[0].is_ipv4() { "0.0.0.0:0" } else { "[::]:0" });
                let mut room = [0; 2000];
                for round in 0..3_u8 {
                    for (number, ip) in asked.iter().enumerate() {
                        let to = SocketAddr::new(*ip, port);
                        client.send_to(&[number as u8, round], to).unwrap();
                        echo(&target);
                        let (length, from) = client.recv_from(&mut room).unwrap();
                        assert_eq!(&room[..length], &[number as u8, round]);
                        assert_eq!(from, to, "{kind} at {listen}");
                    }
                }
                // The check also covers packets that came as one message.
                let to = SocketAddr::new(asked[1], port);
                burst(&client, to, 5, 100);
                for _ in 0..5 {
                    echo(&target);
                    assert_eq!(client.recv_from(&mut room).unwrap(), (100, to), "{kind} at {listen}");
                }
                let counts = drain(running);
                require_balance(&counts, kind.name());
                assert_eq!((counts.received, counts.returned), (14, 14), "{kind} at {listen}");
                assert_eq!(counts.clients, asked.len() as u64, "{kind} at {listen}: one for each address");
            }
        }
    });
}

/// A batched plane has room for jumbo frames only. A longer reply has a counter of its own, so that the balance of packets holds.
#[test]
fn a_dropped_reply_is_no_dropped_packet() {
    in_namespace(|| {
        let (client, target) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let mut link = Link::new("127.0.0.1:0".parse().unwrap(), target.local_addr().unwrap());
        link.replies = true;
        let running = start(link, PlaneKind::Batched);
        client.send_to(b"x", running.address(0).unwrap()).unwrap();
        let (_, from) = target.recv_from(&mut [0; 10]).unwrap();
        target.send_to(&[0; 20_000], from).unwrap();
        until(|| !running.counts(0)[0].dropped_replies.is_empty());
        let counts = drain(running);
        require_balance(&counts, "with a dropped reply");
        assert_eq!((&counts.dropped_replies, counts.returned), (&vec![(Drop::Truncated, 1)], 0));
    });
}

/// Without replies, the destination address of a packet does not create another target.
#[test]
fn one_way_there_is_one_socket_for_all_addresses() {
    in_namespace(|| {
        for kind in kinds() {
            let (client, target) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
            let running = start(Link::new("0.0.0.0:0".parse().unwrap(), target.local_addr().unwrap()), kind);
            let mut room = [0; 10];
            let mut sources = Vec::new();
            for to in ["127.0.0.1", "127.0.0.2"] {
                client.send_to(b"x", (to, running.address(0).unwrap().port())).unwrap();
                sources.push(target.recv_from(&mut room).unwrap().1);
            }
            assert_eq!(sources[0], sources[1], "{kind}");
        }
    });
}
