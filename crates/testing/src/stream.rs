//! Numbered packets, sent all the time, of which each has to come out once.

use std::collections::HashSet;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Nothing takes as long on a machine that works.
pub const LONG: Duration = Duration::from_secs(20);
/// Packets under way: fewer than any queue has room for.
const WINDOW: u32 = 64;

/// At a port of its own.
pub fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket
}

/// Where packets come from and where they go. With replies the far end sends everything back, and it is the client that counts.
pub struct Stream {
    client: UdpSocket,
    target: UdpSocket,
    replies: bool,
}

impl Stream {
    /// One way, or with replies.
    pub fn new(replies: bool) -> Stream {
        Stream { client: socket(), target: socket(), replies }
    }

    /// Where packets are to go.
    pub fn target(&self) -> SocketAddr {
        self.target.local_addr().unwrap()
    }

    /// Sends to `to` while `body` runs: how many were sent, all of which came out, each of them once.
    pub fn run(&mut self, to: SocketAddr, body: impl FnOnce()) -> u64 {
        let (stop, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let (client, target) = (&self.client, &self.target);
        thread::scope(|scope| {
            let (stop, over) = (&stop, &over);
            let echo = self.replies.then(|| scope.spawn(move || echo(target, over)));
            let out = if self.replies { client } else { target };
            let stream = scope.spawn(move || stream(to, client, out, stop));
            // The threads are to end as well when it fails.
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
            stop.store(true, Ordering::Relaxed);
            let sent = stream.join();
            over.store(true, Ordering::Relaxed);
            if let Some(echo) = echo {
                echo.join().unwrap();
            }
            if let Err(payload) = done {
                std::panic::resume_unwind(payload);
            }
            u64::from(sent.unwrap())
        })
    }
}

fn echo(target: &UdpSocket, over: &AtomicBool) {
    target.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let mut room = [0; 100];
    while !over.load(Ordering::Relaxed) {
        let Ok((length, from)) = target.recv_from(&mut room) else { continue };
        target.send_to(&room[..length], from).unwrap();
    }
}

/// Sends numbered packets to `to` until told to stop, no more than a window of them under way, and gives how many came out at
/// `out`, each of them once.
fn stream(to: SocketAddr, sender: &UdpSocket, out: &UdpSocket, stop: &AtomicBool) -> u32 {
    let (mut sent, mut got) = (0, HashSet::new());
    let mut room = [0; 100];
    while !stop.load(Ordering::Relaxed) || got.len() < sent as usize {
        while !stop.load(Ordering::Relaxed) && sent - (got.len() as u32) < WINDOW {
            sender.send_to(&sent.to_be_bytes(), to).unwrap();
            sent += 1;
        }
        if got.len() < sent as usize {
            assert_eq!(out.recv(&mut room).expect("a packet that was sent comes out"), 4);
            assert!(got.insert(u32::from_be_bytes(room[..4].try_into().unwrap())), "a packet came twice");
        }
    }
    assert!((0..sent).all(|number| got.contains(&number)));
    sent
}
