//! What the parts of a dial cost on this machine: the constants of the cost model, measured in a namespace.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use fastrand::Rng;
use fourtuple::dial::{DialError, Dialer, Strategy};
use fourtuple::ports::{Costs, CostsByFill, PortRange, ProbeCost};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::parking::Parking;
use fourtuple_syscalls::socket::{self, Transport};

use crate::namespace::{Family, Namespace};
use crate::ports::FIRST_PORT;
use crate::{LabError, Watch};

/// Searches that are timed per length.
const SEARCHES: u32 = 24;

/// Measures the costs of dials of `strategy` within `range`, on a table that is half full and on one that is nearly full:
/// what a dial costs that finds its port at once, what one costs that walks past half of the range first, and, when nothing
/// is free, searches that walk past 16, 64, 256, ... ports in vain.
///
/// # Errors
///
/// No namespace to be had, or ended by the watcher.
pub fn calibrate(
    range: PortRange,
    strategy: Strategy,
    has_option: bool,
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
        let mut bench = Bench::set_up(range, has_option, namespace)?;
        match strategy {
            Strategy::SelectTestRepeat { .. } => bench.by_number(watch),
            _ => bench.by_search(watch),
        }
    })
}

struct Bench {
    range: PortRange,
    has_option: bool,
    destination: SocketAddr,
    _listener: OwnedFd,
    parking: Parking,
    held: u32,
    random: Rng,
}

impl Bench {
    fn set_up(range: PortRange, has_option: bool, namespace: &Namespace) -> Result<Self, LabError> {
        namespace.set_range(range)?;
        let port = Namespace::ports_beside(range).next().ok_or_else(|| {
            LabError::setting("range", range, "a port must be left for a listener to calibrate with")
        })?;
        Ok(Bench {
            range,
            has_option,
            destination: SocketAddr::new(Family::V4.loopback(), port),
            _listener: namespace.listen(Family::V4, port)?,
            parking: Parking::new().map_err(LabError::call("hold sockets"))?,
            held: 0,
            random: Rng::with_seed(1),
        })
    }

    /// Costs of strategies that leave the search to the kernel.
    fn by_search(&mut self, watch: &Watch<'_>) -> Result<CostsByFill, LabError> {
        let default = self.dialer(Strategy::KernelDefault)?;
        let auto = self.dialer(Strategy::Auto)?;
        let half_of_it = self.range.len() / 2;
        let half_length = f64::from(half_of_it.max(1));
        let floor_half = self.fill(&default, half_of_it, watch)?.ok_or_else(no_dials)?;
        // One half of the ports is taken now: every search walks past it before it finds one in the other half. It is the
        // same half every time, so the caches hold what they can of it; a search over everything would say nothing here.
        let walk_half = self.fill(&default, SEARCHES, watch)?.unwrap_or(floor_half);
        let half = ProbeCost::measured(floor_half, &[(half_length, walk_half)])?;
        // A range of few ports has no such parts left: what was measured at its half then stands for its end as well.
        let rest = self.range.len().saturating_sub(self.held + 4 * SEARCHES);
        let floor_full = self.fill(&auto, rest, watch)?.unwrap_or(floor_half);
        let walk_full = self.fill(&default, SEARCHES, watch)?.unwrap_or(walk_half);
        self.fill(&auto, u32::MAX, watch)?;
        let once = self.refused(1)?;
        // Beyond the half, up to one of the ports that were still free, a few hundred ports: within the noise.
        let mut means = vec![(half_length, walk_full)];
        let mut width = 16;
        while self.has_option && width < half_of_it {
            means.push((f64::from(width - 1), floor_full + self.refused(width as u16)? - once));
            width *= 4;
        }
        let full = ProbeCost::measured(floor_full, &means)?;
        let costs = |floor_ns, established: ProbeCost| {
            let reference = Costs::reference();
            // TIME_WAIT is dearer by a lock, whatever the caches hold.
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

    /// Costs of ports that are bound by number: all sockets share theirs, so that only connect() refuses.
    fn by_number(&mut self, watch: &Watch<'_>) -> Result<CostsByFill, LabError> {
        let mut times = Vec::with_capacity(self.range.len() as usize);
        let mut half = None;
        for (index, port) in self.range.iter().enumerate() {
            if watch.stopped() {
                return Err(LabError::Interrupted);
            }
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
        Ok(Dialer::to(self.destination).strategy(strategy).without_census().build()?)
    }

    /// Dials `count` more or until the ports run out, and gives the mean time of a dial; `None` when no port was left.
    fn fill(&mut self, dialer: &Dialer, count: u32, watch: &Watch<'_>) -> Result<Option<f64>, LabError> {
        let mut times = Vec::new();
        while (times.len() as u32) < count {
            if watch.stopped() {
                return Err(LabError::Interrupted);
            }
            match dialer.dial() {
                Ok((stream, report)) => {
                    times.push(report.connect);
                    self.park(stream.into(), watch)?;
                }
                Err(DialError::PortsExhausted { .. }) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok((!times.is_empty()).then(|| trimmed_mean_ns(&mut times)))
    }

    fn park(&mut self, socket: OwnedFd, watch: &Watch<'_>) -> Result<(), LabError> {
        self.held += 1;
        if self.parking.park(socket) {
            watch.progress.at(u64::from(self.held));
            self.parking.settle().map_err(LabError::call("hold sockets"))?;
        }
        Ok(())
    }

    /// Mean time of a connect() that looks at that many ports in vain: in a window somewhere else each time, for the caches
    /// would hold one that was looked at before.
    fn refused(&mut self, width: u16) -> Result<f64, LabError> {
        let mut times = Vec::new();
        for _ in 0..SEARCHES {
            let fd = self.open()?;
            let room = (self.range.len() - u32::from(width)) as u16;
            let low = self.range.low() + self.random.u16(..=room);
            if self.has_option {
                let _: Answer = option::set_local_port_range(fd.as_fd(), low, low + (width - 1))
                    .map_err(LabError::call("setsockopt IP_LOCAL_PORT_RANGE"))?;
            }
            let begun = Instant::now();
            // Nothing is free, so it fails; where it does not, a port of an odd range had been missed before.
            let _ = socket::connect(fd.as_fd(), self.destination);
            times.push(begun.elapsed());
        }
        Ok(trimmed_mean_ns(&mut times))
    }

    /// bind() and connect() from a port: the socket, their time, and whether it is connected.
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

    /// Mean time of a dial from a port that is taken, of the ports up to `last`.
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

/// A namespace of our own in which not even the first dial finds a port.
fn no_dials() -> LabError {
    LabError::Call { what: "calibrate".to_owned(), error: io::ErrorKind::AddrNotAvailable.into() }
}

/// The mean without the slowest sixteenth, which the neighbours made.
fn trimmed_mean_ns(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    let kept = &times[..times.len() - times.len() / 16];
    kept.iter().map(Duration::as_nanos).sum::<u128>() as f64 / kept.len().max(1) as f64
}
