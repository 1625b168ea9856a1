use super::{FillPart, Probes, Search};
use crate::dial::Strategy;

/// What looking at one port costs, by how many a search looks at.
///
/// A short walk finds the kernel's hash chains in the caches, one over half of 56,512 ports does not: 40 ns a port
/// against 165 ns, measured on Linux 6.18. Between two points the cost goes with the logarithm of the length; outside
/// them it stays what it is at the nearest.
///
/// ```
/// use fourtuple::ports::ProbeCost;
///
/// let cost = ProbeCost::new(vec![(100.0, 40.0), (10_000.0, 160.0)]).unwrap();
/// assert_eq!([1.0, 1_000.0, 1e6].map(|length| cost.ns(length).round()), [40.0, 100.0, 160.0]);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeCost {
    points: Vec<(f64, f64)>,
}

/// Why figures are no costs.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CostError {
    /// Nothing to go by.
    #[error(
        "no walk was measured that is long enough to tell the cost of a probe: at least 1 port has to be walked past"
    )]
    NoPoints,
    /// A length below one, a cost below zero, or not a number.
    #[error(
        "{length} ports at {ns} ns each is no cost: expected a length of at least 1 and a cost of at least 0"
    )]
    Point {
        /// Length of the walk, in ports.
        length: f64,
        /// Nanoseconds a port.
        ns: f64,
    },
}

impl ProbeCost {
    /// From points (length of the walk in ports, nanoseconds a port), in any order.
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

    /// The same for every length.
    pub fn flat(ns: f64) -> Result<Self, CostError> {
        ProbeCost::new(vec![(1.0, ns)])
    }

    /// From measurements: (ports walked past per dial, mean nanoseconds of such a dial), `floor_ns` being what a dial
    /// takes that walks past none. Measurements that walk past less than one port say nothing and are left out; one
    /// faster than the floor counts as free.
    pub fn measured(floor_ns: f64, means: &[(f64, f64)]) -> Result<Self, CostError> {
        let points = means.iter().filter(|(walked, _)| *walked >= 1.0);
        ProbeCost::new(
            points.map(|&(walked, mean)| (walked, ((mean - floor_ns) / walked).max(0.0))).collect(),
        )
    }

    /// Nanoseconds a port, in a walk past `length` ports.
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

    /// The same, `ns` dearer (or cheaper, but never below zero) at every length.
    pub fn plus(&self, ns: f64) -> Self {
        ProbeCost {
            points: self.points.iter().map(|&(length, cost)| (length, (cost + ns).max(0.0))).collect(),
        }
    }
}

/// What the parts of a dial cost, in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// connect() that takes the first port it looks at; on loopback this is the handshake.
    pub floor_ns: f64,
    /// A port that an open connection of the tuple holds.
    pub established: ProbeCost,
    /// A port in TIME_WAIT: the look-up takes a lock.
    pub time_wait: ProbeCost,
    /// A port that is passed without a look-up: reserved, or bound by number.
    pub skipped: ProbeCost,
    /// One more search on the same descriptor: setsockopt() and the empty-handed connect() before it.
    pub search_again_ns: f64,
    /// One more port by number: a fresh socket, bind(), and the refused connect() before it.
    pub bind_again_ns: f64,
}

impl Costs {
    /// Figures of one machine (Linux 6.18, loopback, 2 cores), to be replaced by a calibration where there is one.
    ///
    /// Measured: the floor, 40 ns an ESTABLISHED probe with warm caches, 90 ns more in TIME_WAIT, 165 ns where a search
    /// walks past 28,256 of 56,512 ports. Fitted: that walks are out of the caches from 300 ports on, to the means of
    /// windows of 500 to 10,000 ports in such a table; a small table stays cheaper. Estimated: the cost of skipped ports
    /// and of further tries.
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

    /// These costs with the floor and the ESTABLISHED probe as measured (see [`ProbeCost::measured`]); a TIME_WAIT probe
    /// stays as much dearer as it was in short walks, and the rest stays.
    pub fn calibrated(self, floor_ns: f64, means: &[(f64, f64)]) -> Result<Self, CostError> {
        if !(floor_ns.is_finite() && floor_ns >= 0.0) {
            return Err(CostError::Point { length: 1.0, ns: floor_ns });
        }
        let established = ProbeCost::measured(floor_ns, means)?;
        let dearer = self.time_wait.ns(1.0) - self.established.ns(1.0);
        Ok(Costs { floor_ns, time_wait: established.plus(dearer), established, ..self })
    }

    /// Mean nanoseconds of a dial that got its port in this part of a fill; `None` when none did.
    pub fn mean_ns(&self, part: &FillPart) -> Option<f64> {
        let dials = part.connected as f64;
        let walks: f64 = part.walks().map(|walks| self.walks_ns(walks.probes, walks.dials as f64)).sum();
        let again =
            part.searches_again as f64 * self.search_again_ns + part.binds_again as f64 * self.bind_again_ns;
        (part.connected > 0).then(|| self.floor_ns + (walks + again) / dials)
    }

    /// What `dials` walks of about the same length cost beyond the floor, that looked at `probes` in all.
    fn walks_ns(&self, probes: Probes, dials: f64) -> f64 {
        let length = probes.taken() as f64 / dials;
        probes.established as f64 * self.established.ns(length)
            + probes.time_wait as f64 * self.time_wait.ns(length)
            + probes.skipped as f64 * self.skipped.ns(length)
    }
}

/// Costs that change with the fill: the more sockets there are, the less of them the caches hold.
///
/// Up to half of the ports `half` holds, at the end `full`, and in between what lies between them.
#[derive(Clone, Debug, PartialEq)]
pub struct CostsByFill {
    /// Costs while half of the ports or fewer are in use.
    pub half: Costs,
    /// Costs when all are.
    pub full: Costs,
}

impl CostsByFill {
    /// Mean nanoseconds of a dial that got its port in this part of a fill, around the share `fill` of ports in use;
    /// `None` when none did.
    pub fn mean_ns(&self, part: &FillPart, fill: f64) -> Option<f64> {
        let towards_full = ((fill - 0.5) * 2.0).clamp(0.0, 1.0);
        let (half, full) = (self.half.mean_ns(part)?, self.full.mean_ns(part)?);
        Some(half + towards_full * (full - half))
    }
}

impl From<Costs> for CostsByFill {
    /// The same at every fill.
    fn from(costs: Costs) -> Self {
        CostsByFill { half: costs.clone(), full: costs }
    }
}

/// Ports that a dial looks at on average, in closed form: what the simulation finds to within its clumps.
///
/// `used` is the share of the `ports` ports in use, 0 to 1. A search that takes the next free port looks at 1/(1-u) of
/// them, u being the share in use of those that it goes through; by parity that is the first half until it is full, and
/// all of that half in vain, then the other half, from there on. Never more than all ports, and never below 1.
///
/// # Panics
///
/// Panics for [`Strategy::Auto`], as [`Strategy::step`] does.
pub fn expected_probes(strategy: Strategy, search: Search, ports: u32, used: f64) -> f64 {
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

/// Whether dials of `strategy` go through one half of the ports in vain once it is full: the cliff.
///
/// # Panics
///
/// Panics for [`Strategy::Auto`], as [`Strategy::step`] does.
pub fn halves(strategy: Strategy, search: Search) -> bool {
    match strategy {
        Strategy::KernelDefault => true,
        Strategy::FullRange => search == Search::Parity,
        Strategy::SelectTestRepeat { .. } | Strategy::RandomWindow { .. } => false,
        Strategy::Auto => {
            panic!("Strategy::Auto must be replaced by what it chooses before its cost is asked for")
        }
    }
}
