//! Routes: the next hop of each packet.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fourtuple::spread::FlowKey;

use crate::loops::Endpoints;

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

    /// Returns all next hops.
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
}
