//! rtnetlink(7): which address the kernel would send from.

use std::io;
use std::net::IpAddr;

use crate::netlink;

const RTM_GETROUTE: u16 = 26;
const RTA_DST: u16 = 1;
const RTA_PREFSRC: u16 = 7;

/// The source address of the route to `destination`.
///
/// # Errors
///
/// ENETUNREACH: there is no route. ENOENT: the route names no source.
pub fn source_for(destination: IpAddr) -> io::Result<IpAddr> {
    let (family, octets) = match destination {
        IpAddr::V4(v4) => (libc::AF_INET, v4.octets().to_vec()),
        IpAddr::V6(v6) => (libc::AF_INET6, v6.octets().to_vec()),
    };
    // struct rtmsg: family, length of the destination prefix, and nothing else that a look-up reads.
    let mut body = vec![family as u8, (octets.len() * 8) as u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    body.extend_from_slice(&((4 + octets.len()) as u16).to_ne_bytes());
    body.extend_from_slice(&RTA_DST.to_ne_bytes());
    body.extend_from_slice(&octets);
    let mut source = None;
    netlink::ask(libc::NETLINK_ROUTE, RTM_GETROUTE, false, &body, |answer| {
        source = source.or_else(|| preferred_source(answer.get(12..)?));
    })?;
    source.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
}

/// The RTA_PREFSRC among the attributes of a route.
fn preferred_source(attributes: &[u8]) -> Option<IpAddr> {
    let value = netlink::attribute(attributes, RTA_PREFSRC)?;
    match value.len() {
        4 => value.first_chunk::<4>().map(|octets| IpAddr::from(*octets)),
        16 => value.first_chunk::<16>().map(|octets| IpAddr::from(*octets)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_reached_from_itself() {
        for text in ["127.0.0.1", "::1"] {
            let address: IpAddr = text.parse().unwrap();
            match source_for(address) {
                Ok(source) => assert_eq!(source, address),
                // A host without IPv6.
                Err(error) => assert!(address.is_ipv6(), "{error}"),
            }
        }
    }
}
