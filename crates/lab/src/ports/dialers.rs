//! The dialers of the experiment: how a socket is dialed over TCP and UDP, and how its floor is measured.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use fastrand::Rng;
use fourtuple::dial::{DialError, Dialer, Sharing, SourcePool, Step, Strategy, UdpDialer};
use fourtuple::ports::{PortRange, Random};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Errno, errno_name};

use crate::LabError;

/// The result of one dial.
pub(super) enum DialOutcome {
    Connected { socket: OwnedFd, port: u16, time: Duration, attempts: u32 },
    Failed { errno: &'static str, attempts: u32 },
}

/// A dialer that opens sockets one at a time with a given strategy.
pub(super) enum StrategyDialer {
    Tcp(Box<Dialer>),
    /// UDP with the kernel's own choice of port, dialed by the library.
    Udp(UdpDialer),
    /// UDP steered by a strategy. The library offers no UDP strategies, since they gain nothing.
    UdpSteps {
        strategy: Strategy,
        range: PortRange,
        local: IpAddr,
        destination: SocketAddr,
        random: Random,
    },
}

impl StrategyDialer {
    pub(super) fn new(
        transport: Transport,
        strategy: Strategy,
        range: PortRange,
        sources: Vec<IpAddr>,
        destination: SocketAddr,
        seed: u64,
    ) -> Result<Self, LabError> {
        Ok(match transport {
            Transport::Tcp => {
                let mut builder = Dialer::to(destination).strategy(strategy).without_census();
                if !sources.is_empty() {
                    let pool = SourcePool::several(sources).expect("addresses of one family, and few");
                    builder = builder.sources(pool);
                }
                StrategyDialer::Tcp(Box::new(builder.build()?))
            }
            Transport::Udp if strategy == Strategy::Auto => {
                StrategyDialer::Udp(UdpDialer::new(destination, None, Sharing::Exclusive)?)
            }
            Transport::Udp => StrategyDialer::UdpSteps {
                strategy,
                range,
                local: destination.ip(),
                destination,
                random: Random::with_seed(seed),
            },
        })
    }

    /// Returns the strategy that `auto` chose.
    pub(super) fn chosen(&self) -> String {
        match self {
            StrategyDialer::Tcp(dialer) => dialer.choice().to_string(),
            StrategyDialer::Udp(_) | StrategyDialer::UdpSteps { .. } => "kernel-default".to_owned(),
        }
    }

    pub(super) fn dial(&mut self) -> Result<DialOutcome, LabError> {
        match self {
            StrategyDialer::Tcp(dialer) => {
                ended(dialer.dial().map(|(stream, report)| (stream.into(), report)))
            }
            StrategyDialer::Udp(dialer) => {
                ended(dialer.dial().map(|(socket, report)| (socket.into(), report)))
            }
            StrategyDialer::UdpSteps { strategy, range, local, destination, random } => {
                udp_steps(*strategy, *range, *local, *destination, random)
            }
        }
    }
}

fn ended(result: Result<(OwnedFd, fourtuple::dial::DialReport), DialError>) -> Result<DialOutcome, LabError> {
    match result {
        Ok((socket, report)) => Ok(DialOutcome::Connected {
            socket,
            port: report.source.port(),
            time: report.connect,
            attempts: report.attempts,
        }),
        // The errno that connect() or bind() returned.
        Err(DialError::PortsExhausted { attempts, .. }) => {
            Ok(DialOutcome::Failed { errno: "EADDRNOTAVAIL", attempts: attempts.max(1) })
        }
        Err(DialError::TupleBusy { .. }) => Ok(DialOutcome::Failed { errno: "EADDRNOTAVAIL", attempts: 1 }),
        Err(error) => Err(error.into()),
    }
}

/// Makes the published calls: socket(), the window option if any, bind() and connect(). For UDP, bind() chooses the port.
fn udp_steps(
    strategy: Strategy,
    range: PortRange,
    local: IpAddr,
    destination: SocketAddr,
    random: &mut Random,
) -> Result<DialOutcome, LabError> {
    let socket = socket::open(Transport::Udp, destination, false).map_err(LabError::call("socket"))?;
    let mut time = Duration::ZERO;
    let mut tried = 0;
    while let Some(step) = strategy.step(tried, range, random) {
        tried += 1;
        let port = match step {
            Step::Search => 0,
            Step::Window(window) => {
                let set = option::set_local_port_range(socket.as_fd(), window.low(), window.high());
                if set.map_err(LabError::call("setsockopt IP_LOCAL_PORT_RANGE"))? == Answer::Absent {
                    let absent = io::Error::from(Errno::ENOPROTOOPT);
                    return Err(LabError::call("setsockopt IP_LOCAL_PORT_RANGE")(absent));
                }
                0
            }
            Step::Bind(port) => port,
        };
        let begun = Instant::now();
        match socket::bind(socket.as_fd(), SocketAddr::new(local, port)) {
            Ok(()) => {
                socket::connect(socket.as_fd(), destination).map_err(LabError::call("connect"))?;
                time += begun.elapsed();
                let port =
                    socket::local_address(socket.as_fd()).map_err(LabError::call("getsockname"))?.port();
                return Ok(DialOutcome::Connected { socket, port, time, attempts: tried });
            }
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => time += begun.elapsed(),
            Err(error) => return Err(LabError::call("bind")(error)),
        }
    }
    Ok(DialOutcome::Failed { errno: "EADDRINUSE", attempts: tried })
}

/// Makes one TCP connect() to `destination`, whose port table is empty, with the calls of `strategy`.
pub(super) fn floor(
    strategy: Strategy,
    source: Option<IpAddr>,
    destination: SocketAddr,
    range: PortRange,
    random: &mut Rng,
) -> Result<Option<(OwnedFd, Duration)>, LabError> {
    let call = |what| LabError::call(what);
    let socket = socket::open(Transport::Tcp, destination, false).map_err(call("socket"))?;
    let fd = socket.as_fd();
    let step = match strategy {
        Strategy::KernelDefault => Step::Search,
        Strategy::SelectTestRepeat { .. } => Step::Bind(random.u16(range.low()..=range.high())),
        _ => Step::Window(PortRange::ALL),
    };
    let mut time = Duration::ZERO;
    match step {
        Step::Search => {}
        Step::Window(window) => {
            let _: Answer = option::set_local_port_range(fd, window.low(), window.high())
                .map_err(call("setsockopt IP_LOCAL_PORT_RANGE"))?;
        }
        Step::Bind(port) => {
            option::set_reuse_address(fd, true).map_err(call("setsockopt SO_REUSEADDR"))?;
            let local = source.unwrap_or(if destination.is_ipv4() {
                std::net::Ipv4Addr::UNSPECIFIED.into()
            } else {
                std::net::Ipv6Addr::UNSPECIFIED.into()
            });
            let begun = Instant::now();
            // The port may be bound by a connection that does not share the port; this floor is then not measured.
            if socket::bind(fd, SocketAddr::new(local, port)).is_err() {
                return Ok(None);
            }
            time += begun.elapsed();
        }
    }
    if let (Some(source), Step::Search | Step::Window(_)) = (source, step) {
        let _: Answer = option::set_bind_address_no_port(fd).map_err(call("setsockopt"))?;
        socket::bind(fd, SocketAddr::new(source, 0)).map_err(call("bind"))?;
    }
    let begun = Instant::now();
    match socket::connect(fd, destination) {
        Ok(_) => Ok(Some((socket, time + begun.elapsed()))),
        // Ports bound by number are lost to every automatic choice, so the floor cannot be measured either.
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => Ok(None),
        Err(error) => Err(LabError::call(format!("connect: {}", errno_name(&error)))(error)),
    }
}
