//! Kernels that do not list their sockets: the dialers report that they cannot list them, never that there is no socket.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use fourtuple::dial::{DialError, Dialer, Sharing, UdpDialer, Uncounted, Unseen};
use fourtuple_syscalls::seccomp::{self, Facility};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Errno, option};
use fourtuple_testing::{in_namespace, listener, set_sysctl};

/// Refuses sock_diag on this thread, and returns the errno. A kernel that lacks only tcp_diag and udp_diag answers ENOENT.
fn without_sock_diag() -> Errno {
    seccomp::refuse(Facility::SocketDiag).unwrap();
    Errno::EPROTONOSUPPORT
}

fn assert_unseen(unseen: Unseen, errno: Errno) {
    assert_eq!(unseen.call, "sock_diag");
    assert_eq!(Errno::new(unseen.errno), errno);
}

fn exhaustion_names_what_cannot_be_seen(errno: Errno) {
    set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
    let (_listener, destination) = listener("127.0.0.1", 64);
    let dialer = Dialer::to(destination).build().unwrap();
    assert_unseen(dialer.choice().unseen.expect("the ledger was not read"), errno);
    assert!(
        dialer.choice().to_string().ends_with("loaded?)") == (errno == Errno::ENOENT),
        "{}",
        dialer.choice()
    );
    assert_eq!(Errno::of(&dialer.refresh().unwrap_err()), Some(errno));
    let held: Vec<_> = (0..8).map(|_| dialer.dial().unwrap()).collect();
    let error = dialer.dial().unwrap_err();
    let said = error.to_string();
    let DialError::PortsExhausted { census: Err(Uncounted::Unseen(unseen)), .. } = error else {
        panic!("{error:?}")
    };
    assert_unseen(unseen, errno);
    assert!(said.contains("the holders cannot be listed (sock_diag: "), "{said}");
    drop(held);
}

fn a_shared_tuple_is_not_risked(errno: Errno) {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let destination = server.local_addr().unwrap();
    // The owner of the 4-tuple has SO_REUSEADDR, so a dialer that does not see it could take over the 4-tuple.
    let owner = socket::open(Transport::Udp, destination, false).unwrap();
    option::set_reuse_address(owner.as_fd(), true).unwrap();
    socket::bind(owner.as_fd(), SocketAddr::from(([127, 0, 0, 1], 20005))).unwrap();
    socket::connect(owner.as_fd(), destination).unwrap();
    let dialer = |sharing| UdpDialer::new(destination, None, sharing).unwrap();
    for shared in [dialer(Sharing::Shared).source_port(20005), dialer(Sharing::Shared)] {
        match shared.dial() {
            Err(DialError::CannotSee { unseen, .. }) => assert_unseen(unseen, errno),
            other => panic!("{other:?}"),
        }
    }
    dialer(Sharing::Exclusive).dial().unwrap();
    let owner = UdpSocket::from(owner);
    server.send_to(b"mine", owner.local_addr().unwrap()).unwrap();
    assert_eq!(owner.recv(&mut [0; 8]).unwrap(), 4);
}

#[test]
fn exhaustion_without_sock_diag_is_reported() {
    in_namespace(|| exhaustion_names_what_cannot_be_seen(without_sock_diag()));
}

#[test]
fn udp_without_sock_diag_shares_nothing() {
    in_namespace(|| a_shared_tuple_is_not_risked(without_sock_diag()));
}

#[test]
#[ignore = "needs a kernel without tcp_diag: cargo xtask kernels boots one"]
fn exhaustion_without_tcp_diag_is_reported() {
    in_namespace(|| exhaustion_names_what_cannot_be_seen(Errno::ENOENT));
}

#[test]
#[ignore = "needs a kernel without udp_diag: cargo xtask kernels boots one"]
fn udp_without_udp_diag_shares_nothing() {
    in_namespace(|| a_shared_tuple_is_not_risked(Errno::ENOENT));
}
