//! Network devices (netdevice(7), rtnetlink(7)): lookups by name and address, and devices for tests.

use std::ffi::CString;
use std::io;
use std::mem;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::netlink;
use crate::{Errno, check, socket};

const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
// Constants of include/uapi/linux/if_link.h, if_addr.h and veth.h.
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const VETH_PEER: u16 = 1;
const VLAN_ID: u16 = 1;
const IFLA_LINK: u16 = 5;
const IFLA_MASTER: u16 = 10;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// The address is usable at once, without duplicate address detection.
const NO_DUPLICATE_DETECTION: u8 = 2;
const TENTATIVE: u8 = 0x40;
/// Size of struct ifinfomsg.
const LINK_HEADER: usize = 16;
const ADDRESS_HEADER: usize = 8;

/// Returns the index of a device in the calling thread's network namespace. ENODEV: there is no device with this name.
pub fn index(name: &str) -> io::Result<u32> {
    let name = CString::new(name).map_err(|_| io::Error::from(Errno::ENODEV))?;
    // SAFETY: the name is terminated and outlives the call.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(io::Error::last_os_error()),
        index => Ok(index),
    }
}

/// Returns the name of a device in the calling thread's network namespace. ENXIO: there is no device with this index.
pub fn name(index: u32) -> io::Result<String> {
    let mut name = [0_u8; libc::IF_NAMESIZE];
    // SAFETY: the buffer has IF_NAMESIZE bytes, and outlives the call.
    if unsafe { libc::if_indextoname(index, name.as_mut_ptr().cast()) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

/// Returns the index of the device with this address in the calling thread's network namespace, or `None` if no device
/// has it. The loopback device has all addresses in 127.0.0.0/8.
pub fn with_address(address: IpAddr) -> io::Result<Option<u32>> {
    let (family, octets) = octets(address);
    let mut found = None;
    each_address(family, |_, index, local| {
        let is_loopback = address.is_ipv4() && address.is_loopback() && local == [127, 0, 0, 1];
        if local == octets || is_loopback {
            found = found.or(Some(index));
        }
    })?;
    Ok(found)
}

/// An address of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Local {
    pub address: IpAddr,
    pub prefix: u8,
    pub index: u32,
    /// Duplicate address detection is not complete, or has found a duplicate (IPv6).
    pub is_tentative: bool,
}

/// Returns the addresses of all devices, in the calling thread's network namespace.
///
/// # Errors
///
/// The errors of netlink(7).
pub fn addresses() -> io::Result<Vec<Local>> {
    let mut addresses = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        each_address(family as u8, |header, index, local| {
            let v4 = <[u8; 4]>::try_from(local).map(IpAddr::from);
            let v6 = <[u8; 16]>::try_from(local).map(IpAddr::from);
            let (prefix, is_tentative) = (header[1], header[2] & TENTATIVE != 0);
            addresses.extend(v4.or(v6).map(|address| Local { address, prefix, index, is_tentative }));
        })?;
    }
    // A repeated dump lists addresses again.
    addresses.sort_unstable();
    addresses.dedup();
    Ok(addresses)
}

/// Calls `found` with struct ifaddrmsg, the index of the device and the octets of each address of a family.
fn each_address(family: u8, mut found: impl FnMut(&[u8], u32, &[u8])) -> io::Result<()> {
    let mut body = vec![0; ADDRESS_HEADER];
    body[0] = family;
    netlink::ask_again(libc::NETLINK_ROUTE, RTM_GETADDR, &body, |answer| {
        let Some((header, attributes)) = answer.split_at_checked(ADDRESS_HEADER) else { return };
        // If IFA_LOCAL is present, IFA_ADDRESS is the address of the peer.
        let local =
            netlink::attribute(attributes, IFA_LOCAL).or_else(|| netlink::attribute(attributes, IFA_ADDRESS));
        // A kernel without IPv6 answers a request for IPv6 addresses with IPv4 addresses.
        if let (true, Some(local), Some(index)) = (header[0] == family, local, netlink::word(header, 4)) {
            found(header, index, local);
        }
    })
}

/// Returns the address family and the octets of an address.
pub(crate) fn octets(address: IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(v4) => (libc::AF_INET as u8, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6 as u8, v6.octets().to_vec()),
    }
}

/// Creates a veth(4) pair: `name` in the calling thread's network namespace and `peer` in a second namespace. Both
/// devices are down. They are removed with their namespaces.
pub fn make_pair(name: &str, peer: &str, namespace: BorrowedFd<'_>) -> io::Result<()> {
    make_pair_with(name, peer, namespace, &[])
}

/// Creates a veth(4) pair like [`make_pair`], whose devices both have these attributes.
pub(crate) fn make_pair_with(
    name: &str,
    peer: &str,
    namespace: BorrowedFd<'_>,
    attributes: &[(u16, &[u8])],
) -> io::Result<()> {
    let mut end = vec![0; LINK_HEADER];
    netlink::put_attribute(&mut end, IFLA_IFNAME, terminated(peer).as_slice());
    attributes.iter().for_each(|(kind, value)| netlink::put_attribute(&mut end, *kind, value));
    netlink::put_attribute(&mut end, IFLA_NET_NS_FD, &namespace.as_raw_fd().to_ne_bytes());
    let mut data = Vec::new();
    netlink::put_attribute(&mut data, VETH_PEER, &end);
    make(name, "veth", &data, attributes)
}

/// Creates a bridge, which forwards frames between its ports. It is down.
///
/// # Errors
///
/// EOPNOTSUPP: the kernel has no bridges (CONFIG_BRIDGE). EPERM without CAP_NET_ADMIN.
pub fn make_bridge(name: &str) -> io::Result<()> {
    make(name, "bridge", &[], &[])
}

/// Makes a device a port of a bridge.
pub fn add_to_bridge(name: &str, bridge: &str) -> io::Result<()> {
    let mut body = vec![0; LINK_HEADER];
    body[4..8].copy_from_slice(&index(name)?.to_ne_bytes());
    netlink::put_attribute(&mut body, IFLA_MASTER, &index(bridge)?.to_ne_bytes());
    netlink::change(libc::NETLINK_ROUTE, RTM_NEWLINK, 0, &body)
}

/// Creates an 802.1Q VLAN device on top of `below`. It is down.
pub fn make_vlan(name: &str, below: &str, id: u16) -> io::Result<()> {
    let below = index(below)?.to_ne_bytes();
    let mut data = Vec::new();
    netlink::put_attribute(&mut data, VLAN_ID, &id.to_ne_bytes());
    make(name, "vlan", &data, &[(IFLA_LINK, &below)])
}

fn make(name: &str, kind: &str, data: &[u8], attributes: &[(u16, &[u8])]) -> io::Result<()> {
    let mut info = Vec::new();
    netlink::put_attribute(&mut info, INFO_KIND, kind.as_bytes());
    netlink::put_attribute(&mut info, INFO_DATA, data);
    let mut body = vec![0; LINK_HEADER];
    netlink::put_attribute(&mut body, IFLA_IFNAME, terminated(name).as_slice());
    attributes.iter().for_each(|(kind, value)| netlink::put_attribute(&mut body, *kind, value));
    netlink::put_attribute(&mut body, IFLA_LINKINFO, &info);
    netlink::change(libc::NETLINK_ROUTE, RTM_NEWLINK, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &body)
}

fn terminated(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

/// Adds an address with a prefix length of `prefix` bits to a device.
pub fn add_address(name: &str, address: IpAddr, prefix: u8) -> io::Result<()> {
    let body = address_body(name, address, prefix)?;
    netlink::change(libc::NETLINK_ROUTE, RTM_NEWADDR, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &body)
}

/// Removes an address from a device.
///
/// # Errors
///
/// EADDRNOTAVAIL: the device does not have the address with this prefix length.
pub fn remove_address(name: &str, address: IpAddr, prefix: u8) -> io::Result<()> {
    netlink::change(libc::NETLINK_ROUTE, RTM_DELADDR, 0, &address_body(name, address, prefix)?)
}

fn address_body(name: &str, address: IpAddr, prefix: u8) -> io::Result<Vec<u8>> {
    let (family, octets) = octets(address);
    let mut body = vec![family, prefix, NO_DUPLICATE_DETECTION, 0];
    body.extend_from_slice(&index(name)?.to_ne_bytes());
    netlink::put_attribute(&mut body, IFA_LOCAL, &octets);
    netlink::put_attribute(&mut body, IFA_ADDRESS, &octets);
    Ok(body)
}

/// Sets a device up.
pub fn set_up(name: &str) -> io::Result<()> {
    set_flags(name, libc::IFF_UP | libc::IFF_RUNNING)
}

/// Sets a device down: it loses its IPv6 addresses, and its veth peer has no carrier.
pub fn set_down(name: &str) -> io::Result<()> {
    set_flags(name, 0)
}

fn set_flags(name: &str, flags: libc::c_int) -> io::Result<()> {
    let mut request = request(name)?;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    let control = control_socket()?;
    // SAFETY: SIOCSIFFLAGS reads one ifreq with a terminated name.
    check(unsafe { libc::ioctl(control.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request) }).map(drop)
}

/// Sets the MTU of a device. Below 1280 the device loses IPv6 and its IPv6 addresses (`addrconf_notify`), and does not
/// get them back.
///
/// # Errors
///
/// EINVAL: the device does not support this MTU. EPERM without CAP_NET_ADMIN.
pub fn set_mtu(name: &str, mtu: u32) -> io::Result<()> {
    let mut request = request(name)?;
    request.ifr_ifru.ifru_mtu = libc::c_int::try_from(mtu).map_err(|_| io::Error::from(Errno::EINVAL))?;
    let control = control_socket()?;
    // SAFETY: SIOCSIFMTU reads one ifreq with a terminated name.
    check(unsafe { libc::ioctl(control.as_raw_fd(), libc::SIOCSIFMTU as _, &raw mut request) }).map(drop)
}

/// Does the same as `ethtool -K DEVICE tx off`: the kernel computes the checksums of sent packets. With `leave` the kernel leaves
/// them to the device; veth devices compute none, because packets within a host cannot be corrupted.
pub fn leave_checksums(name: &str, leave: bool) -> io::Result<()> {
    /// Command of include/uapi/linux/ethtool.h.
    const ETHTOOL_STXCSUM: u32 = 0x17;
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    const SIOCETHTOOL: libc::c_ulong = 0x8946;
    let mut value = Value { command: ETHTOOL_STXCSUM, data: u32::from(leave) };
    let mut request = request(name)?;
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    let control = control_socket()?;
    // SAFETY: SIOCETHTOOL reads one ifreq with a terminated name, and through its pointer one struct ethtool_value, which
    // outlives the call.
    check(unsafe { libc::ioctl(control.as_raw_fd(), SIOCETHTOOL as _, &raw mut request) }).map(drop)
}

fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: ifreq is plain data for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::from(Errno::ENODEV));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

/// Opens a socket for ioctl(2).
pub(crate) fn control_socket() -> io::Result<OwnedFd> {
    socket::create(libc::AF_INET, libc::SOCK_DGRAM, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_has_its_addresses() {
        let loopback = index("lo").unwrap();
        for text in ["127.0.0.1", "127.9.9.9"] {
            assert_eq!(with_address(text.parse().unwrap()).unwrap(), Some(loopback), "{text}");
        }
        assert_eq!(with_address("192.0.2.200".parse().unwrap()).unwrap(), None);
        assert_eq!(name(loopback).unwrap(), "lo");
        assert_eq!(name(u32::MAX).unwrap_err().raw_os_error(), Some(libc::ENXIO));
        assert_eq!(index("nosuch").unwrap_err().raw_os_error(), Some(libc::ENODEV));
        assert_eq!(index("a name that is too long").unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }
}
