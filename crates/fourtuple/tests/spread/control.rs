//! Control packets among more data than anybody reads.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use fourtuple::spread::{ControlFilter, Group, Spread, SpreadError};
use fourtuple_syscalls::datagram::Batch;
use fourtuple_syscalls::option;
use fourtuple_testing::in_namespace;

use crate::group::{members, open, open_with_control, take};

const DATA: u32 = 6_000;
/// So many data packets come between two of control.
const BETWEEN: u32 = 60;
const CONTROL: usize = (DATA / BETWEEN) as usize;
/// In the first byte of what is control.
const MARK: u32 = 0xff00_0000;
const ALL: [&str; 2] = ["127.0.0.1", "::1"];

/// Sends both kinds while nobody reads, the one kind from `control`.
fn overload(group: &Group, data: &UdpSocket, control: &UdpSocket) {
    let to_itself = at("127.0.0.1");
    to_itself.connect(to_itself.local_addr().unwrap()).unwrap();
    to_itself.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    for packet in 0..DATA {
        data.send_to(&packet.to_be_bytes(), group.address()).unwrap();
        if packet % BETWEEN == 0 {
            control.send_to(&(MARK | packet).to_be_bytes(), group.address()).unwrap();
            wait_for_loopback(&to_itself);
        }
    }
}

/// Until what was sent before is where it goes: on a slow machine the queue of the loopback device, of 1,000 packets
/// (netdev_max_backlog), would be full before those of the sockets, and lose both kinds alike.
fn wait_for_loopback(to_itself: &UdpSocket) {
    let arrives = || to_itself.send(&[0]).and_then(|_| to_itself.recv(&mut [0])).is_ok();
    assert!((0..100).any(|_| arrives()), "nothing passes the loopback device");
}

/// Of control and of data, what is in the queues of these sockets.
fn waiting(sockets: &[std::os::fd::OwnedFd]) -> (usize, usize) {
    let mut batch = Batch::new(64, 64);
    let mut got = Vec::new();
    for socket in sockets {
        take(socket, &mut batch, &mut got);
    }
    let control = got.iter().filter(|packet| **packet & MARK != 0).count();
    (control, got.len() - control)
}

fn at(address: &str) -> UdpSocket {
    UdpSocket::bind((address, 0)).unwrap()
}

#[test]
fn without_a_socket_of_its_own_control_drowns_in_data() {
    in_namespace(|| {
        let test = "without_a_socket_of_its_own_control_drowns_in_data";
        for address in ALL {
            let group =
                open(test, (address.parse::<std::net::IpAddr>().unwrap(), 0).into(), 2, "random").unwrap();
            let sender = at(address);
            overload(&group, &sender, &sender);
            let (control, data) = waiting(&members(&group));
            assert!(data > 0 && control < CONTROL / 4, "{control} of {CONTROL} and {data} of {DATA} came");
        }
    });
}

fn none_is_lost(test: &str, spreads: &[&str]) {
    for address in ALL {
        for spread in spreads {
            for filter in
                ["bytes:0:1=0xff", "bytes:0:4:0xff000000=0xff000000", "neighbour:0:1=0xff", "ttl=255", "port"]
            {
                if spread.starts_with("xdp") && filter == "port" {
                    continue;
                }
                let (data, control) = (at(address), at(address));
                option::set_hops(control.as_fd(), 255).unwrap();
                let filter = match filter {
                    "port" => format!("port={}", control.local_addr().unwrap().port()),
                    other => other.to_owned(),
                };
                let to = SocketAddr::new(address.parse().unwrap(), 0);
                let Some(group) = open_with_control(test, to, 2, spread, &filter) else { return };
                overload(&group, &data, &control);
                let what = format!("{spread} {filter} {address}");
                assert_eq!(waiting(&[group.control().unwrap()]), (CONTROL, 0), "{what}");
                let (control, data) = waiting(&members(&group));
                assert!(control == 0 && data > 0 && data < DATA as usize, "{what}: {control}, {data}");
            }
        }
    }
}

#[test]
fn with_one_it_does_not() {
    in_namespace(|| none_is_lost("with_one_it_does_not", &["random", "flow:0:4", "cpu"]));
}

#[cfg(feature = "bpf")]
#[test]
fn nor_where_a_table_chooses() {
    in_namespace(|| {
        none_is_lost("nor_where_a_table_chooses", &["map:random", "map:flow:0:4", "map:hash", "xdp:64"]);
    });
}

/// A header that is longer, and packets that are shorter than what is looked for.
#[test]
fn odd_packets_are_not_mistaken() {
    in_namespace(|| {
        let mut spreads = vec!["random"];
        if cfg!(feature = "bpf") {
            spreads.push("map");
        }
        for spread in spreads {
            let to = "127.0.0.1:0".parse().unwrap();
            let sender = at("127.0.0.1");
            // IP_OPTIONS: 4 times "no operation".
            option::set_int(sender.as_fd(), 0, 4, 0x0101_0101).unwrap();
            let filter = format!("port={}", sender.local_addr().unwrap().port());
            let test = "odd_packets_are_not_mistaken";
            let Some(group) = open_with_control(test, to, 2, spread, &filter) else { return };
            for _ in 0..10 {
                sender.send_to(&[0; 4], group.address()).unwrap();
                at("127.0.0.1").send_to(&[0; 4], group.address()).unwrap();
            }
            assert_eq!(waiting(&[group.control().unwrap()]).1, 10, "{spread}");
            assert_eq!(waiting(&members(&group)).1, 10, "{spread}");

            let group = open_with_control(test, to, 2, spread, "bytes:4:4=0").unwrap();
            for length in [4, 5, 7] {
                sender.send_to(&[0; 8][..length], group.address()).unwrap();
            }
            assert_eq!(waiting(&[group.control().unwrap()]), (0, 0), "{spread}");
            sender.send_to(&[0; 8], group.address()).unwrap();
            assert_eq!(waiting(&[group.control().unwrap()]), (0, 1), "{spread}");
            assert_eq!(waiting(&members(&group)), (0, 3), "{spread}");
        }
    });
}

/// Either of what makes a neighbour's packet is too little.
#[test]
fn data_that_begin_like_control_are_data_unless_a_neighbour_sends_them() {
    in_namespace(|| {
        let test = "data_that_begin_like_control_are_data_unless_a_neighbour_sends_them";
        let mut spreads = vec!["random"];
        if cfg!(feature = "bpf") {
            spreads.push("map");
        }
        for spread in spreads {
            for address in ALL {
                let to = SocketAddr::new(address.parse().unwrap(), 0);
                let Some(group) = open_with_control(test, to, 2, spread, "neighbour:0:1:0xe0=0x20") else {
                    return;
                };
                let sender = at(address);
                for (hops, first) in [(64, 0x3f), (254, 0x3f), (255, 0x40), (255, 0x3f)] {
                    option::set_hops(sender.as_fd(), hops).unwrap();
                    sender.send_to(&[first, 0, 0, 0], group.address()).unwrap();
                }
                sender.send_to(&[], group.address()).unwrap();
                let mut got = Batch::new(8, 64);
                let control = group.control().unwrap();
                assert_eq!(got.receive(control.as_fd()).unwrap(), 1, "{spread} {address}");
                let data = members(&group);
                let received = data.iter().map(|data| got.receive(data.as_fd()).unwrap_or(0));
                assert_eq!(received.sum::<usize>(), 4, "{spread} {address}");
            }
        }
    });
}

#[test]
fn filters_that_cannot_be_are_refused() {
    in_namespace(|| {
        for (spread, filter) in [("hash", "ttl=255"), ("xdp:8", "port=3784")] {
            let (spread, filter) =
                (spread.parse::<Spread>().unwrap(), filter.parse::<ControlFilter>().unwrap());
            let result = Group::open_with_control("127.0.0.1:0".parse().unwrap(), 2, &spread, &filter);
            let error = result.unwrap_err();
            assert!(matches!(error, SpreadError::NoControl { .. }) && error.is_usage(), "{error}");
        }
    });
}
