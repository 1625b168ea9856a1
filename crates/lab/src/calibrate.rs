//! What the parts of a dial cost on this machine: the constants of the cost model, measured in a namespace.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use fastrand::Rng;
use fourtuple::dial::{DialError, Dialer, Strategy};
use fourtuple::ports::{Costs, PortRange, PortSet};
use fourtuple_syscalls::option::{self, Answer};
use fourtuple_syscalls::parking::Parking;
use fourtuple_syscalls::socket::{self, Transport};

use crate::namespace::{Family, Namespace};
use crate::{LabError, Watch};

/// Dials at either end of the fill that the floor is the mean of.
const FLOOR_DIALS: usize = 1_000;

/// Searches that are timed per length.
const SEARCHES: usize = 24;

/// Measures the costs of dials of `strategy` within `range`: fills a table, times what a dial costs that finds its port
/// at once, and then searches that walk past 1, 16, 64, ... ports and find nothing.
///
/// # Errors
///
/// No namespace to be had, or ended by the watcher.
pub fn calibrate(
    range: PortRange,
    strategy: Strategy,
    has_option: bool,
    watch: &Watch<'_>,
) -> Result<Costs, LabError> {
    watch.progress.begin("calibrate", u64::from(range.len()));
    Namespace::run(|namespace| Bench::set_up(range, namespace)?.costs(strategy, has_option, watch))
}

struct Bench {
    range: PortRange,
    destination: SocketAddr,
    _listener: OwnedFd,
    parking: Parking,
    taken: PortSet,
}

impl Bench {
    fn set_up(range: PortRange, namespace: &Namespace) -> Result<Self, LabError> {
        namespace.set("net.ipv4.ip_local_port_range", &format!("{} {}", range.low(), range.high()))?;
        namespace.set("net.core.somaxconn", "4194304")?;
        let port = (1..=u16::MAX).find(|port| !range.contains(*port)).ok_or_else(|| {
            LabError::Setting(format!("the range {range} leaves no port for a listener to calibrate with"))
        })?;
        Ok(Bench {
            range,
            destination: SocketAddr::new(Family::V4.loopback(), port),
            _listener: namespace.listen(Family::V4, port)?,
            parking: Parking::new().map_err(LabError::call("hold sockets"))?,
            taken: PortSet::new(),
        })
    }

    fn costs(mut self, strategy: Strategy, has_option: bool, watch: &Watch<'_>) -> Result<Costs, LabError> {
        // Auto names a free port at any fill, so every one of these is a floor dial.
        let auto = Dialer::to(self.destination).without_census().build()?;
        let mut floors = Vec::with_capacity(self.range.len() as usize);
        loop {
            if watch.stopped() {
                return Err(LabError::Setting("interrupted while calibrating: there is no plan".to_owned()));
            }
            match auto.dial() {
                Ok((stream, report)) => {
                    floors.push(report.connect);
                    self.taken.insert(report.source.port());
                    if self.parking.park(stream.into()) {
                        self.parking.settle().map_err(LabError::call("hold sockets"))?;
                        watch.progress.at(floors.len() as u64);
                    }
                }
                Err(DialError::PortsExhausted { .. }) => break,
                Err(error) => return Err(error.into()),
            }
        }
        self.parking.settle().map_err(LabError::call("hold sockets"))?;
        let floor_ns = mean_ns(&floors[..floors.len().min(FLOOR_DIALS)]).min(mean_ns(&floors));
        let mut costs = Costs::reference();
        let once = self.refused(Some(PortRange::single(self.range.low())), has_option)?;
        let mut walks = Vec::new();
        if has_option {
            let mut width = 16;
            while width < self.range.len() {
                walks.push((width, self.refused(Some(self.window(width as u16)), true)?));
                width *= 4;
            }
        }
        walks.push((self.range.len(), self.refused(None, has_option)?));
        let means: Vec<(f64, f64)> = walks
            .iter()
            .map(|(width, mean)| {
                let walked = f64::from(*width) - 1.0;
                (walked, floor_ns + (mean - once).max(0.0))
            })
            .collect();
        costs.search_again_ns = once;
        if let Strategy::SelectTestRepeat { .. } = strategy {
            costs.bind_again_ns = self.bound_and_refused()?;
        }
        costs.calibrated(floor_ns, &means).map_err(|error| LabError::Setting(error.to_string()))
    }

    /// A window of that width in the middle of the range.
    fn window(&self, width: u16) -> PortRange {
        let low = self.range.low() + (self.range.len() as u16 - width) / 2;
        PortRange::new(low, low + (width - 1)).expect("a width of at least one never runs backwards")
    }

    /// Mean time of a connect() that looks at every port of the window (or of the range) in vain.
    fn refused(&self, window: Option<PortRange>, has_option: bool) -> Result<f64, LabError> {
        let mut times = Vec::with_capacity(SEARCHES);
        for _ in 0..SEARCHES {
            let fd =
                socket::open(Transport::Tcp, self.destination, false).map_err(LabError::call("socket"))?;
            if let Some(window) = window.filter(|_| has_option) {
                let _: Answer = option::set_local_port_range(fd.as_fd(), window.low(), window.high())
                    .map_err(LabError::call("setsockopt IP_LOCAL_PORT_RANGE"))?;
            }
            let begun = Instant::now();
            let result = socket::connect(fd.as_fd(), self.destination);
            times.push(begun.elapsed());
            if result.is_ok() {
                return Err(LabError::Setting(format!(
                    "a port of {} came free while calibrating",
                    self.range
                )));
            }
        }
        Ok(trimmed_mean_ns(&mut times))
    }

    /// Mean time of bind() to a taken port and the connect() that is refused for it.
    fn bound_and_refused(&self) -> Result<f64, LabError> {
        let mut random = Rng::with_seed(1);
        let mut times = Vec::with_capacity(8 * SEARCHES);
        for _ in 0..8 * SEARCHES {
            let fd =
                socket::open(Transport::Tcp, self.destination, false).map_err(LabError::call("socket"))?;
            option::set_reuse_address(fd.as_fd(), true).map_err(LabError::call("setsockopt SO_REUSEADDR"))?;
            let port = random.u16(self.range.low()..=self.range.high());
            let local = SocketAddr::from(([0, 0, 0, 0], port));
            let begun = Instant::now();
            if socket::bind(fd.as_fd(), local).is_ok() {
                let _ = socket::connect(fd.as_fd(), self.destination);
            }
            times.push(begun.elapsed());
        }
        Ok(trimmed_mean_ns(&mut times))
    }
}

fn mean_ns(times: &[Duration]) -> f64 {
    times.iter().map(Duration::as_nanos).sum::<u128>() as f64 / times.len().max(1) as f64
}

/// The mean without the slowest eighth, which the neighbours made.
fn trimmed_mean_ns(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    mean_ns(&times[..times.len() - times.len() / 8])
}
