//! A run as requested, and the checks of its settings.

use std::io::ErrorKind;
use std::net::{IpAddr, UdpSocket};
use std::time::Duration;

use fourtuple::dial::{SourcePool, Strategy};
use fourtuple_syscalls::Endpoint;
use fourtuple_syscalls::socket::Transport;

use crate::arrival::Arrival;
use crate::engine::EngineChoice;
use crate::error::LoadError;
use crate::target::{Scheme, Target};
use crate::workload::{TlsSetup, Trust, Workload};

/// The side that closes a connection first, and how it closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// The client, with FIN, as applications do. The client has the TIME_WAIT socket.
    Client,
    /// The client, with RST. Neither side has a TIME_WAIT socket. Applications do not close like this.
    Reset,
    /// The server: the client waits for its FIN. The server has the TIME_WAIT socket.
    Server,
}

impl Close {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Close::Client => "client",
            Close::Reset => "rst",
            Close::Server => "server",
        }
    }
}

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct Load {
    /// The server under load.
    pub target: Target,
    /// The operations of a connection.
    pub workload: Workload,
    /// When operations begin: closed loop, or an arrival process with a rate.
    pub arrival: Arrival,
    /// Maximum number of open connections, besides the held ones.
    pub connections: u32,
    /// Pause between two operations of a connection, in a closed loop.
    pub pause: Duration,
    /// Number of requests after which a connection is closed; 0 means never.
    pub close_every: u64,
    /// The side that closes, and how.
    pub close: Close,
    /// Number of connections that the run opens first and keeps open.
    pub hold: u32,
    /// Number of operations after which the run ends.
    pub operations: Option<u64>,
    /// Time after which no operation begins. An operation in progress may then take 2 s from its own start, or
    /// `timeout` if this is shorter.
    pub length: Option<Duration>,
    /// Maximum time of an operation; a longer one fails with `timeout`.
    pub timeout: Duration,
    /// Time from which on an operation is listed as slow.
    pub threshold: Option<Duration>,
    /// The engine: io_uring or epoll.
    pub engine: EngineChoice,
    /// Number of threads that generate load.
    pub threads: usize,
    /// Pins each thread to a CPU.
    pub pinned: bool,
    /// The strategy that chooses source ports.
    pub strategy: Strategy,
    /// The source addresses.
    pub sources: SourcePool,
    /// The certificates that https accepts.
    pub trust: Trust,
    /// Sends the last ACK of the handshake as a segment of its own. Otherwise TCP_QUICKACK is off and the ACK goes with the
    /// request, if one follows at once: one segment less per connection.
    pub separate_ack: bool,
    /// Seed of the random arrival process.
    pub seed: u64,
    /// Whether the run records a log of histograms.
    pub log: bool,
}

impl Load {
    /// Returns a closed loop of one thread with 64 connections, and the other settings as the command line has them by default,
    /// without an end.
    pub fn new(target: Target, workload: Workload) -> Load {
        Load {
            target,
            arrival: Arrival::Closed,
            connections: 64,
            pause: Duration::ZERO,
            close_every: if workload.keeps_connections() { 0 } else { 1 },
            workload,
            close: Close::Client,
            hold: 0,
            operations: None,
            length: None,
            timeout: Duration::from_secs(10),
            threshold: None,
            engine: EngineChoice::Auto,
            threads: 1,
            pinned: false,
            strategy: Strategy::Auto,
            sources: SourcePool::any(),
            trust: Trust::System,
            separate_ack: false,
            seed: 1,
            log: false,
        }
    }

    /// Resolves the name of the target.
    ///
    /// # Errors
    ///
    /// [`LoadError::Resolve`]
    pub fn resolve(&self) -> Result<Endpoint, LoadError> {
        let failed = |error| LoadError::Resolve { target: self.target.to_string(), error };
        self.target.resolve().map_err(failed)
    }

    /// Returns the transport: UDP for the workload udp, TCP (or a unix stream) otherwise.
    pub fn transport(&self) -> Transport {
        match self.workload {
            Workload::Udp { .. } => Transport::Udp,
            _ => Transport::Tcp,
        }
    }

    /// Checks that the settings are compatible. Makes no system call.
    ///
    /// # Errors
    ///
    /// [`LoadError::Setting`]
    pub fn check(&self) -> Result<(), LoadError> {
        let refuse = |why: &str| Err(LoadError::Setting(why.to_owned()));
        let scheme = self.target.scheme();
        if !self.workload.schemes().contains(&scheme) {
            let (name, target, needs) = (self.workload.name(), &self.target, Workload::needs());
            return Err(LoadError::Setting(format!(
                "the workload {name} does not go with {target}: {needs}"
            )));
        }
        let sends_nothing = self.workload.sends_nothing();
        if self.connections == 0 && (self.hold == 0 || self.arrival != Arrival::Closed) {
            return refuse("no connections: expected at least 1 for --connections, or --hold alone");
        } else if self.connections == 0 && self.operations.is_some() {
            return refuse(
                "--operations counts what is done beside --hold, and there is nothing: expected --connections",
            );
        } else if self.close != Close::Client && self.close_every == 0 && !sends_nothing {
            return refuse(
                "--close says how connections are closed, and with --close-every never none is: say --close-every 1",
            );
        } else if self.close == Close::Server && sends_nothing {
            return refuse("nothing is said in the workload connect, so that no server knows when to close");
        } else if self.close == Close::Server && self.transport() == Transport::Udp {
            return refuse("a UDP server closes no connection: expected --close client");
        } else if self.close == Close::Reset && scheme == Scheme::Unix {
            return refuse("there is no RST over a unix socket: expected --close client or server");
        } else if !self.sources.addresses().is_empty() && scheme == Scheme::Unix {
            return refuse("a unix socket has no source addresses");
        }
        Ok(())
    }

    /// Checks that this host has the source addresses and the certificate files. [`Load::run`] does the same; a caller that
    /// checks before the preflight gets this error instead of findings.
    ///
    /// # Errors
    ///
    /// [`LoadError::Setting`], [`LoadError::Tls`]
    pub fn check_here(&self) -> Result<(), LoadError> {
        self.require_local_sources()?;
        self.tls().map(drop)
    }

    pub(crate) fn tls(&self) -> Result<Option<TlsSetup>, LoadError> {
        match self.target.scheme() {
            Scheme::Https => TlsSetup::new(self.target.host(), &self.trust).map(Some),
            _ => Ok(None),
        }
    }

    /// Checks that each source is an address of this host. Later, EADDRNOTAVAIL could also mean that its ports are exhausted.
    pub(crate) fn require_local_sources(&self) -> Result<(), LoadError> {
        let is_foreign = |source: &&IpAddr| {
            // Each address in 127.0.0.0/8 is local.
            !matches!(source, IpAddr::V4(source) if source.is_loopback())
                && UdpSocket::bind((**source, 0))
                    .is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
        };
        match self.sources.addresses().iter().find(is_foreign) {
            Some(source) => Err(LoadError::Setting(format!(
                "invalid value '{source}' for '--source': expected addresses of this host, and this is none"
            ))),
            None => Ok(()),
        }
    }
}
