use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use fourtuple_record::{LoadResults, LoadSettings, Remark};
use fourtuple_syscalls::Endpoint;

use crate::error::LoadError;
use crate::interval::Coordination;
use crate::preflight::{Finding, Need, Preflight, Severity, Snapshot, judge};
use crate::probe::choose;
use crate::run::RunProgress;
use crate::settings::Load;

/// The sysctls that a record of a load contains.
pub const SYSCTLS: [&str; 4] = [
    "net.ipv4.ip_local_port_range",
    "net.ipv4.tcp_tw_reuse",
    "net.ipv4.tcp_max_tw_buckets",
    "net.core.somaxconn",
];

/// A run whose target is resolved and whose preflight is done.
pub struct Prepared {
    load: Load,
    endpoints: Vec<Endpoint>,
    need: Need,
    preflight: Preflight,
}

/// The results of a prepared run.
pub struct Measured {
    /// The results.
    pub results: LoadResults,
    /// The remarks that limit the results.
    pub remarks: Vec<Remark>,
    /// The log of histograms, if it was requested.
    pub log: Option<String>,
    /// Delay behind the start that a coordinator set.
    pub start_error: Duration,
}

impl Prepared {
    /// Checks the settings, resolves the target and makes the preflight in this network namespace.
    ///
    /// # Errors
    ///
    /// [`LoadError::Setting`], [`LoadError::Resolve`], [`LoadError::Tls`], [`LoadError::Preflight`]
    pub fn new(load: Load) -> Result<Prepared, LoadError> {
        let candidates = load.resolve()?;
        Prepared::at(load, candidates)
    }

    /// Prepares a run to addresses that [`Load::resolve`] has returned: all of them, or the first that answers a probe.
    ///
    /// # Errors
    ///
    /// [`LoadError::Setting`], [`LoadError::Tls`], [`LoadError::Preflight`]
    pub fn at(load: Load, candidates: Vec<Endpoint>) -> Result<Prepared, LoadError> {
        load.check()?;
        load.check_here()?;
        let (endpoints, passed_over) = choose(&load, candidates);
        let need = load.need();
        let mut preflight = judge(&snapshot(&load, &endpoints)?, &need);
        preflight.findings.extend(passed_over);
        Ok(Prepared { load, endpoints, need, preflight })
    }

    /// Returns the findings of the preflight.
    pub fn findings(&self) -> &[Finding] {
        &self.preflight.findings
    }

    /// Returns the findings that refuse the run, as one line; `None` if there are none.
    pub fn refusal(&self) -> Option<String> {
        let refusing = self.preflight.findings.iter().filter(|finding| finding.severity == Severity::Refuse);
        let lines: Vec<String> = refusing.map(ToString::to_string).collect();
        (!lines.is_empty()).then(|| lines.join("; "))
    }

    /// Returns the settings for the record. `sources` is the text as typed.
    pub fn settings(&self, sources: Option<&str>, anyway: bool) -> LoadSettings {
        self.load.settings(&self.endpoints, sources, anyway)
    }

    /// Executes the run and judges its results. Findings of the preflight become remarks and advice.
    ///
    /// # Errors
    ///
    /// The errors of [`Load::run`].
    pub fn run(
        &self,
        stop: &AtomicBool,
        coordination: Option<Coordination>,
        progress: impl FnMut(&RunProgress),
    ) -> Result<Measured, LoadError> {
        let Prepared { load, endpoints, need, preflight } = self;
        let mut outcome = load.run_coordinated(endpoints, preflight, stop, coordination, progress)?;
        let (log, start_error) = (outcome.log.take(), outcome.start_error);
        // The TIME_WAIT sockets now come from this run. The number is informational, so a failure to read it is ignored.
        let time_wait = snapshot(load, endpoints).ok().map(|snapshot| snapshot.taken.time_wait);
        let (mut results, mut remarks) = outcome.results(load, need, preflight, time_wait);
        for finding in &preflight.findings {
            match finding.severity {
                Severity::Refuse => remarks
                    .insert(0, Remark::new("anyway", format!("the run was wanted anyway, though {finding}"))),
                Severity::Warn => results.advice.insert(0, format!("Before the run: {finding}.")),
            }
        }
        Ok(Measured { results, remarks, log, start_error })
    }
}

fn snapshot(load: &Load, endpoints: &[Endpoint]) -> Result<Snapshot, LoadError> {
    let proc = Path::new("/proc");
    let read = |endpoint: &Endpoint| match endpoint {
        Endpoint::Inet(destination) => {
            Snapshot::read(proc, load.transport(), *destination, load.sources.addresses())
        }
        Endpoint::Unix(path) => Snapshot::read_unix(proc, path),
    };
    let (first, others) = endpoints.split_first().expect("a target has an address");
    let mut all = read(first)?;
    for endpoint in others {
        all.add(read(endpoint)?);
    }
    Ok(all)
}
