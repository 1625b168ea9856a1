//! `plan()`: the record of `fourtuple plan` with the reference costs.

use std::collections::BTreeMap;
use std::time::Duration;

use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple::dial::Strategy;
use fourtuple::ports::{Closer, PortRange, PortSet};
use fourtuple_observe::plan::{self as planned, CostSource, Reuse};
use fourtuple_observe::plan::{Plan, WindowSearch};
use pyo3::prelude::*;

use crate::errors;
use crate::record;

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
        return Err(errors::invalid(py, "range: 0 is no port; expected a range from port 1 on"));
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
    let host = record::host(&planned::SYSCTLS, capabilities);
    let reuse = Reuse::of(&host.sysctls).filter(|_| kernel == "this");
    // The simulation takes up to a second.
    let results = py.detach(|| planned::results(&plan, reuse)).map_err(|error| errors::invalid(py, error))?;
    let settings = planned::settings(&plan, false, CostSource::Reference);
    record::json("plan", started, host, settings, Vec::new(), results).map_err(record::unwritable)
}
