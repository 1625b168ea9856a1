mod history;
mod target;
mod thresholds;
mod watch;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fourtuple_doctor::{Diagnosis, diagnose};
use fourtuple_record::snapshot::{Part, Snapshot};
use fourtuple_record::{DoctorResults, DoctorSettings, Remark, Saved};
use time::OffsetDateTime;

pub(crate) use history::{Past, name, time_to_exhaustion};
pub(crate) use target::TargetFlags;
pub(crate) use thresholds::{Thresholds, read as read_thresholds};
pub(crate) use watch::Watch;

use crate::exit::Exit;
use crate::line::Line;
use crate::output::{self, Output};
use crate::stop;
use crate::units::{self, nanoseconds};

/// Find what is wrong with the connections of this host, and what to type
///
/// Reads sockets, processes and counters twice, traces connect(), accept() and lock waits in between, and applies the rules that
/// `fourtuple explain` lists. Changes nothing. As root it sees all processes and traces; otherwise it names what it cannot see.
#[derive(Debug, Args)]
pub(crate) struct DoctorFlags {
    #[command(flatten)]
    target: TargetFlags,
    /// Examine connections to this destination only: 192.0.2.1 or 192.0.2.1:443
    #[arg(long, value_name = "ADDR", value_parser = target::destination)]
    to: Option<target::Destination>,
    /// Time between the two readings
    #[arg(long = "for", value_name = "TIME", value_parser = units::duration, default_value = "2s", allow_hyphen_values = true)]
    time: Duration,
    /// Read thresholds of rules from a TOML file, with lines such as P01 = 80
    #[arg(long, value_name = "FILE")]
    thresholds: Option<PathBuf>,
    /// Trace nothing: no BPF program is loaded
    #[arg(long)]
    no_trace: bool,
    #[command(flatten)]
    output: Output,
}

impl DoctorFlags {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let Thresholds { limits, set } = read_thresholds(self.thresholds.as_deref())?;
        let namespace = self.target.open()?;
        let stop = stop::flag()?;
        let started = OffsetDateTime::now_utc();
        let line = Line::new(self.output.quiet);
        if line.is_visible() {
            line.set(&["reading sockets, processes and counters".to_owned()]);
        }
        let (mut snapshot, elapsed) = watch::once(&namespace, self.time, !self.no_trace, &stop)?;
        line.finish();
        if let Some(to) = &self.to {
            restrict(&mut snapshot, to);
        }
        let Diagnosis { mut findings, checked, unchecked } = diagnose(&snapshot, &limits);
        let advice =
            findings.iter_mut().flat_map(|finding| finding.now.iter_mut().chain(&mut finding.proper));
        advice
            .filter(|advice| advice.is_command)
            .for_each(|advice| advice.action = self.target.address(&advice.action));
        if let (Part::Hidden(why), Part::Hidden(_)) = (&snapshot.connections, &snapshot.listeners) {
            anyhow::ensure!(!findings.is_empty(), "cannot see the sockets of the namespace: {why}");
        }
        let validity = (elapsed < self.time).then(|| {
            Remark::new(
                "interrupted",
                "stopped before the end of --for; rates and traces cover a shorter time",
            )
        });
        let exit = if findings.is_empty() { Exit::Fine } else { Exit::Findings };
        let settings = DoctorSettings {
            to: self.to.map(|to| to.text),
            thresholds: set,
            ..self.target.settings(nanoseconds(self.time))
        };
        let host = host(&snapshot);
        let results = DoctorResults { findings, checked, unchecked, snapshot, history: None };
        let validity = validity.into_iter().collect();
        let record = output::record("doctor", started, host, settings, validity, results);
        let printed = self.output.finish(&Saved::Doctor(record))?;
        Ok(if printed == Exit::Fine { exit } else { printed })
    }
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

/// Removes the tuples with other destinations.
fn restrict(snapshot: &mut Snapshot, to: &target::Destination) {
    if let Part::Seen(connections) = &mut snapshot.connections {
        connections.tuples.retain(|tuple| to.matches(tuple.destination));
    }
    if let Part::Seen(traced) = &mut snapshot.traced {
        traced.connects.retain(|connects| to.matches(connects.destination));
        traced.unavailable.retain(|failed| to.matches(failed.destination));
    }
}
