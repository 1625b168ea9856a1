use std::num::NonZeroU16;
use std::time::Duration;

use clap::Args;
use fourtuple::capabilities::LocalPortRange;
use fourtuple::dial::Strategy;
use fourtuple::ports::PortRange;
use fourtuple_bench::compare::needs_one_name;
use fourtuple_bench::lab::ports;
use fourtuple_bench::lab::time_wait::{self, Remedy};
use fourtuple_record::{PortsSettings, Saved, TimeWaitSettings};
use time::OffsetDateTime;

use crate::commands::lab::{Experiment, names_of, with_watch};
use crate::exit::Exit;
use crate::output::{self, Output, Random};
use crate::{names, units};

/// Cost of connect() under each port strategy
///
/// From an empty table to a full one. Repeats the figures and the table of "connect() - why are you so slow?" (Cloudflare, 2024) on this kernel.
#[derive(Debug, Args)]
pub(super) struct PortsFlags {
    /// Ephemeral range [default: 32768-49151]
    ///
    /// Of the lab's namespace, at least 8 ports from 1024 on; with --windows the default is 9024-65535.
    #[arg(long, value_name = "LOW-HIGH", allow_hyphen_values = true)]
    range: Option<PortRange>,
    /// Strategies to compare [default: all]
    ///
    /// In this order, of kernel-default, select-test-repeat, random-window:WIDTH, full-range and auto; by default all of them, with
    /// windows of 500.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = names::strategy())]
    strategy: Vec<Strategy>,
    /// Compare random windows of 500 to 10000 ports
    ///
    /// The table of that article: windows of 500, 1000, 5000 and 10000 ports, one attempt each, no fallback.
    #[arg(long)]
    windows: bool,
    /// Share of the tuples to dial
    #[arg(long, value_name = "SHARE", default_value = "1", value_parser = units::share, allow_hyphen_values = true)]
    fill: f64,
    /// Number of source addresses
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::up_to::<1024>, allow_hyphen_values = true)]
    sources: u32,
    /// Transport
    #[arg(long, default_value = "tcp", value_parser = ["tcp", "udp"])]
    protocol: String,
    /// IPv4 or IPv6
    #[arg(long, value_name = "4|6", default_value = "4", value_parser = family, allow_hyphen_values = true)]
    family: u8,
    /// Runs of every strategy, in turn A B B A
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::up_to::<100>, allow_hyphen_values = true)]
    repeats: u32,
    #[command(flatten)]
    random: Random,
    #[command(flatten)]
    output: Output,
}

fn family(text: &str) -> Result<u8, String> {
    match text {
        "4" => Ok(4),
        "6" => Ok(6),
        _ => Err(format!("{text:?} is not a family: expected 4 or 6")),
    }
}

/// Returns the range of "connect() - why are you so slow?".
fn article_range() -> PortRange {
    PortRange::new(9024, 65535).expect("low is below high")
}

/// Returns every strategy that this kernel supports.
pub(super) fn all_strategies(found: LocalPortRange) -> Vec<Strategy> {
    let mut all = vec![Strategy::KernelDefault, Strategy::SELECT_TEST_REPEAT];
    if found != LocalPortRange::Absent {
        all.extend([Strategy::RANDOM_WINDOW, Strategy::FullRange]);
    }
    all.push(Strategy::Auto);
    all
}

impl Experiment for PortsFlags {
    fn comparable(&self) -> Result<bool, String> {
        if self.windows {
            let message = "'--windows' measures several strategies; give '--strategy' with one name instead";
            Err(message.to_owned())
        } else if self.strategy.len() != 1 {
            Err(needs_one_name("lab ports", "--strategy"))
        } else if self.repeats != 1 {
            Err("'--repeats' is what compare does: leave it out, and say --trials".to_owned())
        } else {
            Ok(true)
        }
    }

    fn run(&self) -> anyhow::Result<Exit> {
        // Refuses bad settings before the kernel is probed.
        ports::check(&self.settings(LocalPortRange::Unproven))?;
        let started = OffsetDateTime::now_utc();
        let (result, host) = with_watch(&self.output, |watch, found| {
            let settings = self.settings(found);
            Ok((ports::run(&settings, watch)?, settings))
        })?;
        let ((results, validity), settings) = result;
        let record = output::record("lab ports", started, host, settings, validity, results);
        self.output.finish(&Saved::Ports(record))
    }
}

impl PortsFlags {
    fn settings(&self, found: LocalPortRange) -> PortsSettings {
        let mut strategies = self.strategy.clone();
        if self.windows {
            let window = |width| ports::as_published(NonZeroU16::new(width).expect("a width is above zero"));
            let width = |strategy: &Strategy| match strategy {
                Strategy::RandomWindow { width, .. } => Some(width.get()),
                _ => None,
            };
            let given: Vec<_> = strategies.iter().filter_map(width).collect();
            let published = ports::PUBLISHED_WIDTHS.into_iter().filter(|width| !given.contains(width));
            strategies.extend(published.map(window));
        } else if strategies.is_empty() {
            strategies = all_strategies(found);
        }
        let mut settings = PortsSettings {
            strategies: names_of(&strategies),
            windows: self.windows,
            fill: self.fill,
            protocol: self.protocol.clone(),
            family: self.family,
            sources: self.sources,
            repeats: self.repeats,
            seed: self.random.seed,
            ..PortsSettings::default()
        };
        if let Some(range) = self.range.or_else(|| self.windows.then(article_range)) {
            (settings.low, settings.high) = (range.low(), range.high());
        }
        settings
    }
}

/// When a client that closes runs out of ports, and what helps
///
/// Repeats the stall of "Benchmarkers, Beware the Ephemeral Port Limit" (Useful Platitudes) on this kernel.
#[derive(Debug, Args)]
pub(super) struct TimeWaitFlags {
    /// Ephemeral range
    ///
    /// Of the lab's namespace, 64 to 32768 ports from 1024 on.
    #[arg(long, value_name = "LOW-HIGH", default_value = "49152-65535", allow_hyphen_values = true)]
    range: PortRange,
    /// Remedies to try [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', long_help = format!("Remedies to try: {} [default: all]", Remedy::names()))]
    remedy: Vec<Remedy>,
    /// Limit of the wait for a stall's end
    ///
    /// TIME_WAIT lasts 60 s.
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = units::duration, allow_hyphen_values = true)]
    patience: Duration,
    #[command(flatten)]
    output: Output,
}

impl Experiment for TimeWaitFlags {
    fn comparable(&self) -> Result<bool, String> {
        if self.remedy.len() == 1 { Ok(false) } else { Err(needs_one_name("lab time-wait", "--remedy")) }
    }

    fn run(&self) -> anyhow::Result<Exit> {
        let settings = time_wait(self.range, &self.remedy, self.patience);
        time_wait::check(&settings)?;
        let started = OffsetDateTime::now_utc();
        let (result, host) = with_watch(&self.output, |watch, _| time_wait::run(&settings, watch))?;
        let (results, validity) = result;
        let record = output::record("lab time-wait", started, host, settings, validity, results);
        self.output.finish(&Saved::TimeWait(record))
    }
}

/// Returns the settings of `lab time-wait`, of all remedies if none is given.
pub(super) fn time_wait(range: PortRange, remedies: &[Remedy], patience: Duration) -> TimeWaitSettings {
    TimeWaitSettings {
        low: range.low(),
        high: range.high(),
        remedies: names_of(if remedies.is_empty() { &Remedy::ALL } else { remedies }),
        patience_ns: units::nanoseconds(patience),
    }
}
