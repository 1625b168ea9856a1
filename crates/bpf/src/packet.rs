//! Packets for tests, to 192.0.2.1 or 2001:db8::1, port 7000.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::BpfError;

/// Returns the loaded program, or counts a skip if BPF is not available.
pub(crate) fn loaded<T>(test: &str, result: Result<T, BpfError>) -> Option<T> {
    match result {
        Ok(loaded) => Some(loaded),
        Err(error @ (BpfError::NotPermitted { .. } | BpfError::Absent { .. })) => {
            fourtuple_testing::skip(test, "bpf", &error.to_string());
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

/// Locks a mutex for tests that run programs: one at a time, as in crates/fourtuple/tests/spread/main.rs.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The network header below UDP.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Net {
    V4 { options: usize },
    V6,
}

#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) bytes: Vec<u8>,
    /// Offset of the UDP header.
    pub(crate) udp: usize,
    /// Checksum of the pseudo-header: addresses, protocol and length.
    pub(crate) pseudo: u32,
}

impl Packet {
    pub(crate) fn new(net: Net, tags: &[u16], payload: &[u8]) -> Packet {
        let mut bytes = vec![2; 12];
        for (index, tag) in tags.iter().enumerate() {
            bytes.extend_from_slice(&tag.to_be_bytes());
            bytes.extend_from_slice(&(index as u16 + 5).to_be_bytes());
        }
        let length = 8 + payload.len() as u16;
        let mut addresses = Vec::new();
        match net {
            Net::V4 { options } => {
                bytes.extend_from_slice(&[0x08, 0x00]);
                let header = 20 + options;
                bytes.extend_from_slice(&[0x40 | (header / 4) as u8, 0]);
                bytes.extend_from_slice(&(header as u16 + length).to_be_bytes());
                bytes.extend_from_slice(&[0, 1, 0x40, 0, 64, 17, 0, 0]);
                addresses.extend_from_slice(&[192, 0, 2, 9, 192, 0, 2, 1]);
                bytes.extend_from_slice(&addresses);
                bytes.extend(std::iter::repeat_n(1, options));
            }
            Net::V6 => {
                bytes.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0]);
                bytes.extend_from_slice(&length.to_be_bytes());
                bytes.extend_from_slice(&[17, 64]);
                for last in [9, 1] {
                    addresses
                        .extend_from_slice(&[0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
                }
                bytes.extend_from_slice(&addresses);
            }
        }
        let udp = bytes.len();
        for half in [4242, 7000, length, 0] {
            bytes.extend_from_slice(&half.to_be_bytes());
        }
        bytes.extend_from_slice(payload);
        let mut packet = Packet { bytes, udp, pseudo: sum(&addresses) + 17 + u32::from(length) };
        let checksum = !fold(packet.pseudo + sum(&packet.bytes[udp..]));
        packet.set_checksum(if checksum == 0 { 0xffff } else { checksum });
        packet
    }

    fn half(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.bytes[self.udp + at], self.bytes[self.udp + at + 1]])
    }

    pub(crate) fn source_port(&self) -> u16 {
        self.half(0)
    }

    pub(crate) fn checksum(&self) -> u16 {
        self.half(6)
    }

    pub(crate) fn set_checksum(&mut self, checksum: u16) {
        self.bytes[self.udp + 6..self.udp + 8].copy_from_slice(&checksum.to_be_bytes());
    }

    /// Checks the UDP checksum as a receiver does (RFC 768).
    pub(crate) fn checksum_is_right(&self) -> bool {
        fold(self.pseudo + sum(&self.bytes[self.udp..])) == 0xffff
    }

    pub(crate) fn without_port_and_checksum(&self) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        for at in [0, 1, 6, 7] {
            bytes[self.udp + at] = 0;
        }
        bytes
    }
}

fn sum(bytes: &[u8]) -> u32 {
    bytes
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)])))
        .sum()
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}
