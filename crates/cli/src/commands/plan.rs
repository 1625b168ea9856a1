use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple::dial::Strategy;
use fourtuple::ports::{Closer, PortRange, PortSet, TIME_WAIT};
use fourtuple_bench::lab::Watch;
use fourtuple_observe::plan;
use fourtuple_observe::plan::{CostSource, Costs, CostsByFill, PlanError, WindowSearch};
use fourtuple_record::Saved;
use fourtuple_record::measure::words::counted;
use time::OffsetDateTime;

use crate::exit::{Exit, UsageError};
use crate::line::Bars;
use crate::output::{self, Output, Random};
use crate::{names, stop, units};

/// Plan capacity: when connect() gets slow, and when the ports run out
///
/// Also how many connections fit, and how many source addresses are needed. Defaults come from this host: the ephemeral range, the
/// reserved ports, the search of its kernel, and the cost of a probe, which is measured in a new network namespace within a few
/// seconds, at most 120. With --kernel parity or linear nothing is measured.
#[derive(Debug, Args)]
pub(crate) struct Plan {
    /// Ephemeral range [default: this host's]
    #[arg(long, value_name = "LOW-HIGH", allow_hyphen_values = true)]
    range: Option<PortRange>,
    /// Reserved ports [default: this host's]
    ///
    /// As net.ipv4.ip_local_reserved_ports lists them. Those of this host are used with its range only.
    #[arg(long, value_name = "PORTS", value_parser = reserved, allow_hyphen_values = true)]
    reserved: Option<PortSet>,
    /// How a source port is found
    ///
    /// kernel-default (any ordinary program), select-test-repeat, random-window:WIDTH, full-range or auto.
    #[arg(long, value_name = "NAME", default_value = "kernel-default", value_parser = names::strategy())]
    strategy: Strategy,
    /// Random windows: one attempt each, no fallback
    #[arg(long)]
    windows: bool,
    /// Source addresses
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = units::count, allow_hyphen_values = true)]
    sources: u64,
    /// Destinations (address and port)
    ///
    /// Equally loaded.
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = units::count, allow_hyphen_values = true)]
    destinations: u64,
    /// New connections over all destinations
    #[arg(long, value_name = "RATE", value_parser = units::rate, allow_hyphen_values = true)]
    rate: Option<f64>,
    /// Lifetime of a connection
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = units::duration, allow_hyphen_values = true)]
    hold: Duration,
    /// Side that closes first
    ///
    /// The active close: with us, the port is in TIME_WAIT afterwards.
    #[arg(long, default_value = "us", value_parser = names::one_of(&[("us", Closer::Us), ("them", Closer::Them)]))]
    closer: Closer,
    /// Time in TIME_WAIT [default: 60s]
    ///
    /// A constant of Linux; 15s for OS X, 1s where net.ipv4.tcp_tw_reuse applies.
    #[arg(long, value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    time_wait: Option<Duration>,
    /// Port search of the kernel
    ///
    /// This host's; parity (before 6.8; later without IP_LOCAL_PORT_RANGE); linear (6.8 and later).
    #[arg(long, value_enum, default_value_t = Kernel::This)]
    kernel: Kernel,
    /// Cost of a probe
    ///
    /// Measured on this host, or the reference figures of fourtuple [default: calibrated with --kernel this, else reference]
    #[arg(long, value_parser = names::one_of(&[("calibrated", CostSource::Calibrated), ("reference", CostSource::Reference)]))]
    costs: Option<CostSource>,
    #[command(flatten)]
    random: Random,
    #[command(flatten)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kernel {
    This,
    Parity,
    Linear,
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
            fourtuple_bench::lab::prepare_process().context(CALIBRATION)?;
        }
        let found = match (self.kernel, costs) {
            (Kernel::Parity | Kernel::Linear, CostSource::Reference) => None,
            _ => Some(capabilities::probe()?.local_port_range),
        };
        let search = match (self.kernel, found) {
            (Kernel::Linear, _) | (Kernel::This, Some(LocalPortRange::Linear)) => WindowSearch::Linear,
            _ => WindowSearch::Parity,
        };
        let strategy =
            self.strategy(search, self.kernel == Kernel::This && found == Some(LocalPortRange::Absent));
        let planned = plan::Plan {
            range,
            reserved,
            sources: self.sources,
            destinations: self.destinations,
            arrival_per_s: self.rate,
            hold: self.hold,
            closer: self.closer,
            time_wait: self.time_wait.unwrap_or(TIME_WAIT),
            search,
            costs: match costs {
                CostSource::Calibrated => self.calibrate(range, strategy, found)?,
                CostSource::Reference => Costs::reference().into(),
            },
            seed: self.random.seed,
            ..plan::Plan::new(strategy)
        };
        let refuse = |error: PlanError| UsageError(error.to_string());
        let capabilities: Vec<_> = found.iter().map(|found| ("ip_local_port_range", found.name())).collect();
        let host = output::host(&plan::SYSCTLS, &capabilities);
        let reuse = plan::Reuse::of(&host.sysctls).filter(|_| self.kernel == Kernel::This);
        let results = plan::results(&planned, reuse).map_err(refuse)?;
        let settings = plan::settings(&planned, self.windows, costs);
        let record = output::record("plan", started, host, settings, Vec::new(), results);
        self.output.finish(&Saved::Plan(record))
    }

    fn strategy(&self, search: WindowSearch, absent: bool) -> Strategy {
        match self.strategy {
            Strategy::RandomWindow { width, .. } if self.windows => {
                fourtuple_bench::lab::ports::as_published(width)
            }
            wanted => plan::strategy(wanted, search, absent),
        }
    }

    /// Returns the range and the reserved ports from the flags, else from this host. The reserved ports of this host apply only
    /// with the range of this host.
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

    /// Checks the flags before anything is measured.
    fn check(&self, range: PortRange, reserved: &PortSet) -> Result<(), UsageError> {
        if range.low() == 0 {
            return Err(UsageError(format!(
                "invalid value '{range}' for '--range': 0 is not a port; expected a range from port 1 on"
            )));
        }
        if let (Some(time), Closer::Them) = (self.time_wait, self.closer) {
            return Err(UsageError(format!(
                "invalid value '{}s' for '--time-wait': with '--closer them' no connection is in TIME_WAIT here",
                time.as_secs_f64()
            )));
        }
        let time_wait = self.time_wait.unwrap_or(TIME_WAIT);
        let open = self.rate.unwrap_or(0.0) * (self.hold.as_secs_f64() + time_wait.as_secs_f64());
        if open > MAX_OPEN {
            return Err(UsageError(format!(
                "invalid value '{}s' for '--hold': with this '--rate' {} would be open at a time; \
                 expected at most {MAX_OPEN:e}",
                self.hold.as_secs_f64(),
                counted(open as u64, "connection")
            )));
        }
        if reserved.count_in(range) == range.len() {
            let flag = if self.reserved.is_some() { "--reserved" } else { "--range" };
            return Err(UsageError(format!(
                "invalid value for '{flag}': all ports of {range} are reserved ({}); expected at least one free port",
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
        let costs = fourtuple_bench::lab::calibrate(range, strategy, has_option, LIMIT, &watch);
        let costs = costs.context(CALIBRATION)?;
        // From here on there is no partial result to keep, so the next SIGINT ends the process at once.
        stop.store(true, Ordering::Relaxed);
        Ok(costs)
    }
}

/// Maximum number of connections at a time that is accepted.
const MAX_OPEN: f64 = 1e15;

/// Time limit of a calibration, which takes a few seconds on usual machines.
const LIMIT: Duration = Duration::from_secs(120);

/// Context of an error in the calibration.
const CALIBRATION: &str = "cannot calibrate (--costs reference needs no calibration)";
