//! A pair of network devices (veth) between two network namespaces, with checksums on all packets; and TCP segments without a socket, for
//! floods.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddrV4};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use fourtuple_syscalls::{device, netns, socket};

/// Device in the namespace of the thread that called [`Wire::open`].
pub const NEAR: &str = "near";
/// Device in the far namespace.
pub const FAR: &str = "far";
/// IPv4 address of the near device.
pub const NEAR_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));
/// IPv4 address of the far device.
pub const FAR_V4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2));
/// IPv6 address of the near device.
pub const NEAR_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 1));
/// IPv6 address of the far device.
pub const FAR_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, 2));

/// A veth pair whose far device is in a second namespace. Dropping the value removes that namespace.
#[derive(Debug)]
pub struct Wire {
    namespace: OwnedFd,
}

impl Wire {
    /// Creates both devices and brings them up. Both compute the checksums of sent packets, as hardware does, or a veth device after
    /// `ethtool -K DEV tx off`. Call it in a namespace of the test. Returns `None` and reports `test` as skipped if the kernel has no
    /// veth.
    pub fn open(test: &str) -> Option<Wire> {
        let made = || -> io::Result<Wire> {
            let far = thread::spawn(|| {
                netns::enter_new()?;
                netns::current()
            });
            let wire = Wire { namespace: far.join().expect("the thread does not panic")? };
            device::make_pair(NEAR, FAR, wire.namespace.as_fd())?;
            bring_up(NEAR, NEAR_V4, NEAR_V6)?;
            wire.far_away(|| bring_up(FAR, FAR_V4, FAR_V6))?;
            Ok(wire)
        };
        match made() {
            Ok(wire) => Some(wire),
            Err(error) => {
                super::skip(test, "veth", &format!("no pair of devices to be had: {error}"));
                None
            }
        }
    }

    /// Runs `what` in the far namespace. A socket opened there belongs to that namespace, in whichever thread it is used.
    pub fn far_away<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let there = scope.spawn(|| {
                netns::enter(self.namespace.as_fd()).expect("a thread may go where it has been");
                what()
            });
            there.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload))
        })
    }
}

fn bring_up(name: &str, v4: IpAddr, v6: IpAddr) -> io::Result<()> {
    device::leave_checksums(name, false)?;
    device::set_up(name)?;
    device::add_address(name, v4, 24)?;
    device::add_address(name, v6, 64)
}

/// The SYN flag: requests a connection.
pub const SYN: u8 = 0x02;
/// The RST flag: resets a connection.
pub const RST: u8 = 0x04;
/// The ACK flag.
pub const ACK: u8 = 0x10;

/// Protocol number of TCP in the pseudo header.
const TCP: u8 = 6;

/// A raw IPv4 socket whose source address has no connection in the kernel. The kernel answers a reply to its SYN with RST if the
/// address belongs to this host.
pub struct Raw {
    socket: OwnedFd,
    source: Ipv4Addr,
    to: SocketAddrV4,
}

impl Raw {
    /// Opens a raw socket bound to `source`, an address of this namespace (any of 127.0.0.0/8 if loopback is up). Needs CAP_NET_RAW.
    pub fn open(source: Ipv4Addr, to: SocketAddrV4) -> Raw {
        let socket = socket::open_raw_tcp().expect("a raw socket");
        socket::bind(socket.as_fd(), SocketAddrV4::new(source, 0).into()).expect("an address of this host");
        // On a raw socket connect() only sets the destination.
        socket::connect(socket.as_fd(), SocketAddrV4::new(*to.ip(), 0).into()).expect("a way there");
        Raw { socket, source, to }
    }

    /// Sends a segment without data from a port.
    pub fn send(&self, port: u16, flags: u8) {
        let mut segment = [0_u8; 20];
        segment[..2].copy_from_slice(&port.to_be_bytes());
        segment[2..4].copy_from_slice(&self.to.port().to_be_bytes());
        segment[4..8].copy_from_slice(&(u32::from(port) * 7919).to_be_bytes());
        segment[12] = 5 << 4;
        segment[13] = flags;
        segment[14..16].copy_from_slice(&1024_u16.to_be_bytes());
        let checksum = checksum(self.source, *self.to.ip(), &segment);
        segment[16..18].copy_from_slice(&checksum.to_be_bytes());
        assert_eq!(socket::send(self.socket.as_fd(), &segment).expect("a segment is sent"), segment.len());
    }
}

/// Computes the TCP checksum over the pseudo header and the segment (RFC 9293, section 3.1).
fn checksum(source: Ipv4Addr, destination: Ipv4Addr, segment: &[u8; 20]) -> u16 {
    let mut words: Vec<u8> = [source.octets(), destination.octets()].concat();
    words.extend([0, TCP]);
    words.extend([0, segment.len() as u8]);
    words.extend(segment);
    let mut sum: u32 = words.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
