use std::time::Duration;

use clap::{Args, ValueEnum};
use fourtuple::listen::{Family, Policy};
use fourtuple_lab::accept::{Accept, Load};
use fourtuple_lab::pool::{Selection, Spend};
use fourtuple_record::Saved;
use time::OffsetDateTime;

use super::with_watch;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::units;

/// Which worker gets the connection, under each wait policy
///
/// Published: "Why does one NGINX worker take all the load?" and "Keepalives considered harmful" (Cloudflare), whose ladder
/// of load it repeats on this kernel. The default, all policies over all families, takes about half a minute.
#[derive(Debug, Args)]
pub(crate) struct AcceptFlags {
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', help = format!("{POLICIES} [default: all but auto]"))]
    policy: Vec<Policy>,
    /// Families, in this order: unix, tcp4, tcp6 [default: all of them]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    family: Vec<Family>,
    /// light: connections one after the other, when all workers wait; heavy: from many clients without a pause
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = "light,heavy", value_parser = load)]
    load: Vec<Load>,
    /// Connections of a run of light load
    #[arg(long, value_name = "N", default_value = "48", value_parser = units::up_to::<10_000>, allow_hyphen_values = true)]
    connections: u32,
    /// Service time of every request
    #[arg(long, value_name = "TIME", default_value = "50us", value_parser = units::duration, allow_hyphen_values = true)]
    work: Duration,
    /// Length of one run of heavy load
    #[arg(long = "for", value_name = "TIME", default_value = "300ms", value_parser = units::duration, allow_hyphen_values = true)]
    length: Duration,
    /// Clients of heavy load, up to 1024, which ask without a pause: more of them than workers keep all workers busy
    #[arg(long, value_name = "N", default_value = "6", value_parser = units::up_to::<1024>, allow_hyphen_values = true)]
    clients: u32,
    #[command(flatten)]
    pool: PoolFlags,
    #[command(flatten)]
    output: Output,
}

/// The help of --policy, but for the default.
pub(super) const POLICIES: &str = "Policies, in this order: exclusive, plain, blocking, rotate, rotate:N, shared-oneshot, \
                                   uring-oneshot, reuseport, reuseport-least-busy, dispatcher, auto";

/// What the two labs of accepting have in common.
#[derive(Debug, Args)]
pub(super) struct PoolFlags {
    /// Workers that share the listener, up to 64 [default: 8]
    #[arg(long, value_name = "N", value_parser = units::up_to::<64>, allow_hyphen_values = true)]
    workers: Option<u32>,
    /// How workers spend the service time: sleep for small machines, spin for those with a processor for each worker
    #[arg(long, value_enum, default_value_t = Service::Sleep)]
    pub(super) service: Service,
    /// A request that waits longer is slow
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = units::duration, allow_hyphen_values = true)]
    pub(super) slow: Duration,
    /// Runs of every cell, interleaved A B B A; from 3 on p99.9 has an interval
    #[arg(long, value_name = "N", default_value = "3", value_parser = units::up_to::<100>, allow_hyphen_values = true)]
    pub(super) repeats: u32,
}

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

fn load(text: &str) -> Result<Load, String> {
    Load::named(text).ok_or_else(|| format!("{text:?} is not a load: expected light or heavy"))
}

impl PoolFlags {
    /// Workers of our own.
    pub(super) fn workers(&self) -> u32 {
        self.workers.unwrap_or(8)
    }

    /// Workers of somebody else's server: 0, as many as answers tell of, where nobody says how many.
    pub(super) fn workers_there(&self) -> u32 {
        self.workers.unwrap_or(0)
    }
}

/// What to compare: what was named, what is named twice once; else these.
pub(super) fn selection(
    (named, policies): (&[Policy], &[Policy]),
    (family, families): (&[Family], &[Family]),
) -> Selection {
    Selection {
        policies: if named.is_empty() { policies.to_vec() } else { once(named) },
        policies_named: !named.is_empty(),
        families: if family.is_empty() { families.to_vec() } else { once(family) },
        families_named: !family.is_empty(),
    }
}

/// Each of them where it is first.
pub(super) fn once<T: Copy + PartialEq>(named: &[T]) -> Vec<T> {
    let mut left = Vec::new();
    for item in named {
        if !left.contains(item) {
            left.push(*item);
        }
    }
    left
}

impl AcceptFlags {
    pub(super) fn run(&self) -> anyhow::Result<Exit> {
        let settings = self.settings();
        settings.check()?;
        let started = OffsetDateTime::now_utc();
        let (result, host) = with_watch(&self.output, |watch, _| settings.run(watch))?;
        let (results, validity) = result;
        let record = output::record("lab accept", started, host, settings.settings(), validity, results);
        self.output.finish(&Saved::LabAccept(record))
    }

    fn settings(&self) -> Accept {
        Accept {
            selection: selection((&self.policy, &Policy::ALL), (&self.family, &Family::ALL)),
            loads: once(&self.load),
            workers: self.pool.workers(),
            connections: self.connections,
            clients: self.clients,
            work: self.work,
            spend: self.pool.service.spend(),
            slow: self.pool.slow,
            length: self.length,
            repeats: self.pool.repeats,
            seed: self.output.seed,
        }
    }
}
