//! Readings of a network namespace, for `doctor`, `top` and `export`.

mod history;
mod reading;
mod target;
mod thresholds;
mod trial;

use std::collections::BTreeMap;
use std::env;
use std::path::Path;

use fourtuple_observe::doctor::{Cure, Diagnosis, Limits, Place, diagnose_at};
use fourtuple_record::snapshot::Snapshot;
use fourtuple_syscalls::message::own_user;

pub(crate) use history::{Past, time_to_exhaustion};
pub(crate) use reading::{Watch, once, probe_if_requested};
pub(crate) use target::{Destination, Namespace, TargetFlags, destination, network};
pub(crate) use thresholds::{Thresholds, read as read_thresholds};
pub(crate) use trial::try_cure;

use crate::output;

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
