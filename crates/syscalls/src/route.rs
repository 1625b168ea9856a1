//! rtnetlink(7): source addresses of routes, and the addresses of this host.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use crate::{Errno, check, device, netlink, option, socket};

const RTM_GETROUTE: u16 = 26;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_PREFSRC: u16 = 7;
/// Size of struct rtmsg.
pub(crate) const HEADER: usize = 12;
const TYPE: usize = 7;

/// Returns the source address of the route to `destination`.
///
/// # Errors
///
/// ENETUNREACH: there is no route. ENOENT: the route names no source.
pub fn source_for(destination: IpAddr) -> io::Result<IpAddr> {
    source_by(destination, None)
}

/// Returns the source address of the route to `destination`; `None` if there is no route, or none that names a source.
///
/// # Errors
///
/// The question could not be asked, and may be answered later: EMFILE, ENFILE, ENOBUFS, ENOMEM, EPERM.
pub fn find_source(destination: IpAddr) -> io::Result<Option<IpAddr>> {
    match source_for(destination) {
        Ok(source) => Ok(Some(source)),
        Err(error) if is_no_route(&error) || Errno::of(&error) == Some(Errno::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the source address of the route through the device with this index, as IPv6 link-local destinations need it.
///
/// # Errors
///
/// The errors of [`source_for`]; ENODEV, EINVAL: there is no such device.
pub fn source_for_device(destination: IpAddr, device: u32) -> io::Result<IpAddr> {
    source_by(destination, Some(device))
}

fn source_by(destination: IpAddr, device: Option<u32>) -> io::Result<IpAddr> {
    let mut source = None;
    look_up(destination, device, |route| {
        source = source.or_else(|| preferred_source(route.get(HEADER..)?));
    })?;
    source.ok_or_else(|| io::Error::from(Errno::ENOENT))
}

/// Returns whether packets to `destination` are delivered to this host, in the calling thread's network namespace: to
/// one of its addresses, to 127.0.0.0/8, or by a route of type `local` (ip-route(8)). The unspecified address means
/// loopback, as in connect(2). False if there is no route.
///
/// # Errors
///
/// The netlink socket cannot be opened.
pub fn is_local(destination: IpAddr) -> io::Result<bool> {
    let destination = destination.to_canonical();
    if destination.is_unspecified() {
        return Ok(true);
    }
    let mut is_local = false;
    match look_up(destination, None, |route| {
        let is_own = || preferred_source(route.get(HEADER..)?).filter(|source| *source == destination);
        // A kernel worker adds the local route of a new IPv6 address a little later (`addrconf_dad_work`). Until then
        // the address is recognised because the route would use it as source.
        is_local |= route.get(TYPE) == Some(&libc::RTN_LOCAL) || is_own().is_some();
    }) {
        Ok(()) => Ok(is_local),
        Err(error) if is_no_route(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns whether `destination` is a broadcast address: 255.255.255.255, or of a network of a device (ip-route(8), type
/// `broadcast`). connect(2) and sendto(2) refuse it without SO_BROADCAST (EACCES).
///
/// # Errors
///
/// The netlink socket cannot be opened.
pub fn is_broadcast(destination: IpAddr) -> io::Result<bool> {
    let IpAddr::V4(v4) = destination.to_canonical() else { return Ok(false) };
    match kind(v4.into()) {
        Ok(kind) => Ok(kind == libc::RTN_BROADCAST),
        Err(error) if is_no_route(&error) => Ok(v4.is_broadcast()),
        Err(error) => Err(error),
    }
}

/// Returns the type of the route to `destination` (RTN_UNICAST, RTN_LOCAL, RTN_BROADCAST), for packets of no particular source, mark or user.
///
/// # Errors
///
/// What connect(2) fails with, too: ENETUNREACH without a route; EACCES, EHOSTUNREACH and EINVAL if its type is `prohibit`, `unreachable` or
/// `blackhole` (ip-route(8)). Or the netlink socket cannot be opened.
pub fn kind(destination: IpAddr) -> io::Result<u8> {
    let mut kind = None;
    look_up(destination, None, |route| kind = kind.or_else(|| route.get(TYPE).copied()))?;
    kind.ok_or_else(|| io::Error::from(Errno::ENOENT))
}

/// Returns the name that ip-route(8) has for a type: `unicast`, `local`, `broadcast`; `other` for further ones.
pub fn name(kind: u8) -> &'static str {
    match kind {
        libc::RTN_UNICAST => "unicast",
        libc::RTN_LOCAL => "local",
        libc::RTN_BROADCAST => "broadcast",
        _ => "other",
    }
}

/// Returns whether the table `local` has a route to `address`.
pub(crate) fn has_local_route(address: IpAddr) -> io::Result<bool> {
    match kind(address) {
        Ok(kind) => Ok(kind == libc::RTN_LOCAL),
        Err(error) if is_no_route(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns whether a route lookup failed because there is no route; EAFNOSUPPORT and EOPNOTSUPP: a kernel without IPv6.
fn is_no_route(error: &io::Error) -> bool {
    matches!(
        Errno::of(error),
        Some(
            Errno::ENETUNREACH
                | Errno::EHOSTUNREACH
                | Errno::EACCES
                | Errno::EINVAL
                | Errno::EAFNOSUPPORT
                | Errno::EOPNOTSUPP
                | Errno::ENETDOWN
        )
    )
}

/// Adds the rule `prohibit` for packets from `source` (ip-rule(8)) in the calling thread's network namespace: connect()
/// from there to another host fails with EACCES. The table `local`, which the kernel looks up first, still routes to
/// this host.
pub fn prohibit_from(source: IpAddr) -> io::Result<()> {
    const RTM_NEWRULE: u16 = 32;
    const FRA_SRC: u16 = 2;
    const FR_ACT_PROHIBIT: u8 = 8;
    let (family, octets) = device::octets(source);
    // Layout of struct fib_rule_hdr: family, lengths of both prefixes, traffic class, table, two reserved bytes,
    // action; flags.
    let mut body = vec![family, 0, (octets.len() * 8) as u8, 0, 0, 0, 0, FR_ACT_PROHIBIT, 0, 0, 0, 0];
    netlink::put_attribute(&mut body, FRA_SRC, &octets);
    netlink::change(libc::NETLINK_ROUTE, RTM_NEWRULE, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &body)
}

fn look_up(destination: IpAddr, device: Option<u32>, route: impl FnMut(&[u8])) -> io::Result<()> {
    let (family, octets) = device::octets(destination);
    // The family and the length of the destination prefix; a lookup reads no other field.
    let mut body = vec![0; HEADER];
    body[..2].copy_from_slice(&[family, (octets.len() * 8) as u8]);
    netlink::put_attribute(&mut body, RTA_DST, &octets);
    if let Some(device) = device {
        netlink::put_attribute(&mut body, RTA_OIF, &device.to_ne_bytes());
    }
    netlink::ask(libc::NETLINK_ROUTE, RTM_GETROUTE, false, &body, route)
}

/// Returns RTA_PREFSRC among the attributes of a route.
pub(crate) fn preferred_source(attributes: &[u8]) -> Option<IpAddr> {
    let value = netlink::attribute(attributes, RTA_PREFSRC)?;
    match value.len() {
        4 => value.first_chunk::<4>().map(|octets| IpAddr::from(*octets)),
        16 => value.first_chunk::<16>().map(|octets| IpAddr::from(*octets)),
        _ => None,
    }
}

/// Notifications about changed addresses, routes, rules and links of a network namespace (rtnetlink(7)).
#[derive(Debug)]
pub struct Changes(OwnedFd);

/// Multicast groups of rtnetlink: links, and addresses, routes and rules of IPv4 and IPv6.
const GROUPS: [i32; 7] = [1, 5, 7, 8, 9, 11, 19];
const NETLINK_ADD_MEMBERSHIP: libc::c_int = 1;

impl Changes {
    /// Watches the calling thread's network namespace.
    ///
    /// # Errors
    ///
    /// No socket for netlink.
    pub fn watch() -> io::Result<Changes> {
        let socket = netlink::open(libc::NETLINK_ROUTE, libc::SOCK_NONBLOCK)?;
        // SAFETY: sockaddr_nl is plain data for which all zeroes is a valid value: the kernel chooses the port.
        let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
        let length = std::mem::size_of_val(&address) as libc::socklen_t;
        // A socket without a port gets no notifications.
        // SAFETY: pointer and length describe one initialised address that outlives the call.
        check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
        for group in GROUPS {
            option::set_int(socket.as_fd(), libc::SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, group)?;
        }
        Ok(Changes(socket))
    }

    /// Returns whether anything has changed since the previous call. Lost notifications count as a change.
    pub fn pending(&self) -> bool {
        let mut buffer = vec![0; 64 << 10];
        let mut changed = false;
        loop {
            match netlink::uninterrupted(|| socket::receive(self.0.as_fd(), &mut buffer)) {
                Ok(_) => changed = true,
                Err(error) if Errno::of(&error) == Some(Errno::ENOBUFS) => changed = true,
                Err(_) => return changed,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_that_cannot_be_asked_is_no_missing_route() {
        // A filter holds for a thread of its own.
        std::thread::spawn(|| {
            let loopback = IpAddr::from([127, 0, 0, 1]);
            assert_eq!(find_source(loopback).unwrap(), Some(loopback));
            crate::seccomp::refuse_calls(&[libc::SYS_socket], &[], libc::EMFILE).unwrap();
            assert_eq!(find_source(loopback).unwrap_err().raw_os_error(), Some(libc::EMFILE));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn local_addresses_are_recognised() {
        let is_local = |text: &str| is_local(text.parse().unwrap()).unwrap();
        for text in ["127.0.0.1", "127.9.9.9", "0.0.0.0", "::", "::ffff:127.0.0.1"] {
            assert!(is_local(text), "{text}");
        }
        for text in ["192.0.2.200", "2001:db8::1", "::ffff:192.0.2.200"] {
            assert!(!is_local(text), "{text}");
        }
    }

    #[test]
    fn loopback_is_reached_from_itself() {
        for text in ["127.0.0.1", "::1"] {
            let address: IpAddr = text.parse().unwrap();
            match source_for(address) {
                Ok(source) => assert_eq!(source, address),
                // The host has no IPv6.
                Err(error) => assert!(address.is_ipv6(), "{error}"),
            }
        }
    }

    #[test]
    fn a_new_address_is_a_change() {
        // A namespace of its own keeps the address off this host.
        let in_own = || match crate::netns::enter_new() {
            Err(_) => None,
            Ok(()) => {
                let changes = Changes::watch().unwrap();
                let before = changes.pending();
                crate::device::add_address("lo", "192.0.2.1".parse().unwrap(), 32).unwrap();
                Some((before, changes.pending(), changes.pending()))
            }
        };
        let seen = std::thread::spawn(in_own).join().unwrap();
        assert!(seen.is_none_or(|seen| seen == (false, true, false)), "{seen:?}");
    }
}
