//! Readings of a network namespace, for `doctor`, `top` and `export`.

mod reading;
mod target;
mod trial;

use std::collections::{BTreeMap, VecDeque};
use std::env;
use std::path::Path;
use std::time::{Duration, Instant};

use fourtuple_observe::doctor::{Budget, Cure, Diagnosis, Limits, Place, diagnose_at};
use fourtuple_record::snapshot::{Part, Snapshot, Tuple};
use fourtuple_record::{History, Moment};
use fourtuple_syscalls::message::own_user;
pub(crate) use reading::{SHARE, Watch, once, probe_if_requested};
pub(crate) use target::{Destination, Namespace, TargetFlags, destination, network};
pub(crate) use trial::try_cure;

use crate::exit::UsageError;
use crate::units::nanoseconds;
use crate::{input, output};

/// Applies all rules. The commands can be pasted by the user of this process, and act on the examined namespace. `try_cure` tries cures
/// that findings propose.
pub(crate) fn diagnose_in(
    namespace: &Namespace,
    snapshot: &Snapshot,
    limits: &Limits,
    try_cure: &dyn Fn(Cure) -> Option<bool>,
) -> Diagnosis {
    let place = Place {
        prefix: namespace.prefix().to_owned(),
        path: namespace.path().to_owned(),
        has_sysctl: &|name| namespace.has_sysctl(name),
        try_cure,
        ..here()
    };
    diagnose_at(snapshot, limits, &place)
}

/// Returns the place of commands for the user of this process, in the network namespace of this process.
pub(crate) fn here() -> Place<'static> {
    Place { program: program(), is_root: own_user() == 0, ..Place::default() }
}

/// Returns this program: its name where each shell and `sudo` finds it, else its path.
pub(crate) fn program() -> String {
    /// `secure_path` of sudoers(5) as distributions have it.
    const PLACES: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    const NAME: &str = "fourtuple";
    let Ok(path) = env::current_exe() else { return NAME.to_owned() };
    let is_found = path.file_name().is_some_and(|name| name == NAME)
        && path.parent().is_some_and(|parent| PLACES.iter().any(|place| parent == Path::new(place)));
    if is_found { NAME.to_owned() } else { path.display().to_string() }
}

/// Returns the host with the sysctls of the namespace, which the snapshot has.
pub(crate) fn host(snapshot: &Snapshot) -> fourtuple_record::Host {
    let search = snapshot.search.seen().ok();
    let capabilities: Vec<(&str, &str)> =
        search.map(|search| ("ip_local_port_range", search.option.as_str())).into_iter().collect();
    let mut host = output::host(&[], &capabilities);
    host.sysctls = BTreeMap::clone(&snapshot.sysctls);
    host
}

// The readings of the last minutes.

/// The number of readings that are kept: ten minutes at one per second.
const KEPT: usize = 600;
/// The number of tuples in a chart.
const CHARTED: usize = 5;

/// A reading, reduced to what charts show.
#[derive(Clone, Debug)]
struct Reading {
    at: Duration,
    /// Ports in use by tuple, the most first.
    tuples: Vec<(String, u32)>,
    time_wait: u64,
    queued: u64,
}

/// The readings of the last minutes.
#[derive(Debug)]
pub(crate) struct Past {
    began: Instant,
    readings: VecDeque<Reading>,
}

impl Past {
    pub(crate) fn new() -> Past {
        Past { began: Instant::now(), readings: VecDeque::with_capacity(KEPT) }
    }

    pub(crate) fn add(&mut self, snapshot: &Snapshot) {
        if self.readings.len() == KEPT {
            self.readings.pop_front();
        }
        let connections = snapshot.connections.seen().ok();
        let tuples = connections.into_iter().flat_map(|connections| &connections.tuples).take(4 * CHARTED);
        let queued = match &snapshot.listeners {
            Part::Seen(listeners) => listeners.iter().map(|listener| u64::from(listener.waiting)).sum(),
            Part::Hidden(_) => 0,
        };
        self.readings.push_back(Reading {
            at: self.began.elapsed(),
            tuples: tuples.map(|tuple| (tuple.to_string(), tuple.in_use)).collect(),
            time_wait: connections
                .and_then(|connections| connections.states.get("time-wait").copied())
                .unwrap_or(0),
            queued,
        });
    }

    /// Returns the readings with the tuples that have the most ports in use now.
    pub(crate) fn history(&self) -> History {
        let latest = self.readings.back().into_iter().flat_map(|reading| &reading.tuples);
        let tuples: Vec<String> = latest.take(CHARTED).map(|(name, _)| name.clone()).collect();
        let in_use = |reading: &Reading, wanted: &String| {
            reading.tuples.iter().find(|(name, _)| name == wanted).map_or(0, |(_, in_use)| *in_use)
        };
        let moment = |reading: &Reading| Moment {
            at_ns: nanoseconds(reading.at),
            in_use: tuples.iter().map(|tuple| in_use(reading, tuple)).collect(),
            time_wait: reading.time_wait,
            queued: reading.queued,
        };
        History { moments: self.readings.iter().map(moment).collect(), tuples: tuples.clone() }
    }
}

/// Returns the time in seconds until a tuple has no free port at the present growth; `None` without growth.
pub(crate) fn time_to_exhaustion(tuple: &Tuple, budget: &Budget) -> Option<f64> {
    (tuple.growth_per_s > 0.0).then(|| f64::from(budget.free()) / tuple.growth_per_s)
}

// The file of `--thresholds`.

/// Thresholds that the user has set.
#[derive(Debug, Default)]
pub(crate) struct Thresholds {
    pub(crate) limits: Limits,
    /// The thresholds as written, by rule.
    pub(crate) set: BTreeMap<String, f64>,
}

/// Reads a file of thresholds; without a file, all rules have their defaults.
pub(crate) fn read_thresholds(path: Option<&Path>) -> Result<Thresholds, UsageError> {
    let Some(path) = path else { return Ok(Thresholds::default()) };
    let refuse = |why: &dyn std::fmt::Display| UsageError(format!("--thresholds {}: {why}", path.display()));
    let text = input::settings(path).map_err(|error| refuse(&error))?;
    parse(&text).map_err(|why| refuse(&why))
}

fn parse(text: &str) -> Result<Thresholds, String> {
    let set: BTreeMap<String, f64> = toml::from_str(text).map_err(|error| {
        format!("{}; expected lines of a rule and a number, such as P01 = 80", error.message())
    })?;
    let mut limits = Limits::default();
    for (id, value) in &set {
        limits.set(id, *value).map_err(|error| error.to_string())?;
    }
    Ok(Thresholds { limits, set })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_needs_a_rule_and_a_number() {
        assert_eq!(parse("P01 = 80\n").unwrap().set, [("P01".to_owned(), 80.0)].into());
        for (text, why) in
            [("X99 = 1", "no such rule"), ("P01 = \"high\"", "such as P01"), ("P01 = -1", "positive")]
        {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
