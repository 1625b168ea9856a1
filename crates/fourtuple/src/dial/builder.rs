use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fourtuple_syscalls::socket::{self, Transport};
use ipnet::IpNet;

use crate::capabilities::{self, LocalPortRange};
use crate::dial::dialer::Dialer;
use crate::dial::ledger::PortLedger;
use crate::dial::strategy::Strategy;
use crate::dial::{BuildError, Counter, SOCK_DIAG, Unseen};
use crate::ports::{PortRange, PortSet};

/// The strategy of a dialer, and how it was chosen.
///
/// ```
/// use fourtuple::dial::{Dialer, Strategy};
///
/// let builder = Dialer::builder("192.0.2.1:443".parse()?);
/// let auto = builder.clone().build()?.choice();
/// println!("{auto}"); // on Linux 6.8 and later: full-range steered by its port ledger
/// assert_ne!(auto.strategy, Strategy::Auto);
///
/// let chosen = builder.strategy(Strategy::FullRange).build()?.choice();
/// assert_eq!((chosen.steered, chosen.found, chosen.to_string()), (false, None, "full-range".to_owned()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct StrategyChoice {
    /// The strategy for dials without a port from the ledger.
    pub strategy: Strategy,
    /// Whether the dialer takes free ports from its ledger, its own record of the ports in use.
    pub steered: bool,
    /// Result of the probe of IP_LOCAL_PORT_RANGE; `None`: the caller chose the strategy, so the kernel was not probed.
    pub found: Option<LocalPortRange>,
    /// The failure to list the sockets of other processes when the dialer was built. The ledger then contains only the dialer's own
    /// connections and gives ports that the kernel refuses. [`Dialer::refresh`] tries again.
    pub unseen: Option<Unseen>,
}

impl fmt::Display for StrategyChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.steered && self.found == Some(LocalPortRange::Absent) {
            write!(formatter, "kernel-default up to half of the ports, then ")?;
        }
        self.strategy.fmt(formatter)?;
        if self.steered {
            write!(formatter, " steered by its port ledger")?;
        }
        self.unseen.map_or(Ok(()), |unseen| write!(formatter, ", other sockets cannot be seen ({unseen})"))
    }
}

/// Settings from which a [`Dialer`] is built.
///
/// ```
/// use std::net::TcpListener;
/// use std::time::Duration;
/// use fourtuple::dial::{DialError, Dialer, SourcePool, Strategy};
///
/// let server = TcpListener::bind("127.0.0.1:0")?;
/// let builder = Dialer::builder(server.local_addr()?)
///     .strategy(Strategy::SELECT_TEST_REPEAT)
///     .sources(SourcePool::one([127, 0, 0, 2].into()))
///     .device("lo")
///     .timeout(Duration::from_secs(3))
///     .without_census();
/// assert_eq!(builder.destination(), server.local_addr()?);
///
/// let (stream, report) = builder.clone().build()?.dial()?;
/// assert_eq!((report.source.ip(), report.strategy), ([127, 0, 0, 2].into(), Strategy::SELECT_TEST_REPEAT));
///
/// // A dialer with a fixed port opens one connection at a time.
/// let fixed = builder.source_port(report.source.port()).build()?;
/// assert!(matches!(fixed.dial(), Err(DialError::TupleBusy { .. })));
/// # drop(stream);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct DialerBuilder {
    destination: SocketAddr,
    sources: SourcePool,
    strategy: Strategy,
    source_port: Option<u16>,
    device: Option<String>,
    timeout: Option<Duration>,
    census: bool,
}

impl DialerBuilder {
    pub(super) fn new(destination: SocketAddr) -> Self {
        DialerBuilder {
            destination,
            sources: SourcePool::any(),
            strategy: Strategy::Auto,
            source_port: None,
            device: None,
            timeout: None,
            census: true,
        }
    }

    /// Returns the destination that [`Dialer::builder`] was called with.
    pub fn destination(&self) -> SocketAddr {
        self.destination
    }

    /// Sets the source addresses. By default the kernel chooses the source address by route.
    pub fn sources(mut self, sources: SourcePool) -> Self {
        self.sources = sources;
        self
    }

    /// Sets how source ports are chosen. Default: [`Strategy::Auto`].
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Dials from this source port only. The strategy is not used.
    pub fn source_port(mut self, port: u16) -> Self {
        self.source_port = Some(port);
        self
    }

    /// Dials through a network device or a VRF: `setsockopt(SO_BINDTODEVICE)`.
    pub fn device(mut self, name: impl Into<String>) -> Self {
        self.device = Some(name.into());
        self
    }

    /// Limits the duration of a dial. By default the kernel's limit applies (tcp_syn_retries, about 130 s).
    ///
    /// With a timeout the socket is non-blocking during connect(), so that
    /// [`DialReport::connect`](super::DialReport::connect) covers only the port search and the SYN. This costs two more system calls:
    /// ppoll(), and ioctl(FIONBIO) to make the stream blocking again.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Omits the census when the ports are exhausted, for callers that must fail at once. A census takes about 1.2 us for each socket
    /// on the destination, and a dialer takes at most one per second.
    pub fn without_census(mut self) -> Self {
        self.census = false;
        self
    }

    /// Checks the settings, probes the kernel if the strategy is [`Strategy::Auto`], and reads the ports in use from the kernel.
    ///
    /// # Errors
    ///
    /// [`BuildError`] for settings that no dial can use, or if the kernel could not be probed.
    pub fn build(self) -> Result<Dialer, BuildError> {
        let destination = self.connected_address();
        if destination.port() == 0 {
            return Err(BuildError::PortZero { destination });
        }
        if let Some(source_address) = self.sources.foreign_family(destination) {
            return Err(BuildError::Family { source_address, destination });
        }
        if let Some(name) = self.device.as_ref().filter(|name| name.is_empty() || name.len() > 15) {
            return Err(BuildError::Device { name: name.clone() });
        }
        let addresses = self.sources.addresses();
        if self.source_port.is_some() && (self.source_port == Some(0) || addresses.len() > 1) {
            return Err(BuildError::SourcePort);
        }
        let (choice, ports) = choose(self.strategy)?;
        let steered = choice.steered || addresses.len() > 1;
        let (range, reserved) = match ports {
            Some(ports) => ports,
            // These two strategies draw ports from the range, and a pool needs the number of ports.
            None if steered
                || matches!(
                    choice.strategy,
                    Strategy::SelectTestRepeat { .. } | Strategy::RandomWindow { .. }
                ) =>
            {
                capabilities::local_ports().map_err(|error| BuildError::Range { error })?
            }
            None => (PortRange::KERNEL_DEFAULT, PortSet::new()),
        };
        let mut dialer = Dialer {
            destination,
            choice,
            range,
            fixed_source: match addresses {
                [only] => Some(*only),
                _ => None,
            },
            source_port: self.source_port,
            device: self.device,
            timeout: self.timeout,
            ledger: steered.then(|| Mutex::new(PortLedger::new(range, reserved.clone(), addresses))),
            census: self.census.then(|| Arc::new(Counter::new(Transport::Tcp, destination))),
            #[cfg(feature = "tokio")]
            census_task: tokio::sync::Mutex::default(),
            reserved,
            sources: self.sources,
        };
        // Without the sockets of other processes some connect() calls are refused: reported in `unseen`, but no failure.
        dialer.choice.unseen = dialer.refresh().err().map(|error| Unseen::new(SOCK_DIAG, &error));
        Ok(dialer)
    }

    /// Returns the address that the sockets of the dials are connected to. In place of an unspecified destination the kernel takes a
    /// bound IPv4 source address (`ip_route_output_key_hash_rcu`), else loopback (`tcp_v6_connect`). With a device it routes both
    /// differently.
    fn connected_address(&self) -> SocketAddr {
        // The kernel has one table of ports for IPv4 and for IPv4-mapped addresses.
        let mut destination = socket::canonical(self.destination);
        match (destination.ip(), self.sources.addresses()) {
            _ if self.device.is_some() => {}
            (IpAddr::V4(Ipv4Addr::UNSPECIFIED), [source @ IpAddr::V4(_)]) => destination.set_ip(*source),
            (IpAddr::V4(Ipv4Addr::UNSPECIFIED), _) => destination.set_ip(Ipv4Addr::LOCALHOST.into()),
            (IpAddr::V6(Ipv6Addr::UNSPECIFIED), _) => destination.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        destination
    }
}

/// Chooses the strategy for `Auto` on this kernel, and reads the port range and the reserved ports.
fn choose(strategy: Strategy) -> Result<(StrategyChoice, Option<(PortRange, PortSet)>), BuildError> {
    if strategy != Strategy::Auto {
        return Ok((StrategyChoice { strategy, steered: false, found: None, unseen: None }, None));
    }
    let found = capabilities::probe()?.local_port_range;
    let ports = capabilities::local_ports().ok();
    let strategy = Strategy::for_kernel(found, ports.is_some());
    Ok((StrategyChoice { strategy, steered: ports.is_some(), found: Some(found), unseen: None }, ports))
}

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
pub(super) fn bind_address(source: IpAddr, port: u16, destination: SocketAddr) -> SocketAddr {
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
