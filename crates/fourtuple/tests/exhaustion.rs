//! Port exhaustion in its four forms: the error is right, and no descriptor leaks. The binary has no other test, because this
//! test counts the descriptors of the whole process.

use fourtuple::dial::{DialError, Dialer, Sharing, SourcePool, Strategy, UdpDialer};
use fourtuple_testing::{in_namespace, listener, open_descriptors, set_sysctl};

#[test]
fn every_form_of_exhaustion_is_named_and_leaks_nothing() {
    in_namespace(|| {
        set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
        let (_listener, destination) = listener("127.0.0.1", 64);
        let sources = SourcePool::one("127.0.0.2".parse().unwrap());
        let tcp =
            |strategy| Dialer::to(destination).sources(sources.clone()).strategy(strategy).build().unwrap();
        let dialers = [tcp(Strategy::KernelDefault), tcp(Strategy::Auto), tcp(Strategy::SELECT_TEST_REPEAT)];
        let streams: Vec<_> = (0..8).map(|_| dialers[1].dial().unwrap()).collect();
        let udp = |sharing| UdpDialer::new(destination, None, sharing).unwrap();
        let (exclusive, shared) = (udp(Sharing::Exclusive), udp(Sharing::Shared));
        let sockets: Vec<_> = (0..8).map(|_| exclusive.dial().unwrap()).collect();
        let before = open_descriptors();
        for _ in 0..100 {
            for dialer in &dialers {
                match dialer.dial() {
                    Err(DialError::PortsExhausted { census: Ok(census), source_address, .. }) => {
                        assert_eq!(census.established, 8);
                        assert_eq!(source_address, Some("127.0.0.2".parse().unwrap()));
                    }
                    other => panic!("{other:?}"),
                }
            }
            for dialer in [&exclusive, &shared] {
                assert!(matches!(dialer.dial(), Err(DialError::PortsExhausted { .. })));
            }
        }
        assert_eq!(open_descriptors(), before);
        let text = dialers[0].dial().unwrap_err().to_string();
        assert!(text.contains("of 8 ports 8 are established, 0 in TIME_WAIT, 0 otherwise held"), "{text}");
        drop((streams, sockets));
    });
}
