//! A run as requested, and the checks of its settings.

use std::io::ErrorKind;
use std::net::{IpAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use fourtuple::dial::{SourcePool, Strategy};
use fourtuple_record::measure::words::counted;
use fourtuple_syscalls::Endpoint;
use fourtuple_syscalls::socket::Transport;

use crate::load::LoadError;
use crate::load::arrival::{Arrival, Ramp};
use crate::load::engine::EngineChoice;
use crate::load::target::{HostAddresses, Scheme, Target};
use crate::load::workload::{HttpRequest, RequestList, TlsOptions, TlsSetup, Trust, Workload};

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
    /// Addresses of the target's host, instead of the resolver's.
    pub resolve: Option<HostAddresses>,
    /// Connections go to all addresses of the name in turn. Otherwise the first that answers a probe is loaded.
    pub all_addresses: bool,
    /// The operations of a connection.
    pub workload: Workload,
    /// Requests of HTTP instead of the one of `workload`.
    pub requests: Option<Arc<RequestList>>,
    /// Maximum number of concurrent requests of a connection with HTTP/2, each on a stream; `None` means HTTP/1.1.
    pub streams: Option<u32>,
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
    /// Time before `length` whose operations are not part of the result.
    pub warm_up: Duration,
    /// Runs at ascending rates, each for `warm_up` and `length`, instead of one run.
    pub ramp: Option<Ramp>,
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
    pub sources: SourcePool,
    /// The certificates that https accepts.
    pub trust: Trust,
    /// The other settings of https.
    pub tls: TlsOptions,
    /// Sends the last ACK of the handshake as a segment of its own. Otherwise TCP_QUICKACK is off and the ACK goes with the
    /// request, if one follows at once: one segment less per connection.
    pub separate_ack: bool,
    /// Seed of the random arrival process.
    pub seed: u64,
    /// Whether the run records a log of histograms.
    pub log: bool,
}

/// Maximum number of connections besides the held ones.
pub const MAX_CONNECTIONS: u32 = 1_000_000;

/// Maximum number of held connections.
pub const MAX_HELD: u32 = 4_000_000;

pub const MAX_THREADS: u32 = 1024;

/// Maximum number of streams of a connection with HTTP/2.
pub const MAX_STREAMS: u32 = 100_000;

/// Maximum number of streams of all connections together.
const MAX_ALL_STREAMS: u64 = 4_000_000;

/// Maximum length of a request and a response in bytes, and of a file that is not a regular one.
pub const MAX_BYTES: u32 = 16 << 20;

/// Maximum length of a body in bytes.
pub const MAX_BODY: u64 = MAX_ALL_BYTES;

/// Maximum length of the requests of all connections together, each of which has its own, in bytes.
const MAX_ALL_BYTES: u64 = 1 << 30;

/// Maximum rate of an open loop, per second.
pub const MAX_RATE: f64 = 1e9;

/// Maximum number of operations, and of requests on a connection.
pub const MAX_COUNT: u64 = 1_000_000_000_000;

/// Maximum of each time: further ones are mistakes, and sums of two of them fit every clock.
pub const MAX_TIME: Duration = Duration::from_secs(366 * 24 * 3600);

impl Load {
    /// Returns a closed loop of one thread with 64 connections, and the other settings as the command line has them by default,
    /// without an end.
    pub fn new(target: Target, workload: Workload) -> Load {
        Load {
            target,
            resolve: None,
            all_addresses: false,
            requests: None,
            streams: None,
            arrival: Arrival::Closed,
            connections: 64,
            pause: Duration::ZERO,
            close_every: if workload.keeps_connections() { 0 } else { 1 },
            workload,
            close: Close::Client,
            hold: 0,
            operations: None,
            length: None,
            warm_up: Duration::ZERO,
            ramp: None,
            timeout: Duration::from_secs(10),
            threshold: None,
            engine: EngineChoice::Auto,
            threads: 1,
            pinned: false,
            strategy: Strategy::Auto,
            sources: SourcePool::any(),
            trust: Trust::System,
            tls: TlsOptions::default(),
            separate_ack: false,
            seed: 1,
            log: false,
        }
    }

    /// Returns the addresses of the target that the sources can reach, at least one.
    ///
    /// # Errors
    ///
    /// [`LoadError::Resolve`], [`LoadError::Setting`]
    pub fn resolve(&self) -> Result<Vec<Endpoint>, LoadError> {
        let failed = |error| LoadError::Resolve { target: self.target.to_string(), error };
        let mut found = self.target.addresses(self.resolve.as_ref()).map_err(failed)?;
        let other_family = |endpoint: &Endpoint| {
            let address = endpoint.inet()?;
            let sources = self.sources.addresses();
            sources
                .iter()
                .find(|source| source.is_ipv4() != address.is_ipv4())
                .map(|source| (*source, address))
        };
        let refused = found.first().and_then(other_family);
        found.retain(|endpoint| other_family(endpoint).is_none());
        match refused {
            Some((source, address)) if found.is_empty() => Err(LoadError::Setting(format!(
                "invalid value '{source}' for '--source': {source} cannot reach {address}: one is IPv4, the other IPv6"
            ))),
            _ => Ok(found),
        }
    }

    /// Returns the transport: UDP for the workload udp, TCP (or a unix stream) otherwise.
    pub fn transport(&self) -> Transport {
        match self.workload {
            Workload::Udp { .. } => Transport::Udp,
            _ => Transport::Tcp,
        }
    }

    /// Checks that each setting is within its range: a request to an agent has passed no command line.
    fn check_ranges(&self) -> Result<(), LoadError> {
        let (request, response) = self.sizes();
        let is_http = matches!(self.workload, Workload::Http(_));
        let (bytes, count) = (MAX_BYTES.into(), MAX_COUNT);
        let times = [Some(self.pause), Some(self.timeout), self.length, self.threshold, Some(self.warm_up)];
        let [pause, timeout, length, threshold, warm_up] =
            times.map(|time| time.unwrap_or_default().as_secs());
        let seconds = MAX_TIME.as_secs();
        for (flag, value, most) in [
            ("connections", self.connections.into(), u64::from(MAX_CONNECTIONS)),
            ("hold", self.hold.into(), MAX_HELD.into()),
            ("threads", self.threads as u64, MAX_THREADS.into()),
            ("streams", self.streams.unwrap_or(0).into(), MAX_STREAMS.into()),
            ("request", if is_http { 0 } else { request as u64 }, bytes),
            ("response", response as u64, bytes),
            ("operations", self.operations.unwrap_or(0), count),
            ("close-every", self.close_every, count),
        ] {
            if value > most {
                return Err(LoadError::Setting(format!(
                    "invalid value '{value}' for '--{flag}': expected at most {most}"
                )));
            }
        }
        for (flag, value) in [
            ("pause", pause),
            ("timeout", timeout),
            ("for", length),
            ("threshold", threshold),
            ("warm-up", warm_up),
        ] {
            if value > seconds {
                return Err(LoadError::Setting(format!(
                    "invalid value '{value}s' for '--{flag}': expected at most {seconds}s"
                )));
            }
        }
        let slots = u64::from(self.connections) + u64::from(self.hold);
        if slots * request as u64 > MAX_ALL_BYTES {
            return Err(LoadError::Setting(format!(
                "{} with requests of {} {} more than {MAX_ALL_BYTES} bytes of memory: \
                 expected fewer --connections, or shorter requests",
                counted(slots, "connection"),
                counted(request as u64, "byte"),
                if slots == 1 { "takes" } else { "take" }
            )));
        }
        let refuse = |why: &str| Err(LoadError::Setting(why.to_owned()));
        if self.threads == 0 {
            return refuse("invalid value '0' for '--threads': expected at least 1");
        } else if self.timeout.is_zero() || self.length.is_some_and(|length| length.is_zero()) {
            return refuse("invalid value '0s' for '--timeout' or '--for': expected a time above 0");
        } else if self.operations == Some(0) {
            return refuse("invalid value '0' for '--operations': expected at least 1");
        } else if self.streams == Some(0) {
            return refuse("invalid value '0' for '--streams': expected at least 1");
        }
        match (self.arrival, &self.workload) {
            (Arrival::Even(rate) | Arrival::Poisson(rate), _) if !(rate > 0.0 && rate <= MAX_RATE) => {
                Err(LoadError::Setting(format!(
                    "invalid value '{rate}' for '--rate': expected a rate above 0, up to 1e9/s"
                )))
            }
            (_, Workload::Http(request)) => {
                let mut requests = self.list().iter().chain([request]);
                requests.try_for_each(HttpRequest::check).map_err(LoadError::Setting)
            }
            _ => Ok(()),
        }
    }

    /// Checks that the settings are within their ranges and compatible. Makes no system call.
    ///
    /// # Errors
    ///
    /// [`LoadError::Setting`]
    pub fn check(&self) -> Result<(), LoadError> {
        self.check_ranges()?;
        let refuse = |why: &str| Err(LoadError::Setting(why.to_owned()));
        let scheme = self.target.scheme();
        if !self.workload.schemes().contains(&scheme) {
            let (name, target, needs) = (self.workload.name(), &self.target, Workload::needs());
            return Err(LoadError::Setting(format!(
                "the workload {name} does not go with {target}: {needs}"
            )));
        }
        if let Some(given) = self.resolve.as_ref().filter(|given| !given.is_of(&self.target)) {
            return Err(LoadError::Setting(format!(
                "invalid value '{given}' for '--resolve': expected host and port of the target {}",
                self.target
            )));
        }
        if scheme == Scheme::Unix && self.target.path() != "/" && !matches!(self.workload, Workload::Http(_))
        {
            return Err(LoadError::Setting(format!(
                "invalid value '{}' for 'TARGET': only HTTP has paths, expected unix:/SOCKET",
                self.target
            )));
        }
        self.check_http2()?;
        let sends_nothing = self.workload.sends_nothing();
        if self.ramp.is_some()
            && (self.length.is_none()
                || self.operations.is_some()
                || self.hold > 0
                || self.arrival == Arrival::Closed)
        {
            return refuse(
                "--ramp is an open loop of steps with a time: expected --for, no --operations and no --hold",
            );
        } else if self.connections == 0 && !self.warm_up.is_zero() {
            return refuse("--warm-up changes nothing here: nothing is done beside --hold");
        }
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
        } else if self.all_addresses && scheme == Scheme::Unix {
            return refuse("a unix socket has one address");
        } else if !self.sources.addresses().is_empty() && scheme == Scheme::Unix {
            return refuse("a unix socket has no source addresses");
        }
        Ok(())
    }

    /// Checks what HTTP/2 is not combined with.
    fn check_http2(&self) -> Result<(), LoadError> {
        let Some(streams) = self.streams else { return Ok(()) };
        let refuse = |why: String| Err(LoadError::Setting(why));
        if !matches!(self.workload, Workload::Http(_)) {
            let name = self.workload.name();
            return refuse(format!(
                "'--http2' does not go with the workload {name}: it needs the workload http"
            ));
        }
        for (number, request) in self.http_requests().iter().enumerate() {
            let place =
                || self.requests.as_ref().map(|list| format!("{}: request {}: ", list.file, number + 1));
            let said = request.for_http2(self.target.scheme() == Scheme::Https);
            said.map_err(|why| LoadError::Setting(place().unwrap_or_default() + &why))?;
        }
        let all = u64::from(self.connections) * u64::from(streams);
        if self.engine != EngineChoice::Auto {
            let name = self.engine.name();
            refuse(format!(
                "invalid value '{name}' for '--engine': expected auto with --http2, which has an engine of its own"
            ))
        } else if self.close == Close::Server {
            refuse("invalid value 'server' for '--close': expected client or rst, a client cannot ask a server of HTTP/2 to close".to_owned())
        } else if self.hold > 0 {
            refuse("'--hold' does not go with --http2: expected no --hold".to_owned())
        } else if self.tls.protocols.is_some() {
            refuse("'--alpn' does not go with --http2, which offers h2: expected no --alpn".to_owned())
        } else if all > MAX_ALL_STREAMS {
            refuse(format!(
                "{all} streams: expected at most {MAX_ALL_STREAMS}, --connections times --streams"
            ))
        } else {
            Ok(())
        }
    }

    /// Checks that this host has the source addresses and the certificate files. [`Load::run`] does the same; a caller that
    /// checks before the preflight gets this error instead of findings.
    ///
    /// # Errors
    ///
    /// [`LoadError::Setting`], [`LoadError::Tls`]
    pub fn check_here(&self) -> Result<(), LoadError> {
        self.require_local_sources()?;
        self.tls_setup().map(drop)
    }

    pub(crate) fn tls_setup(&self) -> Result<Option<TlsSetup>, LoadError> {
        let setup = || TlsSetup::new(self.target.host(), &self.trust, &self.tls, self.streams);
        (self.target.scheme() == Scheme::Https).then(setup).transpose()
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
