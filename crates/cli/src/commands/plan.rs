use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple::dial::Strategy;
use fourtuple::ports::{self, Closer, Costs, CostsByFill, PlanError, PortRange, PortSet, Search};
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
        let (range, reserved) = self.ports()?;
        let costs = self.costs.unwrap_or(match self.kernel {
            Kernel::This => CostSource::Calibrated,
            Kernel::Parity | Kernel::Linear => CostSource::Reference,
        });
        self.check(range, &reserved)?;
        if costs == CostSource::Calibrated {
            fourtuple_lab::prepare_process().context(CALIBRATION)?;
        }
        let found = capabilities::probe()?.local_port_range;
        let search = match self.kernel {
            Kernel::Parity => Search::Parity,
            Kernel::Linear => Search::Linear,
            Kernel::This if found == LocalPortRange::Linear => Search::Linear,
            Kernel::This => Search::Parity,
        };
        let strategy = match self.strategy {
            Strategy::Auto => chosen(search, self.kernel == Kernel::This && found == LocalPortRange::Absent),
            strategy => strategy,
        };
        let plan = ports::Plan {
            range,
            reserved: reserved.clone(),
            sources: self.sources,
            destinations: self.destinations,
            arrival_per_s: self.rate,
            hold: self.hold,
            closer: match self.closer {
                Who::Us => Closer::Us,
                Who::Them => Closer::Them,
            },
            search,
            strategy,
            costs: match costs {
                CostSource::Calibrated => self.calibrate(range, strategy, found)?,
                CostSource::Reference => Costs::reference().into(),
            },
            seed: self.output.seed,
            ..ports::Plan::new(strategy)
        };
        let outcome = plan.outcome().map_err(|error: PlanError| UsageError(error.to_string()))?;
        let settings = PlanSettings {
            low: range.low(),
            high: range.high(),
            reserved: reserved.count_in(range),
            sources: self.sources,
            destinations: self.destinations,
            arrival_per_s: self.rate,
            hold_ns: u64::try_from(self.hold.as_nanos()).unwrap_or(u64::MAX),
            closer: match self.closer {
                Who::Us => "us",
                Who::Them => "them",
            }
            .to_owned(),
            kernel: match search {
                Search::Parity => "parity",
                Search::Linear => "linear",
            }
            .to_owned(),
            strategy: strategy.to_string(),
            costs: match costs {
                CostSource::Calibrated => "calibrated",
                CostSource::Reference => "reference",
            }
            .to_owned(),
        };
        let nanoseconds =
            |time: Option<Duration>| time.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        let results = PlanResults {
            capacity: outcome.capacity,
            cliff_connections: outcome.cliff_connections,
            steady_tuples: outcome.steady_tuples,
            cliff_after_ns: nanoseconds(outcome.cliff_after),
            exhausted_after_ns: nanoseconds(outcome.exhausted_after),
            sources_needed: outcome.sources_needed,
            failed_dials: outcome.failed_dials,
            by_fill: outcome
                .by_fill
                .iter()
                .map(|point| PlanPoint { fill: point.fill, probes: point.probes, mean_ns: point.mean_ns })
                .collect(),
            simulated: outcome.simulated,
            advice: outcome.advice,
        };
        let host = output::host(
            &["net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports"],
            &[("ip_local_port_range", found.name())],
        );
        let record = output::record("plan", started, host, settings, Vec::new(), results);
        self.output.finish(&Saved::Plan(record))
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
        found: LocalPortRange,
    ) -> anyhow::Result<CostsByFill> {
        let stop = stop::flag()?;
        let bars = Bars::new(self.output.quiet);
        let watch = Watch { stop: &stop, progress: &bars };
        fourtuple_lab::calibrate(range, strategy, found != LocalPortRange::Absent, &watch)
            .context(CALIBRATION)
    }
}

/// What failed, and how to do without.
const CALIBRATION: &str = "cannot calibrate (--costs reference plans without)";

/// What `auto` stands for: the plan is for the search alone, without a book of ports.
fn chosen(search: Search, absent: bool) -> Strategy {
    match search {
        _ if absent => Strategy::KernelDefault,
        Search::Linear => Strategy::FullRange,
        Search::Parity => Strategy::RANDOM_WINDOW,
    }
}
