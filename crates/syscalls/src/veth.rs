//! Creates pairs of virtual Ethernet devices (veth) with rtnetlink(7), which connect two network namespaces.

use std::ffi::CString;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{Errno, netlink};

const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;

/// Creates a pair: `name` in the calling thread's network namespace, `peer` in a second namespace. Both are down, with
/// an MTU of `mtu` bytes.
///
/// # Errors
///
/// EPERM without CAP_NET_ADMIN in both namespaces; EEXIST; EINVAL for an MTU that veth does not support (68 to 65535).
pub fn create(name: &str, peer: &str, peer_namespace: BorrowedFd<'_>, mtu: u32) -> io::Result<()> {
    let mut other = link(0, 0);
    attribute(&mut other, IFLA_IFNAME, &text(peer));
    attribute(&mut other, IFLA_MTU, &mtu.to_ne_bytes());
    attribute(&mut other, IFLA_NET_NS_FD, &peer_namespace.as_raw_fd().to_ne_bytes());
    let mut data = Vec::new();
    attribute(&mut data, VETH_INFO_PEER, &other);
    let mut info = Vec::new();
    attribute(&mut info, IFLA_INFO_KIND, b"veth");
    attribute(&mut info, IFLA_INFO_DATA, &data);
    let mut body = link(0, 0);
    attribute(&mut body, IFLA_IFNAME, &text(name));
    attribute(&mut body, IFLA_MTU, &mtu.to_ne_bytes());
    attribute(&mut body, IFLA_LINKINFO, &info);
    netlink::change(libc::NETLINK_ROUTE, RTM_NEWLINK, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &body)
}

/// Adds an address with a prefix length of `bits` to a device of the calling thread's network namespace, and sets the
/// device up.
///
/// # Errors
///
/// ENODEV: there is no device with this name. EPERM without CAP_NET_ADMIN.
pub fn set_up(name: &str, address: Ipv4Addr, bits: u8) -> io::Result<()> {
    let zeroed = CString::new(name).map_err(|_| io::Error::from(Errno::EINVAL))?;
    // SAFETY: the name is a terminated string, which the call only reads.
    let index = unsafe { libc::if_nametoindex(zeroed.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    // Layout of struct ifaddrmsg: family, prefix length, flags, scope, index.
    let mut body = vec![libc::AF_INET as u8, bits, 0, 0];
    body.extend_from_slice(&index.to_ne_bytes());
    attribute(&mut body, IFA_LOCAL, &address.octets());
    attribute(&mut body, IFA_ADDRESS, &address.octets());
    netlink::change(libc::NETLINK_ROUTE, RTM_NEWADDR, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &body)?;
    netlink::change(libc::NETLINK_ROUTE, RTM_NEWLINK, 0, &link(index, libc::IFF_UP as u32))
}

/// Returns struct ifinfomsg: family, type, index, flags, and the mask of flags to change.
fn link(index: u32, flags: u32) -> Vec<u8> {
    let mut body = vec![0; 4];
    for word in [index, flags, flags] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    body
}

fn text(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

/// Appends an attribute: length, kind, value, and zero padding to the next word.
fn attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    body.extend_from_slice(&kind.to_ne_bytes());
    body.extend_from_slice(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_carry_their_length() {
        let mut body = Vec::new();
        attribute(&mut body, 3, b"ab\0");
        assert_eq!(body, [&7_u16.to_ne_bytes()[..], &3_u16.to_ne_bytes(), b"ab\0\0"].concat());
        assert_eq!(link(7, 1).len(), 16);
    }
}
