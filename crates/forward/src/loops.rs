//! The check for links that forward to themselves.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use fourtuple_syscalls::route;

use crate::error::ForwardError;

/// Refuses a link that is its own next hop, directly or through other links: each packet would circulate for ever. `listens` are the
/// bound addresses of the links, `hops` the next hops of each.
///
/// The kernel decides which addresses are local: 0.0.0.0 receives packets for 127.0.0.9 and for every address of every device, and
/// `[::]` receives the same packets over IPv4.
pub(crate) fn refuse(listens: &[SocketAddr], hops: &[Vec<SocketAddr>]) -> Result<(), ForwardError> {
    refuse_where(listens, hops, &mut route::is_local)
}

fn refuse_where(
    listens: &[SocketAddr],
    hops: &[Vec<SocketAddr>],
    is_local: &mut impl FnMut(IpAddr) -> io::Result<bool>,
) -> Result<(), ForwardError> {
    // For each link, the links that it sends to and the next hop that leads there.
    let mut next: Vec<Vec<(usize, SocketAddr)>> = Vec::new();
    for hops in hops {
        let mut reached = Vec::new();
        let mut seen = HashSet::new();
        for hop in hops.iter().filter(|hop| seen.insert(**hop)) {
            for (number, listen) in listens.iter().enumerate() {
                let reaches = reaches(*listen, *hop, is_local);
                if reaches.map_err(|source| ForwardError::Call { call: "ask for a route", source })? {
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

/// The addresses of a forwarder: its listening addresses and its next hops. A reply to a packet with one of them as source
/// would return to the forwarder without end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Endpoints {
    listens: Vec<SocketAddr>,
    hops: HashSet<(IpAddr, u16)>,
}

impl Endpoints {
    pub(crate) fn new(listens: &[SocketAddr], hops: &[Vec<SocketAddr>]) -> Endpoints {
        let hops = hops.iter().flatten().map(|hop| {
            // connect(2) maps the wildcard address to the first loopback address.
            let ip = match hop.ip().to_canonical() {
                IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
                ip => ip,
            };
            (ip, hop.port())
        });
        Endpoints { listens: listens.to_vec(), hops: hops.collect() }
    }

    /// Returns whether packets from this source get no reply. For a wildcard listener, the kernel decides whether a source with
    /// the link's port is local; if the kernel gives no answer, the source counts as local.
    pub(crate) fn include(&self, source: SocketAddr) -> bool {
        self.includes_where(source, &mut route::is_local)
    }

    fn includes_where(
        &self,
        source: SocketAddr,
        is_local: &mut impl FnMut(IpAddr) -> io::Result<bool>,
    ) -> bool {
        self.hops.contains(&(source.ip().to_canonical(), source.port()))
            || self.listens.iter().any(|listen| reaches(*listen, source, is_local).unwrap_or(true))
    }
}

/// Returns whether packets to `hop` reach a socket that listens at `listen`.
fn reaches(
    listen: SocketAddr,
    hop: SocketAddr,
    is_local: &mut impl FnMut(IpAddr) -> io::Result<bool>,
) -> io::Result<bool> {
    let (here, there) = (listen.ip().to_canonical(), hop.ip().to_canonical());
    if listen.port() != hop.port() {
        return Ok(false);
    }
    // `[::]` receives both families unless `bindv6only` is set. The check assumes both, to exclude every loop.
    if here.is_unspecified() {
        return Ok((here.is_ipv6() || there.is_ipv4()) && is_local(there)?);
    }
    // connect(2) replaces the wildcard address by the first loopback address.
    Ok(here == there || there.is_unspecified() && is_first(here) && here.is_ipv4() == there.is_ipv4())
}

fn is_first(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address == Ipv4Addr::LOCALHOST,
        IpAddr::V6(address) => address == Ipv6Addr::LOCALHOST,
    }
}

/// Returns the links on the shortest path from `start` back to `start`, and the next hop that closes the circle.
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

    /// Checks links in the form `listen > hop hop`, on a host with 192.0.2.1, 2001:db8::1 and loopback.
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
    fn links_may_form_a_chain_but_no_circle() {
        let chain = ["127.0.0.1:1 > 127.0.0.1:2", "127.0.0.1:2 > 127.0.0.1:3", "0.0.0.0:3 > 192.0.2.2:1"];
        assert!(links(&chain).is_ok());
        let error = links(&[chain[0], chain[1], "0.0.0.0:3 > 192.0.2.2:1 127.0.0.1:1"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "packets would go round: 127.0.0.1:1, 127.0.0.1:2, 0.0.0.0:3, and 127.0.0.1:1 again"
        );
        // The check also finds a circle that the first link only leads to.
        let error = links(&["127.0.0.1:9 > 127.0.0.1:1", chain[0], "127.0.0.1:2 > 127.0.0.1:1"]).unwrap_err();
        assert!(error.to_string().ends_with("127.0.0.1:1, 127.0.0.1:2, and 127.0.0.1:1 again"), "{error}");
    }

    #[test]
    fn next_hops_and_listeners_are_endpoints() {
        let listens = [address("127.0.0.1:1"), address("0.0.0.0:2"), address("[::]:3")];
        let hops =
            [vec![address("192.0.2.9:7"), address("[::ffff:192.0.2.8]:7")], vec![address("0.0.0.0:8")]];
        let endpoints = Endpoints::new(&listens, &hops);
        let includes = |text: &str| {
            endpoints.includes_where(address(text), &mut |ip| Ok(ip.is_loopback() || ip == listens[0].ip()))
        };
        for source in [
            "192.0.2.9:7",
            "[::ffff:192.0.2.9]:7",
            "192.0.2.8:7",
            "127.0.0.1:8",
            "127.0.0.1:1",
            "[::ffff:127.0.0.1]:1",
            "127.9.9.9:2",
            "127.9.9.9:3",
            "[::1]:3",
        ] {
            assert!(includes(source), "{source}");
        }
        for source in ["192.0.2.9:8", "127.0.0.2:1", "192.0.2.9:2", "[::1]:2", "[2001:db8::1]:3"] {
            assert!(!includes(source), "{source}");
        }
        assert!(endpoints.includes_where(address("192.0.2.9:2"), &mut |_| Err(io::Error::other("no"))));
    }

    #[test]
    fn a_failed_route_lookup_is_an_error() {
        let mut fails = |_| Err(fourtuple_syscalls::Errno::EMFILE.into());
        let here = address("0.0.0.0:1");
        let result = refuse_where(&[here], &[vec![address("192.0.2.1:1")]], &mut fails);
        assert!(matches!(result, Err(ForwardError::Call { .. })));
    }
}
