//! Lists the TIME_WAIT sockets of connections without TCP timestamps, with a BPF iterator over TCP sockets (Linux 5.9).

use std::net::SocketAddr;

use aya::include_bytes_aligned;

use crate::error::BpfError;
use crate::iterator::Iterator;
use crate::tracing::address;

/// An iterator over the TIME_WAIT sockets of connections without TCP timestamps, which can be read any number of times.
#[derive(Debug)]
pub struct PlainTimeWait(Iterator);

impl PlainTimeWait {
    /// Loads the iterator. Needs CAP_BPF and CAP_PERFMON in the initial user namespace.
    ///
    /// # Errors
    ///
    /// [`BpfError::Absent`]: the kernel lacks the iterator; other errors are errors of bpf(2).
    pub fn load() -> Result<PlainTimeWait, BpfError> {
        let object = include_bytes_aligned!("plain_time_wait.o");
        Iterator::load("plain_time_wait", "iter/tcp", object).map(PlainTimeWait)
    }

    /// Calls `found` with the local address and the peer of each such socket in the calling thread's network namespace.
    ///
    /// # Errors
    ///
    /// [`BpfError`]. After an error `found` may have been called for some of the sockets.
    pub fn each(&mut self, mut found: impl FnMut(SocketAddr, SocketAddr)) -> Result<(), BpfError> {
        self.0.each(|record: &[u8; 40]| {
            let ip = |at: usize| {
                let mut bytes = [0; 16];
                bytes.copy_from_slice(&record[at..at + 16]);
                address(bytes)
            };
            let local = u16::from_ne_bytes([record[32], record[33]]);
            let remote = u16::from_be_bytes([record[34], record[35]]);
            found(SocketAddr::new(ip(0), local), SocketAddr::new(ip(16), remote));
        })
    }
}
