use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use fastrand::Rng;
use fourtuple::dial::{DialError, Dialer, Sharing, SourcePool, Step, Strategy, UdpDialer};
use fourtuple::ports::{PortRange, Random};
use fourtuple_record::measure::summary;
use fourtuple_record::{ByParity, FillPoint, Scatter, StrategyResult, errno};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::parking::Parking;
use fourtuple_syscalls::socket::{self, Transport};
use fourtuple_syscalls::{Errno, errno_name, resource};

use crate::lab::namespace::Namespace;
use crate::lab::ports::Checked;
use crate::lab::{LabError, Watch};

/// Dials between two pauses, in which sockets are parked and the floor is measured; the pauses are not timed.
const BATCH: u64 = 240;

/// Dials of the floor per batch: one for every 16 dials of the experiment.
const FLOOR_BATCH: u64 = BATCH / 16;

/// Number of destinations whose port table stays almost empty; the floor's dials use them in turn.
const FLOOR_LISTENERS: u16 = 64;

const PARTS: usize = 16;

/// Fills the range once with one strategy.
pub(super) fn fill(
    checked: &Checked<'_>,
    strategy: Strategy,
    repeat: u32,
    namespace: &Namespace,
    watch: &Watch<'_>,
) -> Result<StrategyResult, LabError> {
    let &Checked { settings, range, transport, family, .. } = checked;
    namespace.set_range(range)?;
    let mut free = Namespace::ports_beside(range);
    let mut listen = || {
        let port = free.next().expect("a range of 65,000 ports at most leaves some for listeners");
        Ok::<_, LabError>((namespace.listen(family, port)?, SocketAddr::new(family.loopback(), port)))
    };
    let (_listener, destination) = listen()?;
    let floors: Vec<(OwnedFd, SocketAddr)> = match transport {
        Transport::Tcp => (0..FLOOR_LISTENERS).map(|_| listen()).collect::<Result<_, _>>()?,
        Transport::Udp => Vec::new(),
    };
    let sources = match settings.sources {
        1 => Vec::new(),
        count => namespace.sources(family, count)?,
    };
    let source = sources.first().copied();
    let seed = settings.seed.wrapping_add(u64::from(repeat));
    let mut random = Rng::with_seed(seed);
    let mut dials = StrategyDialer::new(transport, strategy, range, sources, destination, seed)?;
    let chosen = (strategy == Strategy::Auto).then(|| dials.chosen());
    let mut parking = Parking::new().map_err(LabError::call("hold sockets"))?;
    let mut tally = Tally::new(settings.tuples(), settings.dials());
    let mut next_floor = 0;
    if transport == Transport::Udp {
        tally.udp_floor(&mut dials)?;
    }
    while tally.dials < settings.dials() && !watch.stopped() {
        tally.batch(&mut dials, BATCH.min(settings.dials() - tally.dials), &mut parking, watch)?;
        parking.settle().map_err(LabError::call("hold sockets"))?;
        for _ in 0..FLOOR_BATCH.min(floors.len() as u64 * FLOOR_BATCH) {
            let (_, destination) = floors[next_floor % floors.len()];
            next_floor += 1;
            if let Some((socket, time)) = floor(strategy, source, destination, range, &mut random)? {
                tally.floor(time);
                parking.park(socket);
            }
        }
        watch.progress.at(tally.dials);
    }
    // Listeners are closed first: close() resets the connections in their accept queues, which is faster than a FIN exchange each.
    drop(floors);
    drop(_listener);
    Ok(tally.result(strategy, chosen, repeat))
}

/// The measurements of a run so far.
#[derive(Default)]
struct Tally {
    tuples: u64,
    wanted: u64,
    dials: u64,
    retries: u64,
    errors: BTreeMap<String, u64>,
    elapsed: Duration,
    cpu: Duration,
    even: Vec<u64>,
    odd: Vec<u64>,
    scatter: Scatter,
    parts: [Part; PARTS],
}

#[derive(Clone, Copy, Default)]
struct Part {
    connections: u64,
    held_at_end: u64,
    total_ns: u64,
    floors: u64,
    floor_total_ns: u64,
}

impl Part {
    fn floor(&mut self, time: Duration) {
        self.floors += 1;
        self.floor_total_ns += time.as_nanos() as u64;
    }
}

impl Tally {
    fn new(tuples: u64, wanted: u64) -> Self {
        Tally {
            tuples,
            wanted,
            even: Vec::with_capacity(wanted as usize),
            odd: Vec::with_capacity(wanted as usize),
            scatter: Scatter::with_capacity(wanted as usize),
            ..Tally::default()
        }
    }

    /// Returns the part of the fill to which the dial with this number, from 0, belongs.
    fn part(&mut self, dial: u64) -> &mut Part {
        let index = (dial * PARTS as u64 / self.wanted) as usize;
        &mut self.parts[index.min(PARTS - 1)]
    }

    fn batch(
        &mut self,
        dials: &mut StrategyDialer,
        count: u64,
        parking: &mut Parking,
        watch: &Watch<'_>,
    ) -> Result<(), LabError> {
        let cpu = resource::thread_cpu_time();
        for _ in 0..count {
            if watch.stopped() {
                break;
            }
            let begun = Instant::now();
            let dialed = dials.dial()?;
            let took = begun.elapsed();
            self.elapsed += took;
            match dialed {
                DialOutcome::Connected { socket, port, time, attempts } => {
                    self.connected(port, time, attempts);
                    parking.park(socket);
                }
                DialOutcome::Failed { errno, attempts } => {
                    self.retries += u64::from(attempts.saturating_sub(1));
                    *self.errors.entry(errno.to_owned()).or_default() += 1;
                    self.scatter.push(took.as_nanos() as u64, false, true);
                }
            }
            let held = (self.even.len() + self.odd.len()) as u64;
            self.part(self.dials).held_at_end = held;
            self.dials += 1;
        }
        self.cpu += resource::thread_cpu_time() - cpu;
        Ok(())
    }

    fn connected(&mut self, port: u16, time: Duration, attempts: u32) {
        let ns = time.as_nanos() as u64;
        let odd = port % 2 == 1;
        if odd {
            self.odd.push(ns)
        } else {
            self.even.push(ns)
        }
        self.retries += u64::from(attempts - 1);
        self.scatter.push(ns, odd, false);
        let part = self.part(self.dials);
        part.connections += 1;
        part.total_ns += ns;
    }

    fn floor(&mut self, time: Duration) {
        // The dials of a batch are already counted, so the floor of the batch belongs to the part of its last dial.
        self.part(self.dials.saturating_sub(1)).floor(time);
    }

    /// Measures the floor of UDP before the fill, since UDP ports are held against every destination; the sockets are then
    /// closed.
    fn udp_floor(&mut self, dials: &mut StrategyDialer) -> Result<(), LabError> {
        for _ in 0..4 * FLOOR_BATCH {
            if let DialOutcome::Connected { time, .. } = dials.dial()? {
                self.parts.iter_mut().for_each(|part| part.floor(time));
            }
        }
        Ok(())
    }

    fn result(mut self, strategy: Strategy, chosen: Option<String>, repeat: u32) -> StrategyResult {
        let connections = (self.even.len() + self.odd.len()) as u64;
        let mut all: Vec<u64> = self.even.iter().chain(&self.odd).copied().collect();
        let mean = |total: u64, count: u64| total.checked_div(count).unwrap_or(0);
        let floors: u64 = self.parts.iter().map(|part| part.floors).sum();
        let floor_total: u64 = self.parts.iter().map(|part| part.floor_total_ns).sum();
        StrategyResult {
            strategy: strategy.to_string(),
            chosen,
            repeat,
            dials: self.dials,
            connections,
            retries: self.retries,
            errors: self.errors,
            elapsed_ns: self.elapsed.as_nanos() as u64,
            rate_per_s: connections as f64 / self.elapsed.as_secs_f64().max(1e-9),
            cpu_ns_per_dial: mean(self.cpu.as_nanos() as u64, self.dials),
            connect_ns: ByParity {
                all: summary(&mut all),
                even: summary(&mut self.even),
                odd: summary(&mut self.odd),
            },
            by_fill: self
                .parts
                .iter()
                .filter(|part| part.held_at_end > 0)
                .map(|part| FillPoint {
                    fill: part.held_at_end as f64 / self.tuples as f64,
                    connections: part.connections,
                    mean_ns: mean(part.total_ns, part.connections),
                    floor_ns: mean(part.floor_total_ns, part.floors),
                })
                .collect(),
            floor_ns: mean(floor_total, floors),
            scatter: Some(self.scatter),
        }
    }
}

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
                let mut builder = Dialer::builder(destination).strategy(strategy).without_census();
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
            Ok(DialOutcome::Failed { errno: errno::EADDRNOTAVAIL, attempts: attempts.max(1) })
        }
        Err(DialError::TupleBusy { .. }) => {
            Ok(DialOutcome::Failed { errno: errno::EADDRNOTAVAIL, attempts: 1 })
        }
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
    Ok(DialOutcome::Failed { errno: errno::EADDRINUSE, attempts: tried })
}

/// Makes one TCP connect() to `destination`, whose port table is empty, with the calls of `strategy`.
fn floor(
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

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;
    use std::sync::atomic::AtomicBool;

    use fourtuple::dial::Dialer;
    use fourtuple_record::Distribution;
    use fourtuple_testing::{in_namespace, listener, set_sysctl};

    use super::*;
    use crate::lab::Silent;

    #[test]
    fn the_result_adds_up_dials_and_parts() {
        let mut tally = Tally::new(8, 4);
        let dials = [(1, 20_001, 10, 3, 4), (2, 20_002, 20, 1, 6), (3, 20_003, 36, 2, 8)];
        for (held, port, ns, attempts, floor) in dials {
            tally.connected(port, Duration::from_nanos(ns), attempts);
            tally.part(tally.dials).held_at_end = held;
            tally.dials += 1;
            tally.floor(Duration::from_nanos(floor));
            tally.floor(Duration::from_nanos(floor + 2));
        }
        (tally.elapsed, tally.cpu) = (Duration::from_secs(2), Duration::from_nanos(33));
        let result = tally.result(Strategy::FullRange, None, 7);
        assert_eq!((result.dials, result.connections, result.retries), (3, 3, 3));
        assert_eq!((result.rate_per_s, result.cpu_ns_per_dial, result.floor_ns), (1.5, 11, 7));
        let figures = |part: Option<Distribution>| part.map(|part| (part.count, part.mean, part.max));
        let ByParity { all, even, odd } = result.connect_ns;
        assert_eq!([all, even, odd].map(figures), [Some((3, 22, 36)), Some((1, 20, 20)), Some((2, 23, 36))]);
        let points = result.by_fill.iter().map(|at| (at.fill, at.connections, at.mean_ns, at.floor_ns));
        assert!(points.eq([(0.125, 1, 10, 5), (0.25, 1, 20, 7), (0.375, 1, 36, 9)]), "{:?}", result.by_fill);
        let none = Tally::new(8, 4).result(Strategy::FullRange, None, 0);
        assert_eq!((none.cpu_ns_per_dial, none.floor_ns, none.by_fill.len()), (0, 0, 0));
    }

    #[test]
    fn each_part_of_udp_has_the_floor_of_the_start() {
        in_namespace(|| {
            let range = "20000-20099".parse().unwrap();
            set_sysctl("net.ipv4.ip_local_port_range", "20000 20099");
            let destination = ([127, 0, 0, 1], 4000).into();
            let (udp, strategy) = (Transport::Udp, Strategy::KernelDefault);
            let mut dials = StrategyDialer::new(udp, strategy, range, Vec::new(), destination, 1).unwrap();
            let mut tally = Tally::new(100, 100);
            tally.udp_floor(&mut dials).unwrap();
            let has_all = |part: &Part| part.floors == 4 * FLOOR_BATCH && part.floor_total_ns >= part.floors;
            assert!(tally.parts.iter().all(has_all));
        });
    }

    #[test]
    fn failed_dials_have_their_retries_counted() {
        in_namespace(|| {
            set_sysctl("net.ipv4.ip_local_port_range", "20000 20007");
            let (_listener, destination) = listener("127.0.0.1", 64);
            let full = Dialer::builder(destination).strategy(Strategy::FullRange).build().unwrap();
            let _held: Vec<_> = (0..8).map(|_| full.dial().unwrap()).collect();
            let strategy = Strategy::SelectTestRepeat { tries: NonZeroU16::new(3).unwrap() };
            let range = "20000-20007".parse().unwrap();
            let tcp = Transport::Tcp;
            let mut dials = StrategyDialer::new(tcp, strategy, range, Vec::new(), destination, 1).unwrap();
            let mut tally = Tally::new(8, 5);
            let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
            tally.batch(&mut dials, 5, &mut Parking::new().unwrap(), &watch).unwrap();
            assert_eq!(tally.errors, BTreeMap::from([("EADDRNOTAVAIL".to_owned(), 5)]));
            // Of three tries each the first is none.
            assert_eq!((tally.dials, tally.retries), (5, 10));
            assert!(tally.cpu > Duration::ZERO && tally.cpu < resource::thread_cpu_time());
        });
    }
}
