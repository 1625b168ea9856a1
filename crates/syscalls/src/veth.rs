//! Pairs of virtual Ethernet devices (veth) that connect two network namespaces.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::BorrowedFd;

use crate::device;

/// Creates a pair: `name` in the calling thread's network namespace, `peer` in a second namespace. Both are down, with
/// an MTU of `mtu` bytes.
///
/// # Errors
///
/// EPERM without CAP_NET_ADMIN in both namespaces; EEXIST; EINVAL for an MTU that veth does not support (68 to 65535).
pub fn create(name: &str, peer: &str, peer_namespace: BorrowedFd<'_>, mtu: u32) -> io::Result<()> {
    const IFLA_MTU: u16 = 4;
    device::make_pair_with(name, peer, peer_namespace, &[(IFLA_MTU, &mtu.to_ne_bytes())])
}

/// Adds an address with a prefix length of `bits` to a device of the calling thread's network namespace, and sets the
/// device up.
///
/// # Errors
///
/// ENODEV: there is no device with this name. EPERM without CAP_NET_ADMIN.
pub fn set_up(name: &str, address: Ipv4Addr, bits: u8) -> io::Result<()> {
    device::add_address(name, address.into(), bits)?;
    device::set_up(name)
}
