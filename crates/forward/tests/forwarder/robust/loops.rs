//! Links that would forward packets to themselves.

use std::net::SocketAddr;

use fourtuple_forward::{Forward, ForwardError, Link, Routes};
use fourtuple_syscalls::device;
use fourtuple_testing::in_namespace;

use super::{kinds, socket, start};

fn link(listen: &str, to: &str) -> Link {
    Link::new(listen.parse().unwrap(), to.parse().unwrap())
}

fn forward(links: Vec<Link>) -> Forward {
    Forward { links, ..Forward::new(link("127.0.0.1:1", "127.0.0.1:2"), 1) }
}

#[test]
fn a_local_listening_address_is_refused_as_next_hop() {
    in_namespace(|| {
        device::add_address("lo", "192.0.2.7".parse().unwrap(), 32).unwrap();
        device::add_address("lo", "2001:db8::7".parse().unwrap(), 128).unwrap();
        for (listen, to) in [
            ("0.0.0.0:4000", "192.0.2.7:4000"),
            ("0.0.0.0:4000", "127.1.2.3:4000"),
            ("[::]:4000", "192.0.2.7:4000"),
            ("[::]:4000", "[2001:db8::7]:4000"),
            ("[::]:4000", "[::ffff:127.0.0.1]:4000"),
            ("127.0.0.1:4000", "0.0.0.0:4000"),
        ] {
            let refused = forward(vec![link(listen, to)]).start();
            assert!(matches!(refused, Err(ForwardError::Loop { .. })), "{listen} > {to}");
        }
        // The next hop is on another host, or has the port of a link at another address.
        for (listen, to) in [("0.0.0.0:4000", "192.0.2.8:4000"), ("127.0.0.1:4000", "192.0.2.7:4000")] {
            drop(forward(vec![link(listen, to)]).start().unwrap());
        }
    });
}

#[test]
fn two_links_do_not_share_an_address() {
    in_namespace(|| {
        let listen = "127.0.0.1:4000";
        let twice = forward(vec![link(listen, "127.0.0.1:1"), link(listen, "127.0.0.1:2")]).start();
        assert!(matches!(twice, Err(ForwardError::Twice { .. })), "{twice:?}");
    });
}

#[test]
fn new_routes_cannot_form_a_loop() {
    in_namespace(|| {
        let (sender, target) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let there = target.local_addr().unwrap();
        let mut room = [0; 10];
        for kind in kinds() {
            let running = start(Link::new("0.0.0.0:0".parse().unwrap(), there), kind);
            let port = running.address(0).unwrap().port();
            let to_itself = SocketAddr::from(([127, 7, 7, 7], port));
            let refused = running.set_routes(0, Routes::to(to_itself));
            assert!(matches!(refused, Err(ForwardError::Loop { .. })), "{kind}");
            // The previous route still works.
            sender.send_to(b"x", ("127.0.0.1", port)).unwrap();
            assert_eq!(target.recv(&mut room).unwrap(), 1, "{kind}");
        }
    });
}

#[test]
fn links_may_swap_order_but_not_form_a_circle() {
    in_namespace(|| {
        let (sender, target) = (socket("127.0.0.1:0"), socket("127.0.0.1:0"));
        let there = target.local_addr().unwrap();
        let (one, other) = ("127.0.0.1:4000", "127.0.0.1:4001");
        let round = forward(vec![link(one, other), link(other, one)]).start();
        let Err(error @ ForwardError::Round { .. }) = round else { panic!("{round:?}") };
        assert!(error.is_usage());
        assert_eq!(error.to_string(), format!("packets would go round: {one}, {other}, and {one} again"));
        // Two links may be chained in either order.
        let running = forward(vec![link(one, other), Link::new(other.parse().unwrap(), there)]);
        let running = running.start().unwrap();
        let to = |address: &str| Routes::to(address.parse().unwrap());
        let mut room = [0; 10];
        let mut passes = |enter: &str| {
            sender.send_to(b"x", enter).unwrap();
            assert_eq!(target.recv(&mut room).unwrap(), 1);
        };
        passes(one);
        let refused = running.set_routes(1, to(one));
        assert!(matches!(refused, Err(ForwardError::Round { .. })), "{refused:?}");
        passes(one);
        // The second change alone would form a loop with the first link's present route.
        running.set_all_routes(vec![Routes::to(there), to(one)]).unwrap();
        passes(other);
        running.set_all_routes(vec![to(other), Routes::to(there)]).unwrap();
        passes(one);
        let refused = running.set_all_routes(vec![Routes::to(there), to(other)]);
        assert!(matches!(refused, Err(ForwardError::Loop { .. })), "{refused:?}");
        passes(one);
    });
}
