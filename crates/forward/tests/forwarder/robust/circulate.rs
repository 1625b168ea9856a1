//! Packets whose source is an address of the forwarder: replies to them would loop back to it without end.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use fourtuple_forward::{Forward, Link, PlaneKind, Routes};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{device, option};
use fourtuple_testing::in_namespace;

use super::{drain, kinds, reach, require_balance, socket, start, until};

/// Opens a socket at an address that a link also listens at.
fn beside(address: SocketAddr) -> UdpSocket {
    let socket = socket::open(Transport::Udp, address, false).unwrap();
    let _ = option::set_reuse_port(socket.as_fd()).unwrap();
    socket::bind(socket.as_fd(), address).unwrap();
    socket.into()
}

fn link(listen: &str, to: SocketAddr) -> Link {
    Link { replies: true, ..Link::new(listen.parse().unwrap(), to) }
}

#[test]
fn a_next_hop_is_no_client() {
    in_namespace(|| {
        let mut room = [0; 10];
        // With a wildcard listener of IPv6, an IPv4 hop has an IPv4-mapped source address.
        for (listen, own) in
            [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "[::1]"), ("[::]:0", "[::1]"), ("[::]:0", "127.0.0.1")]
        {
            let bind = format!("{own}:0");
            let (client, hop) = (socket(&bind), socket(&bind));
            let to = hop.local_addr().unwrap();
            for kind in kinds() {
                let what = format!("{kind} at {listen}, hop {to}");
                let running = start(link(listen, to), kind);
                let entry = SocketAddr::new(to.ip(), running.address(0).unwrap().port());
                hop.send_to(b"x", entry).unwrap();
                client.send_to(b"yy", entry).unwrap();
                assert_eq!(hop.recv(&mut room).unwrap(), 2, "{what}: the client's is the first to arrive");
                let counts = drain(running);
                require_balance(&counts, &what);
                let dropped: Vec<_> =
                    counts.dropped.iter().map(|(why, packets)| (why.name(), *packets)).collect();
                assert_eq!((dropped, counts.clients), (vec![("circulating", 1)], 1), "{what}");
            }
        }
    });
}

/// If a link listens at the wildcard address, every address of the host with the link's port belongs to the forwarder.
#[test]
fn an_address_that_a_link_listens_at_is_no_client() {
    in_namespace(|| {
        device::add_address("lo", "192.0.2.7".parse().unwrap(), 32).unwrap();
        device::add_address("lo", "2001:db8::7".parse().unwrap(), 128).unwrap();
        reach(&socket("[2001:db8::7]:0"));
        let target = socket("127.0.0.1:0");
        let to = target.local_addr().unwrap();
        let mut room = [0; 10];
        for (listen, source, entry, honest) in [
            ("0.0.0.0:4000", "127.9.9.9:4000", "127.0.0.1:4000", "127.0.0.1:0"),
            ("0.0.0.0:4000", "192.0.2.7:4000", "127.0.0.1:4000", "127.0.0.1:0"),
            ("[::]:4000", "[::1]:4000", "[2001:db8::7]:4000", "[::1]:0"),
            ("[::]:4000", "127.9.9.9:4000", "127.0.0.1:4000", "127.0.0.1:0"),
            // The source is the address of the second link.
            ("127.0.0.1:4000", "127.0.0.1:4001", "127.0.0.1:4000", "127.0.0.1:0"),
        ] {
            let links = vec![link(listen, to), link("127.0.0.1:4001", to)];
            let forward = Forward { kind: PlaneKind::Batched, links, ..Forward::new(link(listen, to), 1) };
            let running = forward.start().unwrap();
            let (entry, source): (SocketAddr, SocketAddr) = (entry.parse().unwrap(), source.parse().unwrap());
            let impostor = beside(source);
            impostor.send_to(b"x", entry).unwrap();
            socket(honest).send_to(b"yy", entry).unwrap();
            assert_eq!(target.recv(&mut room).unwrap(), 2, "{source} at {listen}");
            let counts = running.drain().unwrap().remove(0).remove(0);
            let dropped: Vec<_> =
                counts.dropped.iter().map(|(why, packets)| (why.name(), *packets)).collect();
            assert_eq!(dropped, [("circulating", 1)], "{source} at {listen}");
        }
    });
}

/// A client whose address becomes a next hop stops being a client.
#[test]
fn new_routes_end_clients_that_are_next_hops_now() {
    in_namespace(|| {
        let (client, hop) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let running = start(link("127.0.0.1:0", hop.local_addr().unwrap()), PlaneKind::Batched);
        client.send_to(b"x", running.address(0).unwrap()).unwrap();
        assert_eq!(hop.recv(&mut [0; 10]).unwrap(), 1);
        running.set_routes(0, Routes::to(client.local_addr().unwrap())).unwrap();
        until(|| running.counts(0)[0].clients == 0);
    });
}
