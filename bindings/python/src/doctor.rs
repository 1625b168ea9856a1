//! `doctor()`: the record of `fourtuple doctor` without traces.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple_observe::doctor::{Diagnosis, Limits, diagnose};
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_record::snapshot::{Part, PortSearch, Snapshot};
use fourtuple_record::{DoctorResults, DoctorSettings, Host};
use pyo3::prelude::*;

use crate::errors;
use crate::record;

/// Interval at which a reading looks for signals, such as SIGINT.
const SIGNALS: Duration = Duration::from_millis(50);

/// Reads the network namespace of this process twice, applies the rules, and returns the record as JSON.
#[pyfunction]
pub(crate) fn doctor(
    py: Python<'_>,
    started: &str,
    seconds: f64,
    to: Option<&str>,
    thresholds: BTreeMap<String, f64>,
) -> PyResult<String> {
    let time = Duration::try_from_secs_f64(seconds)
        .map_err(|error| errors::invalid(py, format!("seconds = {seconds}: {error}")))?;
    let mut limits = Limits::default();
    for (id, value) in &thresholds {
        limits.set(id, *value).map_err(|error| errors::invalid(py, error))?;
    }
    let reader = Reader::new(Path::new("/"));
    let reader = match to {
        None => reader,
        Some(text) => {
            let (address, port) = destination(text).ok_or_else(|| {
                errors::invalid(
                    py,
                    format!("to = {text:?}: expected 192.0.2.1, 192.0.2.1:443 or [2001:db8::1]:443"),
                )
            })?;
            reader.only(address, port)
        }
    };
    let snapshot = read(py, reader, time)?;
    let Diagnosis { findings, checked, unchecked, unexplained: _, symptoms: _, explained: _ } =
        py.detach(|| diagnose(&snapshot, &limits));
    let settings = DoctorSettings {
        pid: None,
        netns: None,
        container: None,
        to: to.map(ToOwned::to_owned),
        for_ns: time.as_nanos() as u64,
        thresholds,
    };
    let host = host(&snapshot);
    let results = DoctorResults { findings, checked, unchecked, snapshot, history: None };
    record::json("doctor", started, host, settings, Vec::new(), results).map_err(record::unwritable)
}

fn read(py: Python<'_>, mut reader: Reader, time: Duration) -> PyResult<Snapshot> {
    let mut read = || py.detach(|| reader.read());
    let search = search();
    read();
    let began = Instant::now();
    while began.elapsed() < time {
        py.check_signals()?;
        py.detach(|| thread::sleep(SIGNALS.min(time.saturating_sub(began.elapsed()))));
    }
    let untraced = || "the Python module traces nothing; `fourtuple doctor` does, as root".to_owned();
    let (traced, accepts) = (Part::Hidden(untraced()), Part::Hidden(untraced()));
    Ok(Snapshot { search, traced, accepts, locks: Part::Hidden(untraced()), ..read() })
}

/// Probes the port search in this namespace: a program without rights can make no other.
fn search() -> Part<PortSearch> {
    let name = |found: LocalPortRange| match found {
        LocalPortRange::Unproven => Err("the probe could not connect on loopback".to_owned()),
        found => Ok(found.name().to_owned()),
    };
    let probed = || {
        let option = capabilities::probe().map_err(|error| error.to_string())?.local_port_range;
        let default = capabilities::probe_default_search().map_err(|error| error.to_string())?;
        Ok(PortSearch { default: name(default)?, option: name(option)? })
    };
    probed().into()
}

/// Returns the host with the sysctls of the namespace, which the snapshot has.
fn host(snapshot: &Snapshot) -> Host {
    let search = snapshot.search.seen().ok();
    let capabilities =
        search.map(|search| ("ip_local_port_range".to_owned(), search.option.clone())).into_iter().collect();
    Host { sysctls: snapshot.sysctls.clone(), ..record::host(&[], capabilities) }
}

fn destination(text: &str) -> Option<(IpAddr, Option<u16>)> {
    let with_port = |address: SocketAddr| (address.ip(), Some(address.port()));
    text.parse().map(with_port).ok().or_else(|| Some((text.parse().ok()?, None)))
}
