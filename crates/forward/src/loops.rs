//! Links that would forward to themselves.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};

use fourtuple_syscalls::route;

use crate::error::ForwardError;

/// Refuses links of which one is its own next hop, on its own or by way of others: packets would go round for ever, and every one
/// that came would stay. `listens` says where each of them really listens, `hops` where its packets may go.
///
/// What the kernel takes for an address of this host counts, not what looks like one: 0.0.0.0 hears 127.0.0.9 and every address
/// of every device, and `[::]` the same over IPv4 too.
pub(crate) fn refuse(listens: &[SocketAddr], hops: &[Vec<SocketAddr>]) -> Result<(), ForwardError> {
    refuse_where(listens, hops, &mut route::is_local)
}

fn refuse_where(
    listens: &[SocketAddr],
    hops: &[Vec<SocketAddr>],
    is_local: &mut impl FnMut(IpAddr) -> io::Result<bool>,
) -> Result<(), ForwardError> {
    // To which links each of them sends, and as what.
    let mut next: Vec<Vec<(usize, SocketAddr)>> = Vec::new();
    for hops in hops {
        let mut reached = Vec::new();
        let mut seen = HashSet::new();
        for hop in hops.iter().filter(|hop| seen.insert(**hop)) {
            for (number, listen) in listens.iter().enumerate() {
                let hears = hears(*listen, *hop, is_local);
                if hears.map_err(|source| ForwardError::Call { call: "ask for a route", source })? {
                    reached.push((number, *hop));
                }
            }
        }
        next.push(reached);
    }
    for start in 0..next.len() {
        if let Some((round, to)) = round(start, &next) {
            let listen = listens[start];
            return Err(match round.len() {
                1 => ForwardError::Loop { listen, to },
                _ => ForwardError::Round { listens: round.into_iter().map(|link| listens[link]).collect() },
            });
        }
    }
    Ok(())
}

/// Whether what is sent to `hop` comes to who listens at `listen`.
fn hears(
    listen: SocketAddr,
    hop: SocketAddr,
    is_local: &mut impl FnMut(IpAddr) -> io::Result<bool>,
) -> io::Result<bool> {
    let (here, there) = (listen.ip().to_canonical(), hop.ip().to_canonical());
    if listen.port() != hop.port() {
        return Ok(false);
    }
    // [::] hears both families, unless bindv6only says no; which is not worth a loop.
    if here.is_unspecified() {
        return Ok((here.is_ipv6() || there.is_ipv4()) && is_local(there)?);
    }
    // connect(2) makes the first address of loopback of none.
    Ok(here == there || there.is_unspecified() && is_first(here) && here.is_ipv4() == there.is_ipv4())
}

fn is_first(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address == std::net::Ipv4Addr::LOCALHOST,
        IpAddr::V6(address) => address == std::net::Ipv6Addr::LOCALHOST,
    }
}

/// The links on the shortest way from `start` back to it, and the hop by which the last one gets there.
fn round(start: usize, next: &[Vec<(usize, SocketAddr)>]) -> Option<(Vec<usize>, SocketAddr)> {
    let mut ways = vec![vec![start]];
    let mut seen = vec![false; next.len()];
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            let last = way.last().copied()?;
            for (to, hop) in &next[last] {
                if *to == start {
                    return Some((way, *hop));
                }
                if !std::mem::replace(&mut seen[*to], true) {
                    longer.push([&way[..], &[*to]].concat());
                }
            }
        }
        ways = longer;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// Links of `listen > hop hop`, on a host that has 192.0.2.1, 2001:db8::1 and loopback.
    fn links(texts: &[&str]) -> Result<(), ForwardError> {
        let (listens, hops): (Vec<_>, Vec<Vec<_>>) = texts
            .iter()
            .map(|text| text.split_once(" > ").unwrap())
            .map(|(listen, hops)| (address(listen), hops.split(' ').map(address).collect()))
            .unzip();
        let own: [IpAddr; 2] = ["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()];
        refuse_where(&listens, &hops, &mut |ip| {
            Ok(ip.is_loopback() || ip.is_unspecified() || own.contains(&ip))
        })
    }

    #[test]
    fn a_link_is_not_its_own_next_hop() {
        for link in [
            "127.0.0.1:1 > 127.0.0.1:1",
            "0.0.0.0:1 > 127.3.2.1:1",
            "0.0.0.0:1 > 192.0.2.1:1",
            "0.0.0.0:1 > 0.0.0.0:1",
            "0.0.0.0:1 > [::ffff:192.0.2.1]:1",
            "[::]:1 > [::1]:1",
            "[::]:1 > [2001:db8::1]:1",
            "[::]:1 > 192.0.2.1:1",
            "[::]:1 > 0.0.0.0:1",
            "[::ffff:127.0.0.1]:1 > 127.0.0.1:1",
            "127.0.0.1:1 > 0.0.0.0:1",
            "[::1]:1 > [::]:1",
            "192.0.2.1:1 > 192.0.2.9:1 192.0.2.1:1",
        ] {
            assert!(matches!(links(&[link]), Err(ForwardError::Loop { .. })), "{link}");
        }
        for link in [
            "0.0.0.0:1 > 192.0.2.2:1",
            "0.0.0.0:1 > 192.0.2.1:2",
            "0.0.0.0:1 > [2001:db8::1]:1",
            "127.0.0.1:1 > 127.0.0.2:1",
            "127.0.0.2:1 > 0.0.0.0:1",
            "[::1]:1 > 127.0.0.1:1",
            "[::1]:1 > 0.0.0.0:1",
        ] {
            assert!(links(&[link]).is_ok(), "{link}");
        }
    }

    #[test]
    fn links_may_follow_each_other_but_not_round() {
        let chain = ["127.0.0.1:1 > 127.0.0.1:2", "127.0.0.1:2 > 127.0.0.1:3", "0.0.0.0:3 > 192.0.2.2:1"];
        assert!(links(&chain).is_ok());
        let error = links(&[chain[0], chain[1], "0.0.0.0:3 > 192.0.2.2:1 127.0.0.1:1"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "packets would go round: 127.0.0.1:1, 127.0.0.1:2, 0.0.0.0:3, and 127.0.0.1:1 again"
        );
        // Found as well where the first link is only on the way there.
        let error = links(&["127.0.0.1:9 > 127.0.0.1:1", chain[0], "127.0.0.1:2 > 127.0.0.1:1"]).unwrap_err();
        assert!(error.to_string().ends_with("127.0.0.1:1, 127.0.0.1:2, and 127.0.0.1:1 again"), "{error}");
    }

    #[test]
    fn who_cannot_ask_is_told() {
        let mut fails = |_| Err(io::Error::from_raw_os_error(24));
        let here = address("0.0.0.0:1");
        let result = refuse_where(&[here], &[vec![address("192.0.2.1:1")]], &mut fails);
        assert!(matches!(result, Err(ForwardError::Call { .. })));
    }
}
