use std::time::Duration;

use clap::Args;
use fourtuple::listen::{AcceptPolicy, Family};
use fourtuple_bench::lab::accept::{Accept, Load};
use fourtuple_record::Saved;
use time::OffsetDateTime;

use crate::commands::lab::list::without_duplicates;
use crate::commands::lab::pool_flags::{COMPARES_BY_ITSELF, PoolFlags, policies, selection};
use crate::commands::lab::run::{Experiment, with_watch};
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::units;

/// Distribution of connections over workers, under each accept policy
///
/// Repeats the uneven distribution of "Why does one NGINX worker take all the load?" and "Keepalives considered harmful"
/// (Cloudflare) on this kernel. The default, all policies over all families, takes about half a minute.
#[derive(Debug, Args)]
pub(super) struct AcceptFlags {
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', help = format!("{} [default: all but auto]", policies()))]
    policy: Vec<AcceptPolicy>,
    /// Families, in this order: unix, tcp4, tcp6 [default: all of them]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    family: Vec<Family>,
    /// light: one connection at a time, while all workers wait; heavy: many clients without a pause
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = "light,heavy", value_parser = load)]
    load: Vec<Load>,
    /// Connections of one run under light load
    #[arg(long, value_name = "N", default_value = "48", value_parser = units::up_to::<10_000>, allow_hyphen_values = true)]
    connections: u32,
    /// Service time of every request
    #[arg(long, value_name = "TIME", default_value = "50us", value_parser = units::duration, allow_hyphen_values = true)]
    work: Duration,
    /// Length of one run under heavy load
    #[arg(long = "for", value_name = "TIME", default_value = "300ms", value_parser = units::duration, allow_hyphen_values = true)]
    length: Duration,
    /// Clients of heavy load, up to 1024, each with one request in progress; more clients than workers keep all workers busy
    #[arg(long, value_name = "N", default_value = "6", value_parser = units::up_to::<1024>, allow_hyphen_values = true)]
    clients: u32,
    #[command(flatten)]
    pool: PoolFlags,
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
            seed: self.output.seed,
        }
    }
}
