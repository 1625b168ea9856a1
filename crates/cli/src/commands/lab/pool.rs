use std::time::Duration;

use clap::Args;
use fourtuple::listen::{AcceptPolicy, Family};
use fourtuple_bench::lab::Watch;
use fourtuple_bench::lab::accept::{self, Load};
use fourtuple_bench::lab::keepalive;
use fourtuple_bench::lab::pool::{self, Named};
use fourtuple_record::{AcceptSettings, Saved};
use time::OffsetDateTime;

use crate::commands::lab::{Experiment, given, names_of, with_watch, without_duplicates};
use crate::exit::Exit;
use crate::line::Bars;
use crate::output::{self, Output, Random};
use crate::units::{self, nanoseconds};
use crate::{names, stop};

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
    load: Vec<String>,
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

fn load(text: &str) -> Result<String, String> {
    let found = Load::named(text).map(|load| load.name().to_owned());
    found.ok_or_else(|| format!("{text:?} is not a load: expected light or heavy"))
}

impl Experiment for AcceptFlags {
    fn comparable(&self) -> Result<bool, String> {
        Err(COMPARES_BY_ITSELF.to_owned())
    }

    fn run(&self) -> anyhow::Result<Exit> {
        let (settings, named) = (self.settings(), named(&self.policy, &self.family));
        accept::check(&settings)?;
        let started = OffsetDateTime::now_utc();
        let (result, host) = with_watch(&self.output, |watch, _| accept::run(&settings, named, watch))?;
        let (results, validity) = result;
        let record = output::record("lab accept", started, host, settings, validity, results);
        self.output.finish(&Saved::LabAccept(record))
    }
}

impl AcceptFlags {
    fn settings(&self) -> AcceptSettings {
        let work_ns = nanoseconds(self.work);
        AcceptSettings {
            clients: self.clients,
            connections: self.connections.into(),
            families: given(&names_of(&self.family), names_of(&Family::ALL)),
            policies: given(&names_of(&self.policy), names_of(&AcceptPolicy::ALL)),
            load: without_duplicates(&self.load),
            short_ns: work_ns,
            long_ns: work_ns,
            for_ns: nanoseconds(self.length),
            ..self.pool.settings()
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
    #[arg(long, default_value = "sleep", value_parser = ["sleep", "spin"])]
    service: String,
    /// A request that waits longer is slow
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = units::duration, allow_hyphen_values = true)]
    slow: Duration,
    /// Runs of every cell, in turn A B B A
    ///
    /// From 3 on, p99.9 has an interval.
    #[arg(long, value_name = "N", default_value = "3", value_parser = units::up_to::<100>, allow_hyphen_values = true)]
    repeats: u32,
}

impl PoolFlags {
    /// Returns the settings of these flags, the others as usual.
    fn settings(&self) -> AcceptSettings {
        let usual = pool::usual();
        AcceptSettings {
            workers: self.workers.unwrap_or(usual.workers),
            service: self.service.clone(),
            slow_ns: nanoseconds(self.slow),
            repeats: self.repeats,
            ..usual
        }
    }
}

/// Returns what the user named of the policies and families to measure.
fn named(policies: &[AcceptPolicy], families: &[Family]) -> Named {
    Named { policies: !policies.is_empty(), families: !families.is_empty() }
}

/// Latency on kept connections to a busy worker, and what reduces it
///
/// Head-of-line blocking. Repeats the setup of "Keepalives considered harmful" (Cloudflare) on a small scale: clients keep connections to a pool of
/// workers, some requests take long, and a probe measures the latency of short ones. The default takes about a minute. The
/// whole matrix, --policy exclusive,plain,rotate,shared-oneshot,uring-oneshot,dispatcher --close-every 1,2,5,100,never
/// --for 10s, takes a quarter of an hour.
#[derive(Debug, Args)]
pub(super) struct KeepaliveFlags {
    /// Accept policies, in this order
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = names::policy(),
        long_help = format!("{} [default: exclusive, rotate, shared-oneshot]", policies()))]
    policy: Vec<AcceptPolicy>,
    /// unix, tcp4, tcp6, in this order [default: unix]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    family: Vec<Family>,
    /// Requests until a close
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,5,never", value_parser = close_every,
        allow_hyphen_values = true)]
    close_every: Vec<u64>,
    /// Service time of short requests
    ///
    /// Also of every request of the probe.
    #[arg(long, value_name = "TIME", default_value = "100us", value_parser = units::duration, allow_hyphen_values = true)]
    short: Duration,
    /// Service time of long requests
    #[arg(long, value_name = "TIME", default_value = "10ms", value_parser = units::duration, allow_hyphen_values = true)]
    long: Duration,
    /// Share of long requests
    #[arg(long, value_name = "PERCENT", default_value = "5%", value_parser = long_share, allow_hyphen_values = true)]
    long_share: f64,
    /// Mean pause of a client
    ///
    /// From a response to its next request, exponential; the probe pauses for 5ms.
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = units::duration, allow_hyphen_values = true)]
    pause: Duration,
    /// Clients, up to 1024
    ///
    /// Each has at most one request in progress.
    #[arg(long, value_name = "N", default_value = "24", value_parser = units::up_to::<1024>, allow_hyphen_values = true)]
    clients: u32,
    #[command(flatten)]
    pool: PoolFlags,
    /// An external server to measure
    ///
    /// http://HOST:PORT/PATH or unix:/PATH; --workers then gives the number of its workers.
    #[arg(long, value_name = "URL", conflicts_with_all = ["policy", "family", "service"])]
    server: Option<String>,
    /// Length of one run
    #[arg(long = "for", value_name = "TIME", default_value = "2s", value_parser = units::duration, allow_hyphen_values = true)]
    length: Duration,
    #[command(flatten)]
    random: Random,
    #[command(flatten)]
    output: Output,
}

/// Parses `5` or `never`, which gives 0.
fn close_every(text: &str) -> Result<u64, String> {
    let refuse = || format!("{text:?} is not accepted: expected a whole number from 1 to 1000000, or never");
    match text {
        "never" => Ok(0),
        _ => units::up_to::<1_000_000>(text).map(u64::from).map_err(|_| refuse()),
    }
}

/// Parses `5%` or `0%`.
fn long_share(text: &str) -> Result<f64, String> {
    if text == "0%" {
        return Ok(0.0);
    }
    units::percent(text)
        .map_err(|_| format!("{text:?} is not accepted: expected a percentage from 0% to 100%, such as 5%"))
}

impl Experiment for KeepaliveFlags {
    fn comparable(&self) -> Result<bool, String> {
        Err(COMPARES_BY_ITSELF.to_owned())
    }

    fn run(&self) -> anyhow::Result<Exit> {
        let (settings, named) = (self.settings(), named(&self.policy, &self.family));
        keepalive::check(&settings)?;
        let started = OffsetDateTime::now_utc();
        let (result, host) = if settings.server.is_some() {
            // The external server is reachable in the namespace of this process.
            let stop = stop::flag()?;
            let bars = Bars::new(self.output.quiet);
            let result = keepalive::run(&settings, named, &Watch { stop: &stop, progress: &bars })?;
            drop(bars);
            (result, output::host(&["net.core.somaxconn", "net.ipv4.ip_local_port_range"], &[]))
        } else {
            with_watch(&self.output, |watch, _| keepalive::run(&settings, named, watch))?
        };
        let (results, validity) = result;
        let record = output::record("lab keepalive", started, host, settings, validity, results);
        self.output.finish(&Saved::LabKeepalive(record))
    }
}

impl KeepaliveFlags {
    fn settings(&self) -> AcceptSettings {
        let policies = [AcceptPolicy::Exclusive, AcceptPolicy::ROTATE, AcceptPolicy::SharedOneshot];
        let settings = AcceptSettings {
            clients: self.clients,
            connections: 0,
            families: given(&names_of(&self.family), names_of(&[Family::Unix])),
            policies: given(&names_of(&self.policy), names_of(&policies)),
            close_every: without_duplicates(&self.close_every),
            load: vec![self.pool.service.clone()],
            short_ns: nanoseconds(self.short),
            long_ns: nanoseconds(self.long),
            long_share: self.long_share,
            pause_ns: nanoseconds(self.pause),
            for_ns: nanoseconds(self.length),
            seed: self.random.seed,
            ..self.pool.settings()
        };
        match &self.server {
            // Without --workers, the lab counts the workers that its responses name.
            Some(server) => {
                let workers = self.pool.workers.unwrap_or(0);
                keepalive::external(server.clone(), AcceptSettings { workers, ..settings })
            }
            None => settings,
        }
    }
}
