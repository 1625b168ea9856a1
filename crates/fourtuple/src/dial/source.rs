use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::str::FromStr;

use ipnet::IpNet;

/// A pool of source addresses.
///
/// A pool consists of one or more addresses, or of all hosts of a network such as `127.0.0.0/28`. The first and the last address
/// of an IPv4 network are not hosts. An IPv4-mapped IPv6 address is an IPv4 address here. `FromStr` reads a comma-separated list of
/// addresses and networks.
///
/// ```
/// use fourtuple::dial::SourcePool;
///
/// let pool: SourcePool = "127.0.0.0/30, 127.0.0.9".parse()?;
/// assert_eq!(pool, SourcePool::several([[127, 0, 0, 1], [127, 0, 0, 2], [127, 0, 0, 9]])?);
/// assert_eq!(SourcePool::one([127, 0, 0, 1].into()).addresses(), ["127.0.0.1".parse::<std::net::IpAddr>().unwrap()]);
/// assert!(SourcePool::any().addresses().is_empty());
/// # Ok::<(), fourtuple::dial::SourceError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourcePool {
    /// Empty: the kernel chooses the source address by route.
    addresses: Vec<IpAddr>,
}

/// Returns the address to bind for dials to `destination`. The scope of a link-local source is the scope of the destination; without
/// a scope or a device bind() fails with EINVAL (`__inet6_bind`).
pub(super) fn local(source: IpAddr, port: u16, destination: SocketAddr) -> SocketAddr {
    match (source, destination) {
        (IpAddr::V6(ip), SocketAddr::V6(to)) if ip.is_unicast_link_local() => {
            SocketAddrV6::new(ip, port, 0, to.scope_id()).into()
        }
        _ => SocketAddr::new(source, port),
    }
}

/// Maximum number of addresses in a pool: a dialer keeps a ledger page of 8 KiB for each.
///
/// Example: [`SourceError`].
pub const MAX_SOURCES: usize = 4096;

/// An invalid pool of source addresses.
///
/// ```
/// use fourtuple::dial::{MAX_SOURCES, SourceError, SourcePool};
///
/// assert_eq!(SourcePool::network([10, 0, 0, 0], 20)?.addresses().len(), MAX_SOURCES - 2);
/// let error = "10.0.0.0/19".parse::<SourcePool>().unwrap_err();
/// assert_eq!(error, SourceError::TooMany("10.0.0.0/19".to_owned()));
/// # Ok::<(), SourceError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// The text is neither an address nor a network.
    #[error("{0:?} is not a source: expected an address such as 10.0.0.7, or a network such as 127.0.0.0/28")]
    Malformed(String),
    /// The pool has more than [`MAX_SOURCES`] addresses.
    #[error("{0} holds more than {MAX_SOURCES} source addresses; take a smaller network")]
    TooMany(String),
    /// The pool mixes IPv4 and IPv6.
    #[error("a pool of sources is either IPv4 or IPv6, and {0} is of the other family")]
    Mixed(IpAddr),
    /// The network has no hosts, or the list is empty.
    #[error("{0:?} holds no source address")]
    Empty(String),
}

impl SourcePool {
    /// Returns a pool that leaves the choice to the kernel, which takes the source address of the route.
    pub fn any() -> Self {
        SourcePool::default()
    }

    /// Returns a pool of one address.
    pub fn one(address: IpAddr) -> Self {
        SourcePool { addresses: vec![address.to_canonical()] }
    }

    /// Returns a pool of several addresses of one family. Duplicates are ignored.
    ///
    /// # Errors
    ///
    /// [`SourceError::Mixed`], [`SourceError::TooMany`]; [`SourceError::Empty`] without an address.
    pub fn several<A: Into<IpAddr>>(addresses: impl IntoIterator<Item = A>) -> Result<Self, SourceError> {
        let mut pool = SourcePool::default();
        for address in addresses {
            pool.add(address.into())?;
        }
        if pool.addresses.is_empty() { Err(SourceError::Empty(String::new())) } else { Ok(pool) }
    }

    /// Returns a pool of all hosts of the network of `address` with a prefix of `length` bits.
    ///
    /// # Errors
    ///
    /// [`SourceError::Malformed`] if an address has fewer bits than `length`; [`SourceError::TooMany`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use fourtuple::dial::SourcePool;
    /// let pool = SourcePool::network([127, 0, 0, 0], 28)?;
    /// assert_eq!(pool.addresses().len(), 14);
    /// # Ok::<(), fourtuple::dial::SourceError>(())
    /// ```
    pub fn network(address: impl Into<IpAddr>, length: u8) -> Result<Self, SourceError> {
        let address = address.into();
        let malformed = |_| SourceError::Malformed(format!("{address}/{length}"));
        let mut pool = SourcePool::default();
        pool.add_network(IpNet::new(address, length).map_err(malformed)?)?;
        Ok(pool)
    }

    /// Returns the addresses; empty if the kernel chooses.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// Returns the first address whose family differs from the family of `destination`.
    pub(crate) fn foreign_family(&self, destination: SocketAddr) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv4() != destination.is_ipv4())
    }

    fn add(&mut self, address: IpAddr) -> Result<(), SourceError> {
        let address = address.to_canonical();
        match self.addresses.first() {
            Some(first) if first.is_ipv4() != address.is_ipv4() => return Err(SourceError::Mixed(address)),
            _ => {}
        }
        if !self.addresses.contains(&address) {
            if self.addresses.len() == MAX_SOURCES {
                return Err(SourceError::TooMany("the list".to_owned()));
            }
            self.addresses.push(address);
        }
        Ok(())
    }

    fn add_network(&mut self, network: IpNet) -> Result<(), SourceError> {
        let host_bits = network.max_prefix_len() - network.prefix_len();
        if host_bits > MAX_SOURCES.ilog2() as u8 {
            return Err(SourceError::TooMany(network.to_string()));
        }
        network.hosts().try_for_each(|address| self.add(address))
    }
}

impl FromStr for SourcePool {
    type Err = SourceError;

    fn from_str(text: &str) -> Result<Self, SourceError> {
        let mut pool = SourcePool::default();
        for part in text.split(',').map(str::trim) {
            if let Ok(address) = part.parse() {
                pool.add(address)?;
            } else if let Ok(network) = part.parse() {
                pool.add_network(network)?;
            } else {
                return Err(SourceError::Malformed(part.to_owned()));
            }
        }
        if pool.addresses.is_empty() { Err(SourceError::Empty(text.to_owned())) } else { Ok(pool) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_and_lists_are_read() {
        let count = |text: &str| text.parse::<SourcePool>().map(|pool| pool.addresses().len());
        assert_eq!(count("127.0.0.1"), Ok(1));
        assert_eq!(count("127.0.0.0/28"), Ok(14));
        assert_eq!(count("127.0.0.0/30, 127.0.0.2,10.0.0.1"), Ok(3));
        assert_eq!(count("10.0.0.4/32"), Ok(1));
        assert_eq!(count("fd00::/124"), Ok(16));
        assert_eq!(count("::ffff:127.0.0.1, 127.0.0.1, 127.0.0.2"), Ok(2));
        assert_eq!(count("127.0.0.0/20"), Ok(4094));
    }

    #[test]
    fn invalid_pools_are_refused() {
        let error = |text: &str| text.parse::<SourcePool>().unwrap_err();
        assert_eq!(error("eth0"), SourceError::Malformed("eth0".into()));
        assert_eq!(error(""), SourceError::Malformed("".into()));
        assert_eq!(error("10.0.0.0/8"), SourceError::TooMany("10.0.0.0/8".into()));
        assert_eq!(error("10.0.0.1,::1"), SourceError::Mixed("::1".parse().unwrap()));
        assert_eq!(SourcePool::several::<IpAddr>([]), Err(SourceError::Empty(String::new())));
    }
}
