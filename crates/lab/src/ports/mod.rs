//! `lab ports`: measures the cost of connect() under each port strategy, from an empty table to a full table.
//!
//! Published: Cloudflare, "connect() - why are you so slow?", figures 5, 7, 8 and its table of windows.

mod advice;
mod dialers;
mod fill;

use std::num::NonZeroU16;

use fourtuple::dial::Strategy;
use fourtuple::ports::PortRange;
use fourtuple_record::{PortsResults, PortsSettings, Remark};
use fourtuple_syscalls::socket::Transport;

use crate::namespace::{Family, Namespace};
use crate::{LabError, Watch};

pub use advice::advice;

/// The settings of the experiment.
#[derive(Clone, Debug)]
pub struct Ports {
    /// The namespace's ephemeral range.
    pub range: PortRange,
    /// Strategies to compare, in this order.
    pub strategies: Vec<Strategy>,
    /// Whether random windows have one try each and no fallback, as [`as_published`] makes them.
    pub windows: bool,
    /// Share of the tuples to dial, above 0 and up to 1.
    pub fill: f64,
    /// TCP or UDP.
    pub transport: Transport,
    /// IPv4 or IPv6.
    pub family: Family,
    /// Source addresses.
    pub sources: u32,
    /// Number of runs of every strategy.
    pub repeats: u32,
    /// Seed of the random choices of this process (the kernel's random choices cannot be seeded).
    pub seed: u64,
}

/// The lowest port that net.ipv4.ip_local_port_range may begin with: lower ports are privileged
/// (`ipv4_local_port_range` refuses a range that reaches below net.ipv4.ip_unprivileged_port_start).
pub(crate) const FIRST_PORT: u16 = 1024;

/// Widths of the windows in the published table.
pub const PUBLISHED_WIDTHS: [u16; 4] = [500, 1_000, 5_000, 10_000];

/// Returns a random window as published: one try and no fallback.
pub fn as_published(width: NonZeroU16) -> Strategy {
    Strategy::RandomWindow { width, tries: NonZeroU16::MIN, then_full_range: false }
}

impl Ports {
    /// Checks the settings, without system calls.
    pub fn check(&self) -> Result<(), LabError> {
        let refuse = |setting, value: String, accepted: &str| {
            Err(LabError::Setting { setting, value, accepted: accepted.to_owned() })
        };
        if self.range.low() < FIRST_PORT || self.range.len() < 8 {
            return refuse(
                "range",
                self.range.to_string(),
                "accepted are ranges of at least 8 ports from port 1024 on (the kernel takes no lower ones)",
            );
        }
        if !(self.fill > 0.0 && self.fill <= 1.0) {
            return refuse("fill", self.fill.to_string(), "accepted is a share above 0 and up to 1");
        }
        if !(1..=1024).contains(&self.sources) {
            return refuse("sources", self.sources.to_string(), "accepted are 1 to 1024");
        }
        if self.transport == Transport::Udp && self.sources > 1 {
            return refuse(
                "sources",
                self.sources.to_string(),
                "UDP is measured from 1 source: its sockets share no ports anyway",
            );
        }
        if !(1..=100).contains(&self.repeats) {
            return refuse("repeats", self.repeats.to_string(), "accepted are 1 to 100");
        }
        if self.strategies.is_empty() {
            return refuse("strategy", "(none)".to_owned(), "at least one is needed");
        }
        Ok(())
    }

    /// Returns the settings as a record keeps them.
    pub fn settings(&self) -> PortsSettings {
        PortsSettings {
            low: self.range.low(),
            high: self.range.high(),
            strategies: self.strategies.iter().map(Strategy::to_string).collect(),
            windows: self.windows,
            fill: self.fill,
            protocol: match self.transport {
                Transport::Tcp => "tcp",
                Transport::Udp => "udp",
            }
            .to_owned(),
            family: self.family.number(),
            sources: self.sources,
            repeats: self.repeats,
            seed: self.seed,
        }
    }

    /// Returns the number of 4-tuples towards the one destination.
    pub fn tuples(&self) -> u64 {
        u64::from(self.range.len()) * u64::from(self.sources)
    }

    /// Returns the number of dials of one fill.
    fn dials(&self) -> u64 {
        ((self.tuples() as f64 * self.fill).round() as u64).max(1)
    }

    /// Runs every strategy, each in a namespace of its own; odd repeats run in the reverse order (A B B A).
    pub fn run(&self, watch: &Watch<'_>) -> Result<(PortsResults, Vec<Remark>), LabError> {
        self.check()?;
        let mut results = PortsResults { tuples: self.tuples(), strategies: Vec::new(), advice: Vec::new() };
        let mut remarks = Vec::new();
        'repeats: for repeat in 1..=self.repeats {
            let mut order: Vec<Strategy> = self.strategies.clone();
            if repeat % 2 == 0 {
                order.reverse();
            }
            for strategy in order {
                watch.progress.begin(&self.part(strategy, repeat), self.dials());
                let run = Namespace::run(|namespace| fill::fill(self, strategy, repeat, namespace, watch));
                let run = match run {
                    Ok(run) => run,
                    // The results of earlier runs are kept.
                    Err(error) if !results.strategies.is_empty() => {
                        remarks.push(Remark::new("failed", format!("{strategy} failed: {error}")));
                        break 'repeats;
                    }
                    Err(error) => return Err(error),
                };
                let cut = run.dials < self.dials();
                if run.dials > 0 {
                    results.strategies.push(run);
                }
                if cut {
                    remarks.push(Remark::new(
                        "interrupted",
                        format!("interrupted during {strategy}: it is cut short, and what should follow is missing"),
                    ));
                    break 'repeats;
                }
            }
        }
        results.advice = advice(&results, self.transport);
        Ok((results, remarks))
    }

    fn part(&self, strategy: Strategy, repeat: u32) -> String {
        if self.repeats == 1 {
            strategy.to_string()
        } else {
            format!("{strategy} ({repeat}/{})", self.repeats)
        }
    }
}
