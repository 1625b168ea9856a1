//! UDP packets over the loopback device: a continuous stream of numbered packets, each of which must arrive exactly once, and a wait for packets
//! on their way.

use std::collections::HashSet;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::StopOnDrop;

/// Time limit of each wait, longer than any wait of a working test.
pub const LONG: Duration = Duration::from_secs(60);
/// Maximum number of packets in flight, below the capacity of each queue.
const WINDOW: u32 = 64;

/// Opens a socket on a free port.
pub fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

/// Sends a packet again until one arrives, and returns its length and where it came from. The queue of the loopback device (netdev_max_backlog)
/// is that of all tests of the host, and the kernel drops what finds it full.
pub fn arrives(send: impl Fn(), at: &UdpSocket, buffer: &mut [u8]) -> (usize, SocketAddr) {
    at.set_read_timeout(Some(LONG / 6)).unwrap();
    let mut tries = (0..6).map(|_| {
        send();
        at.recv_from(buffer)
    });
    let arrived = tries.find_map(Result::ok).expect("a packet that was sent arrives");
    at.set_read_timeout(Some(LONG)).unwrap();
    arrived
}

/// The two ends of a stream. With replies the far end returns each packet, and the client counts them.
pub struct Stream {
    client: UdpSocket,
    target: UdpSocket,
    replies: bool,
}

impl Stream {
    /// Opens both ends, with or without replies.
    pub fn new(replies: bool) -> Stream {
        Stream { client: socket(), target: socket(), replies }
    }

    /// Returns the address of the far end.
    pub fn target(&self) -> SocketAddr {
        self.target.local_addr().unwrap()
    }

    /// Sends to `to` while `body` runs, and returns the number of packets. Panics unless each packet arrived exactly once.
    pub fn run(&mut self, to: SocketAddr, body: impl FnOnce()) -> u64 {
        let (stop, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let (client, target) = (&self.client, &self.target);
        thread::scope(|scope| {
            let (stop, over) = (&stop, &over);
            if self.replies {
                scope.spawn(move || echo(target, over));
            }
            let out = if self.replies { client } else { target };
            let stream = scope.spawn(move || stream(to, client, out, stop));
            let (_over, stopping) = (StopOnDrop(over), StopOnDrop(stop));
            body();
            drop(stopping);
            u64::from(stream.join().unwrap())
        })
    }
}

fn echo(target: &UdpSocket, over: &AtomicBool) {
    target.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let mut buffer = [0; 100];
    while !over.load(Ordering::Relaxed) {
        let Ok((length, from)) = target.recv_from(&mut buffer) else { continue };
        target.send_to(&buffer[..length], from).unwrap();
    }
}

/// Sends numbered packets to `to` until `stop` is set, with a limited number in flight, and returns how many arrived at `out`,
/// each exactly once.
fn stream(to: SocketAddr, sender: &UdpSocket, out: &UdpSocket, stop: &AtomicBool) -> u32 {
    let (mut sent, mut got) = (0, HashSet::new());
    let mut buffer = [0; 100];
    while !stop.load(Ordering::Relaxed) || got.len() < sent as usize {
        while !stop.load(Ordering::Relaxed) && sent - (got.len() as u32) < WINDOW {
            sender.send_to(&sent.to_be_bytes(), to).unwrap();
            sent += 1;
        }
        if got.len() < sent as usize {
            assert_eq!(out.recv(&mut buffer).expect("a packet that was sent comes out"), 4);
            assert!(got.insert(u32::from_be_bytes(buffer[..4].try_into().unwrap())), "a packet came twice");
        }
    }
    assert!((0..sent).all(|number| got.contains(&number)));
    sent
}

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
