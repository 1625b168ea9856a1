//! Readings of a network namespace, for `doctor`, `top` and `export`.

mod history;
mod reading;
mod target;
mod thresholds;

use std::collections::BTreeMap;

use fourtuple_doctor::{Diagnosis, Limits, diagnose};
use fourtuple_record::snapshot::Snapshot;

pub(crate) use history::{Past, time_to_exhaustion};
pub(crate) use reading::{Watch, once, probe_if_requested};
pub(crate) use target::{Destination, Namespace, TargetFlags, destination};
pub(crate) use thresholds::{Thresholds, read as read_thresholds};

use crate::output;

/// Applies all rules. Printed commands that act on the network namespace of their own process run in the examined one.
pub(crate) fn diagnose_in(namespace: &Namespace, snapshot: &Snapshot, limits: &Limits) -> Diagnosis {
    let mut diagnosis = diagnose(snapshot, limits);
    namespace.adapt(&mut diagnosis.findings);
    diagnosis
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
