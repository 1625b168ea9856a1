//! The queue of the loopback device.

use std::net::UdpSocket;
use std::time::Duration;

/// Waits for packets on their way over loopback.
///
/// Softirqs that fall behind on a slow machine leave packets in the queue of the device (netdev_max_backlog, 1,000 packets). A test that
/// sends more without a wait loses packets there, also packets of other tests.
pub struct Loopback(UdpSocket);

impl Loopback {
    /// Opens a socket that sends to itself.
    pub fn open() -> Loopback {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
        socket.connect(socket.local_addr().expect("an address")).expect("a way to itself");
        socket.set_read_timeout(Some(Duration::from_millis(200))).expect("a timeout");
        Loopback(socket)
    }

    /// Waits until all packets that were sent before have been delivered.
    pub fn flush(&self) {
        let arrives = || self.0.send(&[0]).and_then(|_| self.0.recv(&mut [0])).is_ok();
        assert!((0..100).any(|_| arrives()), "nothing passes the loopback device");
    }
}
