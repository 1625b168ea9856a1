//! The rules about ports, on real sockets.

mod scene;

use std::net::TcpStream;

use fourtuple_testing::{in_namespace, listener, set_sysctl};
use scene::findings;

#[test]
fn p01_a_full_range_is_named() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20019");
        let (_listener, address) = listener("127.0.0.1", 100);
        let half: Vec<TcpStream> = (0..10).map(|_| TcpStream::connect(address).unwrap()).collect();
        assert!(findings("P01").is_empty());
        let _rest: Vec<TcpStream> = (0..10).map(|_| TcpStream::connect(address).unwrap()).collect();
        let found = findings("P01");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].verdict.contains("20 of 20 ports"), "{}", found[0].verdict);
        assert!(found[0].now.iter().any(|advice| advice.recomputed), "a wider range removes the finding");
        drop(half);
    });
}
