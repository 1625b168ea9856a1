//! Which next hop a packet goes to.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fourtuple::spread::Key;

/// Addresses that begin alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefix {
    address: IpAddr,
    bits: u8,
}

impl Prefix {
    /// The addresses whose first `bits` are those of `address`; `None` when an address has not so many, or when bits of it
    /// beyond them are set.
    pub fn new(address: IpAddr, bits: u8) -> Option<Prefix> {
        let width = if address.is_ipv4() { 32 } else { 128 };
        let prefix = Prefix { address, bits };
        (bits <= width && number(address) & !prefix.mask() == 0).then_some(prefix)
    }

    /// In the low bits, as [`number`] has an address.
    fn mask(&self) -> u128 {
        let width = if self.address.is_ipv4() { 32 } else { 128 };
        let all = u128::MAX >> (128 - width);
        all & !all.checked_shr(u32::from(self.bits)).unwrap_or(0)
    }

    /// Whether the address is one of them.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.address.is_ipv4() == address.is_ipv4() && number(address) & self.mask() == number(self.address)
    }
}

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
    /// For packets sent to one of these addresses; the longest prefix counts.
    Destination(Prefix, SocketAddr),
    /// For packets with this inner key.
    Key(u32, SocketAddr),
}

/// Why rules are no table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RoutesError {
    /// They are by address and by key.
    #[error("routes are by destination prefix or by inner key, not both")]
    Mixed,
    /// By key, and nobody said where the key is.
    #[error("routes by inner key need to know where it is: flow:OFFSET:WIDTH")]
    NoKey,
    /// Two for the same.
    #[error("two routes for {0}")]
    Twice(String),
}

/// Where packets go: the first that matches of prefixes or keys, else the default, else nowhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    default: Option<SocketAddr>,
    /// The longest first.
    prefixes: Vec<(Prefix, SocketAddr)>,
    key: Option<Key>,
    keys: HashMap<u32, SocketAddr>,
}

impl Routes {
    /// Everything goes there.
    pub fn to(hop: SocketAddr) -> Routes {
        Routes { default: Some(hop), ..Routes::default() }
    }

    /// A table of rules, and where the rest goes; `key` is where the inner key is.
    ///
    /// # Errors
    ///
    /// [`RoutesError`]
    pub fn new(default: Option<SocketAddr>, rules: &[Rule], key: Option<Key>) -> Result<Routes, RoutesError> {
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

    /// Whether a packet's route depends on its payload.
    pub fn are_by_key(&self) -> bool {
        self.key.is_some()
    }

    /// Whether it depends on the address that it was sent to.
    pub fn are_by_destination(&self) -> bool {
        !self.prefixes.is_empty()
    }

    /// All next hops that there are.
    pub fn hops(&self) -> impl Iterator<Item = SocketAddr> + '_ {
        let prefixes = self.prefixes.iter().map(|(_, hop)| *hop);
        self.default.into_iter().chain(prefixes).chain(self.keys.values().copied())
    }

    /// Where packets go that no rule is for.
    pub fn default_hop(&self) -> Option<SocketAddr> {
        self.default
    }

    /// Where this packet goes; `arrived_at` is the address that it was sent to, if known.
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

/// A table that is exchanged while planes read it: they look at a number, and at the table only when that has changed.
#[derive(Debug)]
pub(crate) struct Shared {
    version: AtomicU64,
    routes: Mutex<Arc<Routes>>,
}

/// A plane's view of it.
#[derive(Debug)]
pub(crate) struct View {
    shared: Arc<Shared>,
    version: u64,
    routes: Arc<Routes>,
}

impl Shared {
    pub(crate) fn new(routes: Routes) -> Shared {
        Shared { version: AtomicU64::new(0), routes: Mutex::new(Arc::new(routes)) }
    }

    /// The table as it is now, for who is not on the path of a packet.
    pub(crate) fn current(&self) -> Arc<Routes> {
        Arc::clone(&self.routes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn exchange(&self, routes: Routes) {
        *self.routes.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(routes);
        self.version.fetch_add(1, Ordering::Release);
    }
}

impl View {
    pub(crate) fn new(shared: Arc<Shared>) -> View {
        let version = shared.version.load(Ordering::Acquire);
        let routes = shared.current();
        View { shared, version, routes }
    }

    /// The table as it is now. Takes the lock only when it was exchanged.
    pub(crate) fn routes(&mut self) -> &Arc<Routes> {
        let version = self.shared.version.load(Ordering::Acquire);
        if version != self.version {
            self.version = version;
            self.routes = self.shared.current();
        }
        &self.routes
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
        let routes = Routes::new(Some(hop(9)), &rules, Some(Key::whole(1, 1))).unwrap();
        assert_eq!(routes.find(&[0, 7], None), Some(hop(1)));
        assert_eq!(routes.find(&[7, 8, 7], None), Some(hop(2)));
        assert_eq!(routes.find(&[7, 9], None), Some(hop(9)));
        assert_eq!(routes.find(&[7], None), Some(hop(9)));
    }

    #[test]
    fn what_is_no_table_is_refused() {
        let by_prefix = Rule::Destination(prefix("10.0.0.0/8"), hop(1));
        let mixed = [by_prefix, Rule::Key(1, hop(1))];
        assert_eq!(Routes::new(None, &mixed, Some(Key::whole(0, 1))), Err(RoutesError::Mixed));
        assert_eq!(Routes::new(None, &[Rule::Key(1, hop(1))], None), Err(RoutesError::NoKey));
        let twice = Routes::new(None, &[by_prefix, by_prefix], None);
        assert_eq!(twice, Err(RoutesError::Twice("10.0.0.0/8".to_owned())));
        for text in ["10.0.0.0", "10.0.0.0/33", "10.0.0.1/8", "x/8", "::1/64"] {
            assert!(text.parse::<Prefix>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_view_sees_the_exchange() {
        let shared = Arc::new(Shared::new(Routes::to(hop(1))));
        let mut view = View::new(Arc::clone(&shared));
        assert_eq!(view.routes().find(b"", None), Some(hop(1)));
        shared.exchange(Routes::to(hop(2)));
        assert_eq!(view.routes().find(b"", None), Some(hop(2)));
    }
}
