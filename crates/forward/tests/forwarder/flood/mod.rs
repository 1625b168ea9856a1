//! A flood of more data than the receiver can handle.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use fourtuple_syscalls::datagram::{Batch, Outgoing};

/// The number of packets per call.
const BURST: usize = 64;
/// The size of a packet in bytes.
const BYTES: usize = 64;

/// A thread that sends from one socket to one address, without waiting for replies.
pub(crate) struct Flood {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Flood {
    pub(crate) fn start(socket: OwnedFd, to: SocketAddr) -> Flood {
        let stop = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stop = Arc::clone(&stop);
            move || send(&socket, to, &stop)
        });
        Flood { stop, thread }
    }

    /// Ends the flood and returns the number of packets that the kernel has accepted.
    pub(crate) fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("it does not panic")
    }
}

fn send(socket: &OwnedFd, to: SocketAddr, stop: &AtomicBool) -> u64 {
    let mut batch = Batch::new(BURST, BYTES);
    let mut outgoing = Outgoing::new();
    for index in 0..BURST {
        batch.room_mut(index).fill(index as u8);
        outgoing.message(Some(to), None);
        outgoing.part(index, 0..BYTES);
    }
    let mut sent = 0;
    while !stop.load(Ordering::Relaxed) {
        // The flood drops packets for which the socket has no space.
        sent += outgoing.send(socket.as_fd(), &batch, 0).unwrap_or(0) as u64;
    }
    sent
}
