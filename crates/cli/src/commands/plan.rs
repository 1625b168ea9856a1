use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple::dial::Strategy;
use fourtuple::ports::{self, Closer, Costs, CostsByFill, Outcome, PlanError, PortRange, PortSet, Search};
use fourtuple_lab::Watch;
use fourtuple_record::{PlanPoint, PlanResults, PlanSettings, Saved};
use time::OffsetDateTime;

use crate::exit::{Exit, UsageError};
use crate::output::{self, Output};
use crate::progress::Bars;
use crate::{stop, units};

/// How many connections fit, where connect() gets slow, when the ports run out, and how many source addresses would do
///
/// What is not said is taken from this host: its range, its reserved ports, how its kernel searches, and what that costs,
/// which is measured in a network namespace of its own within a few seconds. With --kernel parity or linear nothing of
/// this host is measured.
#[derive(Debug, Args)]
pub(crate) struct Plan {
    /// Ephemeral range [default: this host's]
    #[arg(long, value_name = "LOW-HIGH", allow_hyphen_values = true)]
    range: Option<PortRange>,
    /// Reserved ports, as net.ipv4.ip_local_reserved_ports lists them [default: this host's, of this host's range]
    #[arg(long, value_name = "LIST", value_parser = reserved, allow_hyphen_values = true)]
    reserved: Option<PortSet>,
    /// Source addresses
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::count, allow_hyphen_values = true)]
    sources: u64,
    /// Destinations (address and port), equally loaded
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::count, allow_hyphen_values = true)]
    destinations: u64,
    /// New connections per second over all destinations, such as 2000/s or 20k/s
    #[arg(long, value_name = "RATE", value_parser = units::rate, allow_hyphen_values = true)]
    rate: Option<f64>,
    /// How long a connection is open
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = units::duration, allow_hyphen_values = true)]
    hold: Duration,
    /// Who closes first: us leaves the port in TIME_WAIT for 60 s
    #[arg(long, value_enum, default_value_t = Who::Us)]
    closer: Who,
    /// How the kernel searches: this one; parity (before 6.8, and without the option ever since); linear (6.8 and later)
    #[arg(long, value_enum, default_value_t = Kernel::This)]
    kernel: Kernel,
    /// Port strategy: kernel-default, select-test-repeat, random-window:WIDTH, full-range, auto
    #[arg(long, value_name = "NAME", default_value = "auto")]
    strategy: Strategy,
    /// Random windows as they were published: one try each and no way out
    #[arg(long)]
    windows: bool,
    /// Cost of a probe: measured on this host, or figures of the machine that fourtuple was made on
    /// [default: calibrated with --kernel this, else reference]
    #[arg(long, value_enum)]
    costs: Option<CostSource>,
    #[command(flatten)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Who {
    Us,
    Them,
}

impl Who {
    fn name(self) -> &'static str {
        match self {
            Who::Us => "us",
            Who::Them => "them",
        }
    }
}

impl From<Who> for Closer {
    fn from(who: Who) -> Closer {
        match who {
            Who::Us => Closer::Us,
            Who::Them => Closer::Them,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kernel {
    This,
    Parity,
    Linear,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CostSource {
    Calibrated,
    Reference,
}

fn reserved(text: &str) -> Result<PortSet, String> {
    PortSet::parse_list(text).map_err(|error| error.to_string())
}

impl Plan {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let started = OffsetDateTime::now_utc();
        let costs = self.costs.unwrap_or(match self.kernel {
            Kernel::This => CostSource::Calibrated,
            Kernel::Parity | Kernel::Linear => CostSource::Reference,
        });
        let (range, reserved) = self.ports()?;
        self.check(range, &reserved)?;
        if costs == CostSource::Calibrated {
            fourtuple_lab::prepare_process().context(CALIBRATION)?;
        }
        let found = match (self.kernel, costs) {
            (Kernel::Parity | Kernel::Linear, CostSource::Reference) => None,
            _ => Some(capabilities::probe()?.local_port_range),
        };
        let search = match (self.kernel, found) {
            (Kernel::Linear, _) | (Kernel::This, Some(LocalPortRange::Linear)) => Search::Linear,
            _ => Search::Parity,
        };
        let strategy =
            self.strategy(search, self.kernel == Kernel::This && found == Some(LocalPortRange::Absent));
        let plan = ports::Plan {
            range,
            reserved,
            sources: self.sources,
            destinations: self.destinations,
            arrival_per_s: self.rate,
            hold: self.hold,
            closer: self.closer.into(),
            search,
            costs: match costs {
                CostSource::Calibrated => self.calibrate(range, strategy, found)?,
                CostSource::Reference => Costs::reference().into(),
            },
            seed: self.output.seed,
            ..ports::Plan::new(strategy)
        };
        let outcome = plan.outcome().map_err(|error: PlanError| UsageError(error.to_string()))?;
        let capabilities: Vec<_> = found.iter().map(|found| ("ip_local_port_range", found.name())).collect();
        let sysctls = ["net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports"];
        let host = output::host(&sysctls, &capabilities);
        let settings = self.settings(&plan, costs);
        let record = output::record("plan", started, host, settings, Vec::new(), results(outcome));
        self.output.finish(&Saved::Plan(record))
    }

    /// The strategy to plan with. `auto` stands for what it chooses on such a kernel, without its book of ports: a plan is
    /// for everybody who dials there, and not for one process.
    fn strategy(&self, search: Search, absent: bool) -> Strategy {
        match self.strategy {
            Strategy::RandomWindow { width, .. } if self.windows => fourtuple_lab::ports::as_published(width),
            Strategy::Auto if absent => Strategy::KernelDefault,
            Strategy::Auto => match search {
                Search::Linear => Strategy::FullRange,
                Search::Parity => Strategy::RANDOM_WINDOW,
            },
            strategy => strategy,
        }
    }

    fn settings(&self, plan: &ports::Plan, costs: CostSource) -> PlanSettings {
        PlanSettings {
            low: plan.range.low(),
            high: plan.range.high(),
            reserved: plan.reserved.count_in(plan.range),
            sources: self.sources,
            destinations: self.destinations,
            arrival_per_s: self.rate,
            hold_ns: nanoseconds(self.hold),
            closer: self.closer.name().to_owned(),
            kernel: match plan.search {
                Search::Parity => "parity",
                Search::Linear => "linear",
            }
            .to_owned(),
            strategy: plan.strategy.to_string(),
            windows: self.windows,
            costs: match costs {
                CostSource::Calibrated => "calibrated",
                CostSource::Reference => "reference",
            }
            .to_owned(),
        }
    }

    /// The range and the reserved ports: as given, else this host's. Reserved ports of this host go with its range only.
    fn ports(&self) -> anyhow::Result<(PortRange, PortSet)> {
        match (self.range, &self.reserved) {
            (Some(range), given) => Ok((range, given.clone().unwrap_or_default())),
            (None, given) => {
                let (range, reserved) = capabilities::local_ports()
                    .context("cannot read this host's range; name one with --range LOW-HIGH")?;
                Ok((range, given.clone().unwrap_or(reserved)))
            }
        }
    }

    /// What can be refused before anything is measured.
    fn check(&self, range: PortRange, reserved: &PortSet) -> Result<(), UsageError> {
        if range.low() == 0 {
            return Err(UsageError(format!(
                "invalid value '{range}' for '--range': 0 is no port; accepted are ranges from port 1 on"
            )));
        }
        if reserved.count_in(range) == range.len() {
            let flag = if self.reserved.is_some() { "--reserved" } else { "--range" };
            return Err(UsageError(format!(
                "invalid value for '{flag}': all {} ports of {range} are reserved; accepted is what leaves one",
                range.len()
            )));
        }
        Ok(())
    }

    fn calibrate(
        &self,
        range: PortRange,
        strategy: Strategy,
        found: Option<LocalPortRange>,
    ) -> anyhow::Result<CostsByFill> {
        let stop = stop::flag()?;
        let bars = Bars::new(self.output.quiet);
        let watch = Watch { stop: &stop, progress: &bars };
        let has_option = found != Some(LocalPortRange::Absent);
        let costs = fourtuple_lab::calibrate(range, strategy, has_option, &watch).context(CALIBRATION)?;
        // Nothing of what follows can be kept: from here on the first Ctrl-C ends the process, as the second one did.
        stop.store(true, Ordering::Relaxed);
        Ok(costs)
    }
}

/// What failed, and how to do without.
const CALIBRATION: &str = "cannot calibrate (--costs reference plans without)";

fn results(outcome: Outcome) -> PlanResults {
    PlanResults {
        capacity: outcome.capacity,
        cliff_connections: outcome.cliff_connections,
        steady_tuples: outcome.steady_tuples,
        cliff_after_ns: outcome.cliff_after.map(nanoseconds),
        exhausted_after_ns: outcome.exhausted_after.map(nanoseconds),
        sources_needed: outcome.sources_needed,
        failed_dials: outcome.failed_dials,
        by_fill: outcome
            .by_fill
            .iter()
            .map(|point| PlanPoint { fill: point.fill, probes: point.probes, mean_ns: point.mean_ns })
            .collect(),
        simulated: outcome.simulated,
        advice: outcome.advice,
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
