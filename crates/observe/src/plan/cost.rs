use fourtuple::dial::Strategy;

use crate::plan::{FillPart, Probes, WindowSearch};

/// The cost of one probed port, depending on the number of ports that the search probes.
///
/// In a short search the kernel's hash chains are in the CPU caches, in a search of half of 56,512 ports they are not: 40 ns per port
/// against 165 ns, measured on Linux 6.18. Between two points the cost is interpolated by the logarithm of the length. Outside of
/// the points it equals the cost at the nearest point.
///
/// ```
/// use fourtuple_observe::plan::ProbeCost;
///
/// let cost = ProbeCost::new(vec![(100.0, 40.0), (10_000.0, 160.0)])?;
/// assert_eq!([1.0, 1_000.0, 1e6].map(|length| cost.ns(length).round()), [40.0, 100.0, 160.0]);
/// assert_eq!(cost.plus(90.0).ns(1.0), 130.0);
///
/// // A dial takes 15,000 ns if its first port is free, and 19,000 ns if it probes 100 ports in use.
/// assert_eq!(ProbeCost::measured(15_000.0, &[(100.0, 19_000.0)])?, ProbeCost::new(vec![(100.0, 40.0)])?);
/// assert_eq!(ProbeCost::flat(40.0)?.ns(5_000.0), 40.0);
/// # Ok::<(), fourtuple_observe::plan::CostError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeCost {
    points: Vec<(f64, f64)>,
}

/// Figures that are not valid costs.
///
/// ```
/// use fourtuple_observe::plan::{CostError, ProbeCost};
///
/// assert_eq!(ProbeCost::new(vec![]), Err(CostError::NoPoints));
/// assert_eq!(ProbeCost::flat(-1.0), Err(CostError::Point { length: 1.0, ns: -1.0 }));
/// ```
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CostError {
    /// There is no point.
    #[error(
        "no walk was measured that is long enough to tell the cost of a probe: at least 1 port has to be walked past"
    )]
    NoPoints,
    /// A length below 1, a negative cost, or a value that is not finite.
    #[error(
        "a cost of {ns} ns a port for a walk of {length} is not valid: expected a length of at least 1 and a cost of at least 0"
    )]
    Point {
        /// Length of the walk, in ports.
        length: f64,
        /// Nanoseconds per port.
        ns: f64,
    },
}

impl ProbeCost {
    /// Creates costs from points (length of the search in ports, nanoseconds per port) in any order.
    ///
    /// # Errors
    ///
    /// [`CostError`] if there is no point, if a length is below 1, if a cost is negative, or if a value is not finite.
    pub fn new(mut points: Vec<(f64, f64)>) -> Result<Self, CostError> {
        if points.is_empty() {
            return Err(CostError::NoPoints);
        }
        let bad = |&&(length, ns): &&(f64, f64)| {
            !(length.is_finite() && length >= 1.0 && ns.is_finite() && ns >= 0.0)
        };
        if let Some(&(length, ns)) = points.iter().find(bad) {
            return Err(CostError::Point { length, ns });
        }
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Ok(ProbeCost { points })
    }

    /// Creates a cost per port, in nanoseconds, that does not depend on the length of the search.
    ///
    /// # Errors
    ///
    /// [`CostError::Point`] if the cost is negative or not finite.
    pub fn flat(ns: f64) -> Result<Self, CostError> {
        ProbeCost::new(vec![(1.0, ns)])
    }

    /// Creates costs from measurements (ports in use that a dial probed, mean nanoseconds of such a dial). `floor_ns` is the duration
    /// of a dial whose first port is free. Measurements with less than one probed port are ignored. A dial faster than the floor
    /// counts as cost 0.
    ///
    /// # Errors
    ///
    /// [`CostError::NoPoints`] if no measurement is left; [`CostError::Point`] for a value that is not finite.
    pub fn measured(floor_ns: f64, means: &[(f64, f64)]) -> Result<Self, CostError> {
        let points = means.iter().filter(|(walked, _)| *walked >= 1.0);
        ProbeCost::new(
            points.map(|&(walked, mean)| (walked, ((mean - floor_ns) / walked).max(0.0))).collect(),
        )
    }

    /// Returns the nanoseconds per port in a search of `length` ports.
    pub fn ns(&self, length: f64) -> f64 {
        let after = self.points.partition_point(|point| point.0 < length);
        let right = self.points[after.min(self.points.len() - 1)];
        let left = self.points[after.saturating_sub(1)];
        if right.0 <= left.0 {
            return left.1;
        }
        let share = (length.ln() - left.0.ln()) / (right.0.ln() - left.0.ln());
        left.1 + share.clamp(0.0, 1.0) * (right.1 - left.1)
    }

    /// Returns these costs plus `ns` at each length, and at least 0.
    pub fn plus(&self, ns: f64) -> Self {
        ProbeCost {
            points: self.points.iter().map(|&(length, cost)| (length, (cost + ns).max(0.0))).collect(),
        }
    }
}

/// The costs of the parts of a dial, in nanoseconds.
///
/// ```
/// use fourtuple::dial::Strategy;
/// use fourtuple::ports::{PortRange, PortSet, Random};
/// use fourtuple_observe::plan::{Costs, CostsByFill, Fill, TupleTable, WindowSearch};
///
/// let mut random = Random::with_seed(1);
/// let range = PortRange::KERNEL_DEFAULT;
/// let mut table = TupleTable::new(range, WindowSearch::Linear, &PortSet::new(), &mut random);
/// let mut fill = Fill::new(2); // counts for each half of the ports
/// fill.dial(&mut table, Strategy::KernelDefault, 28_232, None, &mut random);
///
/// // The second half of the connections costs more than ten times as much as the first.
/// let costs = Costs::reference();
/// let [first, second] = [0, 1].map(|half| costs.mean_ns(&fill.parts[half]).unwrap());
/// assert!(second > 10.0 * first, "{first} ns, {second} ns");
///
/// let measured = costs.clone().calibrated(15_000.0, &[(100.0, 19_000.0)])?;
/// let by_fill = CostsByFill { half: measured, full: costs };
/// assert_eq!(by_fill.mean_ns(&fill.parts[1], 1.0), Some(second));
/// # Ok::<(), fourtuple_observe::plan::CostError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::exhaustive_structs, reason = "of the feature `plan`, without a promise of stability")]
pub struct Costs {
    /// connect() whose first probed port is free; on loopback this includes the handshake.
    pub floor_ns: f64,
    /// A probed port that an open connection of the tuple holds.
    pub established: ProbeCost,
    /// A probed port in TIME_WAIT: the lookup takes a lock.
    pub time_wait: ProbeCost,
    /// A port skipped without a lookup: reserved, or bound by number.
    pub skipped: ProbeCost,
    /// One more search on the same descriptor: setsockopt(), and the failed connect() before it.
    pub search_again_ns: f64,
    /// One more port by number: a new socket, bind(), and the failed connect() before it.
    pub bind_again_ns: f64,
}

impl Costs {
    /// Returns the costs of one machine (Linux 6.18, loopback, 2 cores). Prefer a calibration if there is one.
    ///
    /// Measured: the floor, 40 ns for an ESTABLISHED probe with warm caches, 90 ns more in TIME_WAIT, 165 ns in a search of 28,256 of
    /// 56,512 ports. Fitted to the means of windows of 500 to 10,000 ports in such a table: searches exceed the caches from 300
    /// ports on. In a small table they do not. Estimated: the cost of skipped ports and of further tries.
    pub fn reference() -> Self {
        let established = ProbeCost { points: vec![(10.0, 40.0), (300.0, 165.0)] };
        Costs {
            floor_ns: 15_000.0,
            time_wait: established.plus(90.0),
            established,
            skipped: ProbeCost { points: vec![(10.0, 10.0), (28_256.0, 60.0)] },
            search_again_ns: 1_000.0,
            bind_again_ns: 2_500.0,
        }
    }

    /// Returns these costs with a measured floor and measured ESTABLISHED probes (see [`ProbeCost::measured`]). The surcharge for a
    /// TIME_WAIT probe in short searches and all other costs stay.
    ///
    /// # Errors
    ///
    /// As [`ProbeCost::measured`]; [`CostError::Point`] if the floor is negative or not finite.
    pub fn calibrated(self, floor_ns: f64, means: &[(f64, f64)]) -> Result<Self, CostError> {
        if !(floor_ns.is_finite() && floor_ns >= 0.0) {
            return Err(CostError::Point { length: 1.0, ns: floor_ns });
        }
        let established = ProbeCost::measured(floor_ns, means)?;
        let dearer = self.time_wait.ns(1.0) - self.established.ns(1.0);
        Ok(Costs { floor_ns, time_wait: established.plus(dearer), established, ..self })
    }

    /// Returns the mean nanoseconds of the dials that got a port in this part of a fill; `None` if no dial did.
    pub fn mean_ns(&self, part: &FillPart) -> Option<f64> {
        let dials = part.connected as f64;
        let walks: f64 = part.walks().map(|walks| self.walks_ns(walks.probes, walks.dials as f64)).sum();
        let again =
            part.searches_again as f64 * self.search_again_ns + part.binds_again as f64 * self.bind_again_ns;
        (part.connected > 0).then(|| self.floor_ns + (walks + again) / dials)
    }

    /// Returns the nanoseconds beyond the floor of `dials` searches of similar length that made `probes` in total.
    fn walks_ns(&self, probes: Probes, dials: f64) -> f64 {
        let length = probes.taken() as f64 / dials;
        probes.established as f64 * self.established.ns(length)
            + probes.time_wait as f64 * self.time_wait.ns(length)
            + probes.skipped as f64 * self.skipped.ns(length)
    }
}

/// Costs that depend on the share of ports in use: with more sockets, fewer of them are in the CPU caches.
///
/// `half` holds up to half of the ports in use, `full` when all are. In between the costs are interpolated. Example: [`Costs`].
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::exhaustive_structs, reason = "of the feature `plan`, without a promise of stability")]
pub struct CostsByFill {
    /// Costs while half of the ports or fewer are in use.
    pub half: Costs,
    /// Costs while all ports are in use.
    pub full: Costs,
}

impl CostsByFill {
    /// Returns the mean nanoseconds of the dials that got a port in this part of a fill, at a share `fill` of the ports in use;
    /// `None` if no dial did.
    pub fn mean_ns(&self, part: &FillPart, fill: f64) -> Option<f64> {
        let towards_full = ((fill - 0.5) * 2.0).clamp(0.0, 1.0);
        let (half, full) = (self.half.mean_ns(part)?, self.full.mean_ns(part)?);
        Some(half + towards_full * (full - half))
    }
}

impl From<Costs> for CostsByFill {
    /// Converts costs that are the same at each fill.
    fn from(costs: Costs) -> Self {
        CostsByFill { half: costs.clone(), full: costs }
    }
}

/// Returns the average number of ports that a dial probes, in closed form. The simulation also models clusters of ports in use.
///
/// `used` is the share of the `ports` ports in use, 0 to 1. A search for the next free port probes 1/(1-u) ports, where u is the
/// share in use among the ports that it searches. A search by parity searches one half until that half is full, and from then on
/// all of the first half in vain before the second half. The result is between 1 and the number of ports.
///
/// # Panics
///
/// Panics for [`Strategy::Auto`], as [`Strategy::step`] does.
///
/// # Examples
///
/// ```
/// use fourtuple::dial::Strategy;
/// use fourtuple_observe::plan::{WindowSearch, expected_probes, halves};
///
/// let probes = |strategy, used| expected_probes(strategy, WindowSearch::Linear, 28_232, used).round();
/// assert_eq!(probes(Strategy::FullRange, 0.75), 4.0);
/// assert_eq!(probes(Strategy::KernelDefault, 0.75), 14_118.0);
/// assert!(halves(Strategy::KernelDefault, WindowSearch::Linear));
/// assert!(!halves(Strategy::FullRange, WindowSearch::Linear));
/// ```
pub fn expected_probes(strategy: Strategy, search: WindowSearch, ports: u32, used: f64) -> f64 {
    let (ports, used) = (f64::from(ports.max(1)), used.clamp(0.0, 1.0));
    let next = |used: f64, ports: f64| (1.0 / (1.0 - used)).min(ports.max(1.0));
    if !halves(strategy, search) {
        next(used, ports)
    } else if used < 0.5 {
        next(2.0 * used, ports / 2.0)
    } else {
        ports / 2.0 + next(2.0 * used - 1.0, ports / 2.0)
    }
}

/// Returns whether dials of `strategy` search a full half of the ports in vain before the other half: the cliff.
///
/// # Panics
///
/// Panics for [`Strategy::Auto`], as [`Strategy::step`] does.
///
/// # Examples
///
/// Example: [`expected_probes`].
pub fn halves(strategy: Strategy, search: WindowSearch) -> bool {
    match strategy {
        Strategy::KernelDefault => true,
        Strategy::FullRange => search == WindowSearch::Parity,
        Strategy::SelectTestRepeat { .. } | Strategy::RandomWindow { .. } => false,
        other => panic!("{other} must be replaced by what it chooses before its cost is asked for"),
    }
}
