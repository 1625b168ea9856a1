use std::time::Duration;

use clap::{Args, ValueEnum};
use fourtuple::listen::{AcceptPolicy, Family};
use fourtuple_bench::lab::accept::{Accept, Load};
use fourtuple_bench::lab::pool::{Selection, Spend};
use fourtuple_record::Saved;
use time::OffsetDateTime;

use crate::commands::lab::{Experiment, with_watch, without_duplicates};
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::{names, units};

/// Distribution of connections over workers, by accept policy
///
/// Repeats the uneven distribution of "Why does one NGINX worker take all the load?" and "Keepalives considered harmful"
/// (Cloudflare) on this kernel. The default, all policies over all families, takes about half a minute.
#[derive(Debug, Args)]
pub(super) struct AcceptFlags {
    /// Accept policies [default: all but auto]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = names::policy(), long_help = format!("{} [default: all but auto]", policies()))]
    policy: Vec<AcceptPolicy>,
    /// unix, tcp4, tcp6, in this order [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    family: Vec<Family>,
    /// Loads: light, heavy
    ///
    /// light: one connection at a time, while all workers wait. heavy: many clients without a pause.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = "light,heavy", value_parser = load)]
    load: Vec<Load>,
    /// Connections of a run of light load
    #[arg(long, value_name = "N", default_value = "48", value_parser = units::up_to::<10_000>, allow_hyphen_values = true)]
    connections: u32,
    /// Service time of every request
    #[arg(long, value_name = "TIME", default_value = "50us", value_parser = units::duration, allow_hyphen_values = true)]
    work: Duration,
    /// Clients of heavy load, up to 1024
    ///
    /// Each has one request in progress; more clients than workers keep all workers busy.
    #[arg(long, value_name = "N", default_value = "6", value_parser = units::up_to::<1024>, allow_hyphen_values = true)]
    clients: u32,
    #[command(flatten)]
    pool: PoolFlags,
    /// Length of a run of heavy load
    #[arg(long = "for", value_name = "TIME", default_value = "300ms", value_parser = units::duration, allow_hyphen_values = true)]
    length: Duration,
    #[command(flatten)]
    output: Output,
}

fn load(text: &str) -> Result<Load, String> {
    Load::named(text).ok_or_else(|| format!("{text:?} is not a load: expected light or heavy"))
}

impl Experiment for AcceptFlags {
    fn comparable(&self) -> Result<bool, String> {
        Err(COMPARES_BY_ITSELF.to_owned())
    }

    fn run(&self) -> anyhow::Result<Exit> {
        let settings = self.settings();
        settings.check()?;
        let started = OffsetDateTime::now_utc();
        let (result, host) = with_watch(&self.output, |watch, _| settings.run(watch))?;
        let (results, validity) = result;
        let record = output::record("lab accept", started, host, settings.settings(), validity, results);
        self.output.finish(&Saved::LabAccept(record))
    }
}

impl AcceptFlags {
    fn settings(&self) -> Accept {
        Accept {
            selection: selection((&self.policy, &AcceptPolicy::ALL), (&self.family, &Family::ALL)),
            loads: without_duplicates(&self.load),
            workers: self.pool.workers(),
            connections: self.connections,
            clients: self.clients,
            work: self.work,
            spend: self.pool.service.spend(),
            slow: self.pool.slow,
            length: self.length,
            repeats: self.pool.repeats,
        }
    }
}

// Flags that `lab accept` and `lab keepalive` share.

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
    /// Workers of the listener, up to 64 [default: 8]
    #[arg(long, value_name = "N", value_parser = units::up_to::<64>, allow_hyphen_values = true)]
    workers: Option<u32>,
    /// How service time is spent
    ///
    /// sleep for small machines, spin if each worker has a CPU.
    #[arg(long, value_enum, default_value_t = Service::Sleep)]
    pub(super) service: Service,
    /// A request that waits longer is slow
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = units::duration, allow_hyphen_values = true)]
    pub(super) slow: Duration,
    /// Runs of every cell, in turn A B B A
    ///
    /// From 3 on, p99.9 has an interval.
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
