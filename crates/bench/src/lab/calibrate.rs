//! Measures the cost of each step of a dial on this machine, in a namespace: the constants of the cost model.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use fastrand::Rng;
use fourtuple::dial::{DialError, Dialer, Strategy};
use fourtuple::ports::PortRange;
use fourtuple_observe::plan::{Costs, CostsByFill, ProbeCost};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::parking::Parking;
use fourtuple_syscalls::socket::{self, Transport};

use crate::lab::namespace::{Family, Namespace};
use crate::lab::ports::FIRST_PORT;
use crate::lab::{LabError, Watch};

/// Number of timed searches per length.
const SEARCHES: u32 = 24;

/// Measures the costs of dials of `strategy` within `range`, on a table that is half full and on a table that is nearly
/// full: a dial that finds its port at once, a dial that first passes half of the range, and, with no port free, failing
/// searches of 16, 64, 256, ... ports.
///
/// # Errors
///
/// Returns an error if no namespace can be created, if the watcher ends the calibration, or if it takes longer than `limit`.
pub fn calibrate(
    range: PortRange,
    strategy: Strategy,
    has_option: bool,
    limit: Duration,
    watch: &Watch<'_>,
) -> Result<CostsByFill, LabError> {
    if range.low() < FIRST_PORT {
        return Err(LabError::setting(
            "range",
            range,
            "ranges from port 1024 on can be tried (the kernel takes no lower ones)",
        ));
    }
    watch.progress.begin("calibrate", u64::from(range.len()));
    Namespace::run(|namespace| {
        let mut bench = Bench::set_up(range, has_option, limit, namespace)?;
        match strategy {
            Strategy::SelectTestRepeat { .. } => bench.by_number(watch),
            _ => bench.by_search(watch),
        }
    })
}

struct Bench<'a> {
    namespace: &'a Namespace,
    range: PortRange,
    has_option: bool,
    begun: Instant,
    limit: Duration,
    destination: SocketAddr,
    _listener: OwnedFd,
    parking: Parking,
    held: u32,
    random: Rng,
}

impl<'a> Bench<'a> {
    fn set_up(
        range: PortRange,
        has_option: bool,
        limit: Duration,
        namespace: &'a Namespace,
    ) -> Result<Self, LabError> {
        namespace.set_range(range)?;
        let port = Namespace::ports_beside(range).next().ok_or_else(|| {
            LabError::setting("range", range, "a port must be left for a listener to calibrate with")
        })?;
        Ok(Bench {
            namespace,
            range,
            has_option,
            begun: Instant::now(),
            limit,
            destination: SocketAddr::new(Family::V4.loopback(), port),
            _listener: namespace.listen(Family::V4, port)?,
            parking: Parking::new().map_err(LabError::call("hold sockets"))?,
            held: 0,
            random: Rng::with_seed(1),
        })
    }

    /// Measures strategies that leave the search to the kernel.
    fn by_search(&mut self, watch: &Watch<'_>) -> Result<CostsByFill, LabError> {
        let default = self.dialer(Strategy::KernelDefault)?;
        let auto = self.dialer(Strategy::Auto)?;
        let half_of_it = self.range.len() / 2;
        let half_length = f64::from(half_of_it.max(1));
        let floor_half = self.fill(&default, half_of_it, watch)?.ok_or_else(no_dials)?;
        // One half of the ports is taken now: every search passes this half before it finds a port in the free half. The
        // half is always the same, so the caches hold as much of it as they can; a search of the whole range would not
        // measure this.
        let walk_half = self.fill(&default, SEARCHES, watch)?.unwrap_or(floor_half);
        let half = ProbeCost::measured(floor_half, &[(half_length, walk_half)])?;
        // A small range has too few ports for these parts; the costs at half then also stand for the nearly full table.
        let rest = self.range.len().saturating_sub(self.held + 4 * SEARCHES);
        let floor_full = self.fill_cheaply(&auto, rest, watch)?.unwrap_or(floor_half);
        let walk_full = self.fill(&default, SEARCHES, watch)?.unwrap_or(walk_half);
        self.fill_cheaply(&auto, u32::MAX, watch)?;
        let once = self.refused(1, watch)?;
        // Beyond the half, the search passes a few hundred more ports up to a free port: within the noise.
        let mut means = vec![(half_length, walk_full)];
        let mut width = 16;
        while self.has_option && width < half_of_it {
            means.push((f64::from(width - 1), floor_full + self.refused(width as u16, watch)? - once));
            width *= 4;
        }
        let full = ProbeCost::measured(floor_full, &means)?;
        let costs = |floor_ns, established: ProbeCost| {
            let reference = Costs::reference();
            // A port in TIME_WAIT costs one lock more, even with warm caches.
            let lock = reference.time_wait.ns(1.0) - reference.established.ns(1.0);
            Costs {
                floor_ns,
                time_wait: established.plus(lock),
                established,
                search_again_ns: once,
                ..reference
            }
        };
        Ok(CostsByFill { half: costs(floor_half, half), full: costs(floor_full, full) })
    }

    /// Measures ports that are bound by number: all sockets share their ports, so that only connect() fails.
    fn by_number(&mut self, watch: &Watch<'_>) -> Result<CostsByFill, LabError> {
        let mut times = Vec::with_capacity(self.range.len() as usize);
        let mut half = None;
        for (index, port) in self.range.iter().enumerate() {
            self.check(watch)?;
            let (fd, time, connected) = self.dial_from(port)?;
            if connected {
                times.push(time);
                self.park(fd, watch)?;
            }
            if index as u32 == self.range.len() / 2 {
                half = Some((trimmed_mean_ns(&mut times.clone()), self.refused_by_number(port)?));
            }
        }
        let again = self.refused_by_number(self.range.high())?;
        let last = times.len() - times.len() / 4;
        let full = (trimmed_mean_ns(&mut times[last..]), again);
        let costs = |(floor_ns, bind_again_ns)| Costs { floor_ns, bind_again_ns, ..Costs::reference() };
        Ok(CostsByFill { half: costs(half.unwrap_or(full)), full: costs(full) })
    }

    fn dialer(&self, strategy: Strategy) -> Result<Dialer, LabError> {
        Ok(Dialer::builder(self.destination).strategy(strategy).without_census().build()?)
    }

    /// Dials `count` sockets or until the ports run out, and returns the mean time of a dial; `None` if no port was free.
    fn fill(&mut self, dialer: &Dialer, count: u32, watch: &Watch<'_>) -> Result<Option<f64>, LabError> {
        Ok(mean_ns(self.dial(dialer, count, watch)?))
    }

    /// Does the same as [`Bench::fill`] with dials that find a port at once, on every kernel. Without IP_LOCAL_PORT_RANGE a search would
    /// pass half of the range in each dial, which takes minutes for all dials: the range of the namespace is one port at a time.
    fn fill_cheaply(
        &mut self,
        auto: &Dialer,
        count: u32,
        watch: &Watch<'_>,
    ) -> Result<Option<f64>, LabError> {
        if self.has_option {
            return self.fill(auto, count, watch);
        }
        Ok(mean_ns(self.dial_port_by_port(count, watch)?))
    }

    fn dial_port_by_port(&mut self, count: u32, watch: &Watch<'_>) -> Result<Vec<Dialed>, LabError> {
        let default = self.dialer(Strategy::KernelDefault)?;
        let mut dialed = Vec::new();
        for port in self.range.iter() {
            if dialed.len() as u32 >= count {
                break;
            }
            self.namespace.set_range(PortRange::single(port))?;
            dialed.extend(self.dial(&default, 1, watch)?);
        }
        self.namespace.set_range(self.range)?;
        Ok(dialed)
    }

    fn dial(&mut self, dialer: &Dialer, count: u32, watch: &Watch<'_>) -> Result<Vec<Dialed>, LabError> {
        let mut dialed = Vec::new();
        while (dialed.len() as u32) < count {
            self.check(watch)?;
            match dialer.dial() {
                Ok((stream, report)) => {
                    dialed.push((report.source.port(), report.connect));
                    self.park(stream.into(), watch)?;
                }
                Err(DialError::PortsExhausted { .. }) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(dialed)
    }

    /// Returns an error if the calibration is to end.
    fn check(&self, watch: &Watch<'_>) -> Result<(), LabError> {
        match (watch.stopped(), self.begun.elapsed() >= self.limit) {
            (true, _) => Err(LabError::Interrupted),
            (_, true) => Err(LabError::TooSlow(self.limit)),
            _ => Ok(()),
        }
    }

    fn park(&mut self, socket: OwnedFd, watch: &Watch<'_>) -> Result<(), LabError> {
        self.held += 1;
        if self.parking.park(socket) {
            watch.progress.at(u64::from(self.held));
            self.parking.settle().map_err(LabError::call("hold sockets"))?;
        }
        Ok(())
    }

    /// Returns the mean time of a connect() that finds none of `width` ports free. Each connect() uses a different window,
    /// since the caches would hold a window searched before.
    fn refused(&mut self, width: u16, watch: &Watch<'_>) -> Result<f64, LabError> {
        let mut times = Vec::new();
        for _ in 0..SEARCHES {
            self.check(watch)?;
            let fd = self.open()?;
            let last = (self.range.len() - u32::from(width)) as u16;
            let low = self.range.low() + self.random.u16(..=last);
            if self.has_option {
                let _: Answer = option::set_local_port_range(fd.as_fd(), low, low + (width - 1))
                    .map_err(LabError::call("setsockopt IP_LOCAL_PORT_RANGE"))?;
            }
            let begun = Instant::now();
            // No port is free, so connect() fails. It succeeds only on a port of an odd range that an earlier search
            // missed.
            let _ = socket::connect(fd.as_fd(), self.destination);
            times.push(begun.elapsed());
        }
        Ok(trimmed_mean_ns(&mut times))
    }

    /// Calls bind() and connect() from a port; returns the socket, the time of both calls, and whether the socket is
    /// connected.
    fn dial_from(&self, port: u16) -> Result<(OwnedFd, Duration, bool), LabError> {
        let fd = self.open()?;
        option::set_reuse_address(fd.as_fd(), true).map_err(LabError::call("setsockopt SO_REUSEADDR"))?;
        let local = SocketAddr::from(([0, 0, 0, 0], port));
        let begun = Instant::now();
        let connected = socket::bind(fd.as_fd(), local)
            .and_then(|()| socket::connect(fd.as_fd(), self.destination))
            .is_ok();
        Ok((fd, begun.elapsed(), connected))
    }

    /// Returns the mean time of a failing dial from a taken port, among the ports up to `last`.
    fn refused_by_number(&mut self, last: u16) -> Result<f64, LabError> {
        let mut times = (0..8 * SEARCHES)
            .map(|_| {
                let port = self.random.u16(self.range.low()..=last);
                Ok(self.dial_from(port)?.1)
            })
            .collect::<Result<Vec<_>, LabError>>()?;
        Ok(trimmed_mean_ns(&mut times))
    }

    fn open(&self) -> Result<OwnedFd, LabError> {
        socket::open(Transport::Tcp, self.destination, false).map_err(LabError::call("socket"))
    }
}

/// Returns the error for a namespace of the lab in which not even the first dial finds a port.
fn no_dials() -> LabError {
    LabError::Call { what: "calibrate".to_owned(), error: io::ErrorKind::AddrNotAvailable.into() }
}

/// Source port of a dial, and its time in connect().
type Dialed = (u16, Duration);

/// Returns the trimmed mean; `None` without a dial.
fn mean_ns(dialed: Vec<Dialed>) -> Option<f64> {
    let mut times: Vec<Duration> = dialed.into_iter().map(|(_, time)| time).collect();
    (!times.is_empty()).then(|| trimmed_mean_ns(&mut times))
}

/// Returns the mean without the slowest sixteenth, which other load on the host may have delayed.
fn trimmed_mean_ns(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    let kept = &times[..times.len() - times.len() / 16];
    kept.iter().map(Duration::as_nanos).sum::<u128>() as f64 / kept.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use fourtuple_testing::in_namespace;

    use super::*;
    use crate::lab::Silent;

    /// The kernel's own search of a table that is half full passes half of the range for each of its ports, and starts anywhere.
    #[test]
    fn without_the_option_no_dial_searches_half_of_the_range() {
        in_namespace(|| {
            let range: PortRange = "20000-20511".parse().unwrap();
            let watch = Watch { stop: &AtomicBool::new(false), progress: &Silent };
            let ports = Namespace::run(|namespace| {
                let mut bench = Bench::set_up(range, false, Duration::from_secs(60), namespace)?;
                let default = bench.dialer(Strategy::KernelDefault)?;
                let half = bench.dial(&default, 256, &watch)?;
                assert!(half.iter().all(|(port, _)| port % 2 == half[0].0 % 2), "{half:?}");
                let dialed = bench.dial_port_by_port(u32::MAX, &watch)?;
                // The range is the whole range again, and has no free port.
                assert_eq!(bench.dial(&default, 1, &watch)?, []);
                Ok(dialed.into_iter().map(|(port, _)| port).collect::<Vec<_>>())
            });
            let ports = ports.unwrap();
            assert_eq!(ports.len(), 256);
            assert!(ports.is_sorted(), "{ports:?}");
        });
    }
}
