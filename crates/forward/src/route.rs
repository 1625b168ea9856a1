//! Routes: the next hop of each packet.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fourtuple::spread::FlowKey;
use fourtuple_syscalls::route;

use crate::settings::ForwardError;

/// An address prefix such as `192.0.2.0/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefix {
    address: IpAddr,
    bits: u8,
}

impl Prefix {
    /// Returns the prefix of `bits` bits of `address`. Returns `None` when the address has fewer bits, or when later bits of it are set.
    pub fn new(address: IpAddr, bits: u8) -> Option<Prefix> {
        let width = if address.is_ipv4() { 32 } else { 128 };
        let prefix = Prefix { address, bits };
        (bits <= width && number(address) & !prefix.mask() == 0).then_some(prefix)
    }

    /// Returns the mask in the low bits, aligned with [`number`].
    fn mask(&self) -> u128 {
        let width = if self.address.is_ipv4() { 32 } else { 128 };
        let all = u128::MAX >> (128 - width);
        all & !all.checked_shr(u32::from(self.bits)).unwrap_or(0)
    }

    /// Returns whether the prefix contains the address.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.address.is_ipv4() == address.is_ipv4() && number(address) & self.mask() == number(self.address)
    }
}

/// Returns the address as an integer; an IPv4 address is in the low 32 bits.
fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(u32::from(address)),
        IpAddr::V6(address) => Ipv6Addr::to_bits(address),
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.address, self.bits)
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Prefix, String> {
        let expected = || {
            format!(
                "{text:?} is not a prefix: expected one such as 192.0.2.0/24 or 2001:db8::/32, no bits set beyond it"
            )
        };
        let (address, bits) = text.split_once('/').ok_or_else(expected)?;
        let (address, bits) =
            (address.parse().map_err(|_| expected())?, bits.parse().map_err(|_| expected())?);
        Prefix::new(address, bits).ok_or_else(expected)
    }
}

/// One route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// A next hop for packets with a destination in this prefix. The longest prefix wins.
    Destination(Prefix, SocketAddr),
    /// A next hop for packets with this inner key.
    Key(u32, SocketAddr),
}

/// An error in the rules of a route table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RoutesError {
    /// Some rules are by destination and some by key.
    #[error("routes are by destination prefix or by inner key, not both")]
    Mixed,
    /// The rules are by key, and the position of the key is not given.
    #[error("routes by inner key need to know where it is: flow:OFFSET:WIDTH")]
    NoKey,
    /// Two rules for the same prefix or key.
    #[error("two routes for {0}")]
    Twice(String),
}

/// A route table: rules by prefix or by key, and a default next hop.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    default: Option<SocketAddr>,
    /// Sorted, longest prefix first.
    prefixes: Vec<(Prefix, SocketAddr)>,
    key: Option<FlowKey>,
    keys: HashMap<u32, SocketAddr>,
}

impl Routes {
    /// Returns routes with only a default next hop.
    pub fn to(hop: SocketAddr) -> Routes {
        Routes { default: Some(hop), ..Routes::default() }
    }

    /// Returns routes with these rules. `default` is the next hop of packets that no rule matches, `key` the position of the inner key.
    ///
    /// # Errors
    ///
    /// [`RoutesError`]
    pub fn new(
        default: Option<SocketAddr>,
        rules: &[Rule],
        key: Option<FlowKey>,
    ) -> Result<Routes, RoutesError> {
        let mut routes = Routes { default, ..Routes::default() };
        for rule in rules {
            match *rule {
                Rule::Destination(prefix, hop) => {
                    if routes.prefixes.iter().any(|(other, _)| *other == prefix) {
                        return Err(RoutesError::Twice(prefix.to_string()));
                    }
                    routes.prefixes.push((prefix, hop));
                }
                Rule::Key(value, hop) => {
                    if routes.keys.insert(value, hop).is_some() {
                        return Err(RoutesError::Twice(value.to_string()));
                    }
                }
            }
        }
        if !routes.prefixes.is_empty() && !routes.keys.is_empty() {
            return Err(RoutesError::Mixed);
        }
        if !routes.keys.is_empty() {
            routes.key = Some(key.ok_or(RoutesError::NoKey)?);
        }
        routes.prefixes.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.bits));
        Ok(routes)
    }

    /// Returns whether the routes depend on the payload.
    pub fn are_by_key(&self) -> bool {
        self.key.is_some()
    }

    /// Returns whether the routes depend on the destination address.
    pub fn are_by_destination(&self) -> bool {
        !self.prefixes.is_empty()
    }

    pub fn hops(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        let prefixes = self.prefixes.iter().map(|(_, hop)| *hop);
        self.default.into_iter().chain(prefixes).chain(self.keys.values().copied())
    }

    /// Returns the next hop of packets that no rule matches.
    pub fn default_hop(&self) -> Option<SocketAddr> {
        self.default
    }

    /// Returns the next hop of a packet. `arrived_at` is its destination address, if known.
    pub fn find(&self, payload: &[u8], arrived_at: Option<IpAddr>) -> Option<SocketAddr> {
        if let Some(key) = &self.key {
            let hop = key.of(payload).and_then(|value| self.keys.get(&value));
            return hop.copied().or(self.default);
        }
        let hop = arrived_at
            .and_then(|address| self.prefixes.iter().find(|(prefix, _)| prefix.contains(address)))
            .map(|(_, hop)| *hop);
        hop.or(self.default)
    }
}

/// The routes of a link, and the addresses of the forwarder, which no client may have.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    pub(crate) routes: Routes,
    pub(crate) endpoints: Endpoints,
}

/// A table that is replaced while planes use it. Each plane owns a copy ([`View`]). For each packet a plane reads the version, which
/// changes only at a replacement, and locks the table only after a change.
#[derive(Debug)]
pub(crate) struct Shared {
    version: AtomicU64,
    table: Mutex<Table>,
}

/// The copy of the table that one plane owns.
#[derive(Debug)]
pub(crate) struct View {
    shared: Arc<Shared>,
    version: u64,
    table: Table,
}

impl Shared {
    pub(crate) fn new(routes: Routes) -> Shared {
        let table = Table { routes, ..Table::default() };
        Shared { version: AtomicU64::new(0), table: Mutex::new(table) }
    }

    /// Returns a copy of the current table.
    pub(crate) fn current(&self) -> Table {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn exchange(&self, table: Table) {
        *self.table.lock().unwrap_or_else(PoisonError::into_inner) = table;
        self.version.fetch_add(1, Ordering::Release);
    }
}

impl View {
    pub(crate) fn new(shared: Arc<Shared>) -> View {
        let version = shared.version.load(Ordering::Acquire);
        let table = shared.current();
        View { shared, version, table }
    }

    /// Replaces the copy if the table has changed.
    pub(crate) fn refresh(&mut self) {
        let version = self.shared.version.load(Ordering::Acquire);
        if version != self.version {
            self.version = version;
            self.table = self.shared.current();
        }
    }

    /// Returns the version of the copy.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the routes as of the last [`View::refresh`].
    pub(crate) fn routes(&self) -> &Routes {
        &self.table.routes
    }

    /// Returns the addresses of the forwarder as of the last [`View::refresh`].
    pub(crate) fn endpoints(&self) -> &Endpoints {
        &self.table.endpoints
    }
}

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

    fn hop(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    fn prefix(text: &str) -> Prefix {
        text.parse().unwrap()
    }

    #[test]
    fn the_longest_prefix_counts() {
        let rules = [
            Rule::Destination(prefix("10.0.0.0/8"), hop(1)),
            Rule::Destination(prefix("10.1.0.0/16"), hop(2)),
            Rule::Destination(prefix("2001:db8::/32"), hop(3)),
            Rule::Destination(prefix("0.0.0.0/0"), hop(4)),
        ];
        let routes = Routes::new(None, &rules, None).unwrap();
        let find = |address: &str| routes.find(b"", Some(address.parse().unwrap()));
        assert_eq!(find("10.2.0.1"), Some(hop(1)));
        assert_eq!(find("10.1.0.1"), Some(hop(2)));
        assert_eq!(find("2001:db8:1::1"), Some(hop(3)));
        assert_eq!(find("192.0.2.1"), Some(hop(4)));
        assert_eq!(find("2001:db9::1"), None);
        assert_eq!(routes.find(b"", None), None);
    }

    #[test]
    fn an_inner_key_has_its_hop_and_the_rest_the_default() {
        let rules = [Rule::Key(7, hop(1)), Rule::Key(8, hop(2))];
        let routes = Routes::new(Some(hop(9)), &rules, Some(FlowKey::whole(1, 1))).unwrap();
        assert_eq!(routes.find(&[0, 7], None), Some(hop(1)));
        assert_eq!(routes.find(&[7, 8, 7], None), Some(hop(2)));
        assert_eq!(routes.find(&[7, 9], None), Some(hop(9)));
        assert_eq!(routes.find(&[7], None), Some(hop(9)));
    }

    #[test]
    fn an_invalid_table_is_refused() {
        let by_prefix = Rule::Destination(prefix("10.0.0.0/8"), hop(1));
        let mixed = [by_prefix, Rule::Key(1, hop(1))];
        assert_eq!(Routes::new(None, &mixed, Some(FlowKey::whole(0, 1))), Err(RoutesError::Mixed));
        assert_eq!(Routes::new(None, &[Rule::Key(1, hop(1))], None), Err(RoutesError::NoKey));
        let twice = Routes::new(None, &[by_prefix, by_prefix], None);
        assert_eq!(twice, Err(RoutesError::Twice("10.0.0.0/8".to_owned())));
        for text in ["10.0.0.0", "10.0.0.0/33", "10.0.0.1/8", "x/8", "::1/64"] {
            assert!(text.parse::<Prefix>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_view_sees_the_replaced_table() {
        let shared = Arc::new(Shared::new(Routes::to(hop(1))));
        let mut view = View::new(Arc::clone(&shared));
        assert_eq!(view.routes().find(b"", None), Some(hop(1)));
        shared.exchange(Table { routes: Routes::to(hop(2)), ..Table::default() });
        view.refresh();
        assert_eq!(view.routes().find(b"", None), Some(hop(2)));
    }

    #[test]
    fn planes_share_no_memory_with_their_routes() {
        let shared = Arc::new(Shared::new(Routes::to(hop(1))));
        let mut views = [View::new(Arc::clone(&shared)), View::new(Arc::clone(&shared))];
        let table = |view: &View| std::ptr::from_ref(view.routes());
        assert_ne!(table(&views[0]), table(&views[1]));
        shared.exchange(Table { routes: Routes::to(hop(2)), ..Table::default() });
        views.iter_mut().for_each(View::refresh);
        assert_ne!(table(&views[0]), table(&views[1]));
        // Two views and this test: a packet takes no reference to what the planes share.
        assert_eq!(Arc::strong_count(&shared), 3);
    }

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
