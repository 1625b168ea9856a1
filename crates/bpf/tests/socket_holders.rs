//! The descriptors of sockets that `socket_holders` finds.
#![forbid(unsafe_code)]

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::{fs, process};

use fourtuple_bpf::{SocketHolder, SocketHolders};
use fourtuple_testing::{in_namespace, skip};

#[test]
fn descriptors_of_the_own_namespace_are_found() {
    let outside = TcpListener::bind("127.0.0.1:0").unwrap();
    in_namespace(move || {
        let listener = TcpListener::bind("127.0.0.1:4000").unwrap();
        let connected = TcpStream::connect("127.0.0.1:4000").unwrap();
        let udp = UdpSocket::bind("[::1]:4001").unwrap();
        let mut holders = match SocketHolders::load() {
            Ok(holders) => holders,
            Err(error) => {
                let test = "descriptors_of_the_own_namespace_are_found";
                return skip(test, "bpf", &error.to_string());
            }
        };
        let expected = [
            (listener.as_raw_fd(), listener.local_addr().unwrap(), 10, 0),
            (connected.as_raw_fd(), connected.local_addr().unwrap(), 1, 0),
            (udp.as_raw_fd(), udp.local_addr().unwrap(), 7, 17),
        ];
        // The second pass is a new one.
        for _ in 0..2 {
            let mut found: Vec<SocketHolder> = Vec::new();
            holders.each(|holder| found.push(*holder)).unwrap();
            for (descriptor, local, state, protocol) in expected {
                let link = fs::read_link(format!("/proc/self/fd/{descriptor}")).unwrap();
                let inode = link
                    .to_str()
                    .unwrap()
                    .trim_start_matches("socket:[")
                    .trim_end_matches(']')
                    .parse()
                    .unwrap();
                let expected = SocketHolder { process: process::id(), inode, protocol, state, local };
                assert!(found.contains(&expected), "{expected:?}: {found:?}");
            }
            assert_eq!(found.len(), 3, "no socket of another namespace: {found:?}");
        }
        drop(outside);
    });
}
