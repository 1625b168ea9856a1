use std::fmt;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use super::book::Book;
use super::dialer::Dialer;
use super::error::BuildError;
use super::source::SourcePool;
use super::strategy::Strategy;
use crate::capabilities::{self, LocalPortRange};
use crate::ports::{PortRange, PortSet};

/// What a dialer was found to do best here, or was told to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The strategy for dials that the book does not help.
    pub strategy: Strategy,
    /// Whether free ports are named from the dialer's own book of the ports it holds.
    pub steered: bool,
    /// What IP_LOCAL_PORT_RANGE was found to be; `None` when nothing was probed, because the strategy was given.
    pub found: Option<LocalPortRange>,
}

impl fmt::Display for Choice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.steered && self.found == Some(LocalPortRange::Absent) {
            write!(formatter, "kernel-default up to half of the ports, then ")?;
        }
        self.strategy.fmt(formatter)?;
        if self.steered { write!(formatter, " steered by its own book") } else { Ok(()) }
    }
}

/// Settings of a [`Dialer`] to be.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    destination: SocketAddr,
    sources: SourcePool,
    strategy: Strategy,
    source_port: Option<u16>,
    device: Option<String>,
    timeout: Option<Duration>,
    census: bool,
}

impl Builder {
    pub(super) fn new(destination: SocketAddr) -> Self {
        Builder {
            destination,
            sources: SourcePool::any(),
            strategy: Strategy::Auto,
            source_port: None,
            device: None,
            timeout: None,
            census: true,
        }
    }

    /// Where connections come from; by default the kernel chooses by route.
    pub fn sources(mut self, sources: SourcePool) -> Self {
        self.sources = sources;
        self
    }

    /// How a source port is chosen; by default [`Strategy::Auto`].
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Dials from this very port instead of choosing one; the strategy is then not asked.
    pub fn source_port(mut self, port: u16) -> Self {
        self.source_port = Some(port);
        self
    }

    /// Dials through a network device or a VRF (SO_BINDTODEVICE).
    pub fn device(mut self, name: &str) -> Self {
        self.device = Some(name.to_owned());
        self
    }

    /// Gives up when a connection is not there after this long; by default when the kernel does (tcp_syn_retries, about
    /// 130 s).
    ///
    /// With a timeout connect() is made without blocking, so that [`DialReport::connect`](super::DialReport::connect) is the port search and the SYN
    /// alone; it costs two system calls more (ppoll, and setting the stream back to blocking).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Leaves it unsaid who holds the ports when they are exhausted: for callers that would rather fail at once than ask
    /// the kernel, which takes about 1.2 us per socket on the destination. It is asked once a second at most.
    pub fn without_census(mut self) -> Self {
        self.census = false;
        self
    }

    /// Checks the settings, probes the kernel where the strategy wants that, and reads what ports are in use already.
    pub fn build(self) -> Result<Dialer, BuildError> {
        let destination = self.destination;
        if destination.port() == 0 {
            return Err(BuildError::PortZero(destination));
        }
        if let Some(source_address) = self.sources.foreign_family(destination) {
            return Err(BuildError::Family { source_address, destination });
        }
        match &self.device {
            Some(name) if name.is_empty() || name.len() > 15 => {
                return Err(BuildError::Device(name.clone()));
            }
            _ => {}
        }
        let addresses = self.sources.addresses();
        if self.source_port.is_some() && (self.source_port == Some(0) || addresses.len() > 1) {
            return Err(BuildError::SourcePort);
        }
        let (choice, ports) = choose(self.strategy)?;
        let steered = choice.steered || addresses.len() > 1;
        let (range, reserved) = match ports {
            Some(ports) => ports,
            // These two draw ports themselves and must know where from; a pool must know how much room there is.
            None if steered
                || matches!(
                    choice.strategy,
                    Strategy::SelectTestRepeat { .. } | Strategy::RandomWindow { .. }
                ) =>
            {
                capabilities::local_ports().map_err(BuildError::Range)?
            }
            None => (PortRange::KERNEL_DEFAULT, PortSet::new()),
        };
        let dialer = Dialer {
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
            book: steered.then(|| Mutex::new(Book::new(range, reserved, addresses))),
            census: self.census.then(Mutex::default),
        };
        // Not knowing what others hold costs a refused connect() here and there, and is no reason not to dial.
        let _ = dialer.refresh();
        Ok(dialer)
    }
}

/// Settles what `Auto` stands for on this kernel, and reads the ports where that needs them.
fn choose(strategy: Strategy) -> Result<(Choice, Option<(PortRange, PortSet)>), BuildError> {
    if strategy != Strategy::Auto {
        return Ok((Choice { strategy, steered: false, found: None }, None));
    }
    let found = capabilities::probe()?.local_port_range;
    let ports = capabilities::local_ports().ok();
    let strategy = match found {
        LocalPortRange::Linear => Strategy::FullRange,
        // Ends at the full range, so it is right whichever way the kernel searches.
        LocalPortRange::Parity | LocalPortRange::Unproven if ports.is_some() => Strategy::RANDOM_WINDOW,
        LocalPortRange::Parity | LocalPortRange::Unproven => Strategy::FullRange,
        // Up to half of the ports the kernel's own search is as good as any and does no harm; beyond, see `Attempt`.
        LocalPortRange::Absent if ports.is_some() => Strategy::SELECT_TEST_REPEAT,
        LocalPortRange::Absent => Strategy::KernelDefault,
    };
    Ok((Choice { strategy, steered: ports.is_some(), found: Some(found) }, ports))
}
