//! An address at which another process has sockets: a link shares it only if the settings allow it.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use fourtuple::spread::Selector;
use fourtuple_forward::{Forward, ForwardError, Link};
use fourtuple_syscalls::option;
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_testing::in_namespace;

const ADDRESSES: [&str; 4] = ["127.0.0.1:4000", "0.0.0.0:4000", "[::1]:4000", "[::]:4000"];

fn forward(listen: &str) -> Forward {
    Forward::new(Link::new(listen.parse().unwrap(), "127.0.0.1:1".parse().unwrap()), 2)
}

fn shared_socket(address: &str) -> UdpSocket {
    let address: SocketAddr = address.parse().unwrap();
    let socket = socket::open(Transport::Udp, address, false).unwrap();
    let _ = option::set_reuse_port(socket.as_fd()).unwrap();
    socket::bind(socket.as_fd(), address).unwrap();
    socket.into()
}

fn share_only_when_asked(listen: &str) {
    let first = forward(listen).start().unwrap();
    let error = forward(listen).start().unwrap_err();
    assert!(matches!(error, ForwardError::Taken { .. }), "{listen}: {error}");
    assert!(error.to_string().contains(listen), "{error}");
    assert!(!error.is_usage());
    drop(Forward { share: true, ..forward(listen) }.start().unwrap());
    drop(first);
    drop(forward(listen).start().unwrap());
}

#[test]
fn two_forwarders_share_an_address_only_when_asked() {
    in_namespace(|| ADDRESSES.into_iter().for_each(share_only_when_asked));
}

/// A bind(2) without SO_REUSEPORT then finds the sockets of the other forwarder.
#[test]
fn without_sock_diag_forwarders_share_only_when_asked() {
    in_namespace(|| {
        seccomp::refuse(Facility::SocketDiag).unwrap();
        ADDRESSES.into_iter().for_each(share_only_when_asked);
        // The only socket at port 4001 is at another address.
        let _other = shared_socket("127.0.0.2:4001");
        drop(forward("127.0.0.1:4001").start().unwrap());
    });
}

#[test]
fn sockets_at_other_addresses_are_not_in_the_way() {
    in_namespace(|| {
        let _others =
            [shared_socket("0.0.0.0:4000"), shared_socket("127.0.0.2:4000"), shared_socket("127.0.0.1:4001")];
        drop(forward("127.0.0.1:4000").start().unwrap());
        let _one = shared_socket("127.0.0.1:4000");
        let mut with_selector = forward("127.0.0.1:4000");
        with_selector.links[0].spread = Selector::Random;
        assert!(matches!(with_selector.start(), Err(ForwardError::Taken { .. })));
    });
}
