//! Records as JSON: `plan()`, the record of `fourtuple plan` with the reference costs, and `doctor()`, the record of `fourtuple doctor` without
//! traces.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple::dial::Strategy;
use fourtuple::ports::{Closer, PortRange, PortSet};
use fourtuple_observe::doctor::{Diagnosis, Limits, diagnose};
use fourtuple_observe::host::snapshot::Reader;
use fourtuple_observe::plan::{self as planned, CostSource, Plan, Reuse, WindowSearch};
use fourtuple_record::snapshot::{Part, PortSearch, Snapshot};
use fourtuple_record::{DoctorResults, DoctorSettings, Host, Record, SCHEMA, SCHEMA_JSON, Saved};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::Serialize;

use crate::errors;

/// Returns a record as JSON.
fn json<S, R>(command: &str, started: &str, host: Host, settings: S, results: R) -> PyResult<String>
where
    Record<S, R>: Serialize,
{
    let record = Record {
        schema: SCHEMA.to_owned(),
        command: command.to_owned(),
        started: started.to_owned(),
        host,
        settings,
        validity: Vec::new(),
        results,
    };
    // No record causes an error of serialization.
    serde_json::to_string(&record)
        .map_err(|error| PyValueError::new_err(format!("the record cannot be written: {error}")))
}

/// Returns the host of a record with the named sysctls and probed capabilities.
fn host(sysctls: &[&str], capabilities: BTreeMap<String, String>) -> Host {
    Host { capabilities, ..fourtuple_observe::host::read(Path::new("/"), sysctls) }
}

/// Checks that a text is a record of this version, with every field of its command.
#[pyfunction]
pub(crate) fn check_record(text: &str) -> PyResult<()> {
    Saved::parse(text).map(drop).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Returns the JSON schema of all records.
#[pyfunction]
pub(crate) fn schema() -> &'static str {
    SCHEMA_JSON
}

/// Maximum number of connections at a time that is accepted, as for the command.
const MAX_OPEN: f64 = 1e15;

/// Computes a plan and returns its record as JSON. Range and kernel are by default taken from this host.
#[pyfunction]
#[pyo3(signature = (started, *, range, reserved, sources, destinations, rate, hold, closer, time_wait, kernel, strategy, seed))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
pub(crate) fn plan(
    py: Python<'_>,
    started: &str,
    range: Option<(u16, u16)>,
    reserved: Option<&str>,
    sources: u64,
    destinations: u64,
    rate: Option<f64>,
    hold: f64,
    closer: &str,
    time_wait: f64,
    kernel: &str,
    strategy: &str,
    seed: u64,
) -> PyResult<String> {
    let reserved = reserved.map(PortSet::parse_list).transpose();
    let reserved = reserved.map_err(|error| errors::invalid(py, error))?;
    let (range, reserved) = match range {
        Some((low, high)) => {
            let range = PortRange::new(low, high).map_err(|error| errors::invalid(py, error))?;
            (range, reserved.unwrap_or_default())
        }
        None => {
            let (range, of_host) = capabilities::local_ports()
                .map_err(|error| errors::os(&error, "cannot read the port range of this namespace"))?;
            (range, reserved.unwrap_or(of_host))
        }
    };
    if range.low() == 0 {
        return Err(errors::invalid(py, "range: 0 is not a port; expected a range from port 1 on"));
    }
    let hold = Duration::try_from_secs_f64(hold)
        .map_err(|error| errors::invalid(py, format!("hold = {hold}: {error}")))?;
    let time_wait = Duration::try_from_secs_f64(time_wait)
        .map_err(|error| errors::invalid(py, format!("time_wait = {time_wait}: {error}")))?;
    let open = rate.unwrap_or(0.0) * (hold.as_secs_f64() + time_wait.as_secs_f64());
    if open > MAX_OPEN {
        let message = format!("hold: {open:.0} connections would be open at a time, at most {MAX_OPEN:e}");
        return Err(errors::invalid(py, message));
    }
    let closer = match closer {
        "us" => Closer::Us,
        "them" => Closer::Them,
        _ => return Err(errors::invalid(py, format!("closer = {closer:?}: expected us or them"))),
    };
    let found = match kernel {
        "this" => {
            Some(capabilities::probe().map_err(|error| errors::settings(py, &error.into()))?.local_port_range)
        }
        "parity" | "linear" => None,
        _ => {
            return Err(errors::invalid(py, format!("kernel = {kernel:?}: expected this, parity or linear")));
        }
    };
    let search = match (kernel, found) {
        ("linear", _) | (_, Some(LocalPortRange::Linear)) => WindowSearch::Linear,
        _ => WindowSearch::Parity,
    };
    let wanted: Strategy = strategy.parse().map_err(|error| errors::invalid(py, error))?;
    let strategy = planned::strategy(wanted, search, found == Some(LocalPortRange::Absent));
    let plan = Plan {
        range,
        reserved,
        sources,
        destinations,
        arrival_per_s: rate,
        hold,
        closer,
        time_wait,
        search,
        seed,
        ..Plan::new(strategy)
    };
    let capabilities: BTreeMap<String, String> =
        found.iter().map(|found| ("ip_local_port_range".to_owned(), found.name().to_owned())).collect();
    let host = host(&planned::SYSCTLS, capabilities);
    let reuse = Reuse::of(&host.sysctls).filter(|_| kernel == "this");
    // The simulation takes up to a second.
    let results = py.detach(|| planned::results(&plan, reuse)).map_err(|error| errors::invalid(py, error))?;
    let settings = planned::settings(&plan, false, CostSource::Reference);
    json("plan", started, host, settings, results)
}

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
    let host = host_of(&snapshot);
    let results = DoctorResults { findings, checked, unchecked, snapshot, history: None };
    json("doctor", started, host, settings, results)
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
fn host_of(snapshot: &Snapshot) -> Host {
    let search = snapshot.search.seen().ok();
    let capabilities =
        search.map(|search| ("ip_local_port_range".to_owned(), search.option.clone())).into_iter().collect();
    Host { sysctls: snapshot.sysctls.clone(), ..host(&[], capabilities) }
}

fn destination(text: &str) -> Option<(IpAddr, Option<u16>)> {
    let with_port = |address: SocketAddr| (address.ip(), Some(address.port()));
    text.parse().map(with_port).ok().or_else(|| Some((text.parse().ok()?, None)))
}
