use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use ipnet::IpNet;

/// The addresses that connections may come from.
///
/// One address, several, or all hosts of a network such as `127.0.0.0/28` (of an IPv4 network its first and last address
/// are left out, since they are not hosts). Text is read as a comma-separated list of both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourcePool {
    /// Empty: the kernel's choice by route.
    addresses: Vec<IpAddr>,
}

/// Most addresses that a pool takes: a dialer keeps 8 KiB of book per address.
pub const MOST_SOURCES: usize = 4096;

/// Why something is not a pool of source addresses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// Not an address, not a network.
    #[error("{0:?} is not a source: expected an address such as 10.0.0.7, or a network such as 127.0.0.0/28")]
    Malformed(String),
    /// More than [`MOST_SOURCES`].
    #[error("{0} holds more than {MOST_SOURCES} source addresses; take a smaller network")]
    TooMany(String),
    /// IPv4 and IPv6 in one pool.
    #[error("a pool of sources is either IPv4 or IPv6, and {0} is of the other family")]
    Mixed(IpAddr),
    /// A network without hosts, or an empty list.
    #[error("{0:?} holds no source address")]
    Empty(String),
}

impl SourcePool {
    /// Leaves the source to the kernel, which takes the one that the route names.
    pub fn any() -> Self {
        SourcePool::default()
    }

    /// Just `address`.
    pub fn one(address: IpAddr) -> Self {
        SourcePool { addresses: vec![address] }
    }

    /// All of `addresses`, of one family; repetitions count once.
    pub fn several(addresses: impl IntoIterator<Item = IpAddr>) -> Result<Self, SourceError> {
        let mut pool = SourcePool::default();
        for address in addresses {
            pool.add(address)?;
        }
        if pool.addresses.is_empty() { Err(SourceError::Empty(String::new())) } else { Ok(pool) }
    }

    /// All hosts of `network`.
    pub fn network(network: IpNet) -> Result<Self, SourceError> {
        let mut pool = SourcePool::default();
        pool.add_network(network)?;
        Ok(pool)
    }

    /// The addresses; empty when the kernel chooses.
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// The first address whose family is not that of `destination`.
    pub(crate) fn foreign_family(&self, destination: SocketAddr) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv4() != destination.is_ipv4())
    }

    fn add(&mut self, address: IpAddr) -> Result<(), SourceError> {
        match self.addresses.first() {
            Some(first) if first.is_ipv4() != address.is_ipv4() => return Err(SourceError::Mixed(address)),
            _ => {}
        }
        if !self.addresses.contains(&address) {
            if self.addresses.len() == MOST_SOURCES {
                return Err(SourceError::TooMany("the list".to_owned()));
            }
            self.addresses.push(address);
        }
        Ok(())
    }

    fn add_network(&mut self, network: IpNet) -> Result<(), SourceError> {
        let host_bits = network.max_prefix_len() - network.prefix_len();
        if host_bits > MOST_SOURCES.ilog2() as u8 {
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
        assert_eq!(count("127.0.0.0/20"), Ok(4094));
    }

    #[test]
    fn what_is_no_pool_is_refused() {
        let error = |text: &str| text.parse::<SourcePool>().unwrap_err();
        assert_eq!(error("eth0"), SourceError::Malformed("eth0".into()));
        assert_eq!(error(""), SourceError::Malformed("".into()));
        assert_eq!(error("10.0.0.0/8"), SourceError::TooMany("10.0.0.0/8".into()));
        assert_eq!(error("10.0.0.1,::1"), SourceError::Mixed("::1".parse().unwrap()));
        assert_eq!(SourcePool::several([]), Err(SourceError::Empty(String::new())));
    }
}
