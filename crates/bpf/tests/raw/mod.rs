//! TCP segments from nowhere.

use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

pub(crate) const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
pub(crate) const ACK: u8 = 0x10;

/// A raw IPv4 socket with a source address at which the kernel knows no connection.
pub(crate) struct Raw {
    socket: OwnedFd,
    source: Ipv4Addr,
}

impl Raw {
    pub(crate) fn open(source: [u8; 4]) -> Raw {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: socket() takes no pointers.
        let descriptor = unsafe { libc::socket(libc::AF_INET, kind, libc::IPPROTO_TCP) };
        assert!(descriptor >= 0, "{}", io::Error::last_os_error());
        // SAFETY: the descriptor is new and nobody else's.
        let socket = unsafe { OwnedFd::from_raw_fd(descriptor) };
        let source = Ipv4Addr::from(source);
        let address = address(source);
        let length = mem::size_of_val(&address) as libc::socklen_t;
        // SAFETY: pointer and length describe the address.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
        assert_eq!(bound, 0, "{}", io::Error::last_os_error());
        Raw { socket, source }
    }

    /// A segment without data.
    pub(crate) fn send(&self, port: u16, to: SocketAddr, flags: u8) {
        let IpAddr::V4(destination) = to.ip() else { panic!("IPv4 only") };
        let mut segment = [0_u8; 20];
        segment[..2].copy_from_slice(&port.to_be_bytes());
        segment[2..4].copy_from_slice(&to.port().to_be_bytes());
        segment[4..8].copy_from_slice(&(u32::from(port) * 7919).to_be_bytes());
        segment[12] = 5 << 4;
        segment[13] = flags;
        segment[14..16].copy_from_slice(&1024_u16.to_be_bytes());
        let checksum = checksum(self.source, destination, &segment);
        segment[16..18].copy_from_slice(&checksum.to_be_bytes());
        let address = address(destination);
        let length = mem::size_of_val(&address) as libc::socklen_t;
        // SAFETY: pointers and lengths describe the segment and the address.
        let sent = unsafe {
            libc::sendto(
                self.socket.as_raw_fd(),
                segment.as_ptr().cast(),
                segment.len(),
                0,
                (&raw const address).cast(),
                length,
            )
        };
        assert_eq!(sent, 20, "{}", io::Error::last_os_error());
    }
}

fn address(address: Ipv4Addr) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from(address).to_be() },
        sin_zero: [0; 8],
    }
}

/// RFC 9293, 3.1: over the pseudo header and the segment.
fn checksum(source: Ipv4Addr, destination: Ipv4Addr, segment: &[u8]) -> u16 {
    let mut words: Vec<u8> = [source.octets(), destination.octets()].concat();
    words.extend([0, libc::IPPROTO_TCP as u8]);
    words.extend((segment.len() as u16).to_be_bytes());
    words.extend(segment);
    let mut sum: u32 = words.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
