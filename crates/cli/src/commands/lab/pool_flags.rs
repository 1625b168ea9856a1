//! Flags that `lab accept` and `lab keepalive` share.

use std::time::Duration;

use clap::{Args, ValueEnum};
use fourtuple::listen::{AcceptPolicy, Family};
use fourtuple_bench::lab::pool::{Selection, Spend};

use crate::commands::lab::list::without_duplicates;
use crate::units;

/// The reason why `compare` runs neither of these labs.
pub(super) const COMPARES_BY_ITSELF: &str =
    "lab accept and lab keepalive compare by themselves: give '--policy' several names, and '--repeats'";

/// Returns the help text of --policy without the default.
pub(super) fn policies() -> String {
    format!("Accept policies, in this order: {}", AcceptPolicy::names())
}

/// Flags of labs that measure a pool of workers.
#[derive(Debug, Args)]
pub(super) struct PoolFlags {
    /// Workers that share the listener, up to 64 [default: 8]
    #[arg(long, value_name = "N", value_parser = units::up_to::<64>, allow_hyphen_values = true)]
    workers: Option<u32>,
    /// How workers spend the service time: sleep for small machines, spin if each worker has a CPU
    #[arg(long, value_enum, default_value_t = Service::Sleep)]
    pub(super) service: Service,
    /// A request that waits longer is slow
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = units::duration, allow_hyphen_values = true)]
    pub(super) slow: Duration,
    /// Runs of every cell, interleaved A B B A; from 3 on p99.9 has an interval
    #[arg(long, value_name = "N", default_value = "3", value_parser = units::up_to::<100>, allow_hyphen_values = true)]
    pub(super) repeats: u32,
}

impl PoolFlags {
    /// Returns the number of workers that the lab starts.
    pub(super) fn workers(&self) -> u32 {
        self.workers.unwrap_or(8)
    }

    /// Returns the number of workers of an external server; 0 lets the lab count the workers that its responses name.
    pub(super) fn external_workers(&self) -> u32 {
        self.workers.unwrap_or(0)
    }
}

/// The way in which workers spend the service time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Service {
    Sleep,
    Spin,
}

impl Service {
    pub(super) fn spend(self) -> Spend {
        match self {
            Service::Sleep => Spend::Sleep,
            Service::Spin => Spend::Spin,
        }
    }
}

/// Returns the policies and families to measure: those on the command line without duplicates, else the defaults.
pub(super) fn selection(
    (named_policies, default_policies): (&[AcceptPolicy], &[AcceptPolicy]),
    (named_families, default_families): (&[Family], &[Family]),
) -> Selection {
    let policies = if named_policies.is_empty() { default_policies } else { named_policies };
    let families = if named_families.is_empty() { default_families } else { named_families };
    Selection {
        policies: without_duplicates(policies),
        policies_named: !named_policies.is_empty(),
        families: without_duplicates(families),
        families_named: !named_families.is_empty(),
    }
}
