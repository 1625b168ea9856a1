mod accept;
mod keepalive;
mod locks;
mod planes;

use std::num::NonZeroU16;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use fourtuple::capabilities::{self, LocalPortRange};
use fourtuple::dial::Strategy;
use fourtuple::listen::{self, Policy};
use fourtuple::ports::PortRange;
use fourtuple_lab::accept::{Accept, Load};
use fourtuple_lab::pool::{Selection, Spend};
use fourtuple_lab::ports::{self, Ports};
use fourtuple_lab::time_wait::{Remedy, TimeWait};
use fourtuple_lab::{Family, LabError, Namespace, Watch};
use fourtuple_record::{AcceptResults, Host, LabResults, LabSettings, Remark, Saved};
use fourtuple_syscalls::socket::Transport;
use time::OffsetDateTime;

use super::compare::metric::several;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::progress::Bars;
use crate::{stop, units};

/// Measure what this kernel does, in a network namespace of its own; alone: most experiments in short, and report.html
///
/// No experiment touches the host or needs root: without root it makes a user namespace first. Alone, `lab` runs ports,
/// time-wait and accept in a short form, says what this kernel does and what to set here, and writes report.html (or
/// --html FILE).
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Lab {
    #[command(subcommand)]
    experiment: Option<Experiment>,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Subcommand)]
enum Experiment {
    Ports(PortsFlags),
    TimeWait(TimeWaitFlags),
    Accept(accept::AcceptFlags),
    Keepalive(keepalive::KeepaliveFlags),
    Locks(locks::LocksFlags),
    Planes(planes::PlanesFlags),
}

/// What connect() costs under each port strategy, from an empty table to a full one
///
/// Published: "connect() - why are you so slow?" (Cloudflare, 2024), whose figures and table it repeats on this kernel.
#[derive(Debug, Args)]
struct PortsFlags {
    /// Ephemeral range of the experiment's namespace, at least 8 ports from 1024 on [default: 32768-49151, with --windows 9024-65535]
    #[arg(long, value_name = "LOW-HIGH", allow_hyphen_values = true)]
    range: Option<PortRange>,
    /// Strategies to compare, in this order: kernel-default, select-test-repeat, random-window:WIDTH, full-range, auto
    /// [default: all of them, windows of 500]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    strategy: Vec<Strategy>,
    /// The table of that article: windows of 500, 1000, 5000 and 10000 ports, one try each and no way out
    #[arg(long)]
    windows: bool,
    /// Share of the tuples to dial
    #[arg(long, value_name = "0..1", default_value = "1", value_parser = units::share, allow_hyphen_values = true)]
    fill: f64,
    /// Transport
    #[arg(long, value_enum, default_value_t = Protocol::Tcp)]
    protocol: Protocol,
    /// IPv4 or IPv6
    #[arg(long, value_name = "4|6", default_value = "4", value_parser = family, allow_hyphen_values = true)]
    family: Family,
    /// Source addresses to spread over
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::up_to::<1024>, allow_hyphen_values = true)]
    sources: u32,
    /// Runs of every strategy, interleaved A B B A
    #[arg(long, value_name = "N", default_value = "1", value_parser = units::up_to::<100>, allow_hyphen_values = true)]
    repeats: u32,
    #[command(flatten)]
    output: Output,
}

/// When a client that closes its connections runs out of ports, for how long, and what helps
///
/// Published: "Benchmarkers, Beware the Ephemeral Port Limit" (Useful Platitudes), whose stall it repeats on this kernel.
#[derive(Debug, Args)]
struct TimeWaitFlags {
    /// Ephemeral range of the experiment's namespace, 64 to 32768 ports from 1024 on
    #[arg(long, value_name = "LOW-HIGH", default_value = "49152-65535", allow_hyphen_values = true)]
    range: PortRange,
    /// Remedies to try: none-under, none-over, more-sources, wider-range, tcp-tw-reuse, server-closes-first, keep-alive
    /// [default: all of them]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = remedy)]
    remedy: Vec<Remedy>,
    /// Longest time to sit out one stall; TIME_WAIT lasts 60 s
    #[arg(long, value_name = "TIME", default_value = "75s", value_parser = units::duration, allow_hyphen_values = true)]
    patience: Duration,
    #[command(flatten)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Protocol {
    Tcp,
    Udp,
}

fn family(text: &str) -> Result<Family, String> {
    match text {
        "4" => Ok(Family::V4),
        "6" => Ok(Family::V6),
        _ => Err(format!("{text:?} is not a family: expected 4 or 6")),
    }
}

fn remedy(text: &str) -> Result<Remedy, String> {
    Remedy::named(text).ok_or_else(|| {
        let names: Vec<&str> = Remedy::ALL.into_iter().map(Remedy::name).collect();
        format!("{text:?} is not a remedy: expected {}", names.join(", "))
    })
}

/// The range of `lab ports` unless another is asked for: small enough for the kernel's own search to be done in seconds.
fn short_range() -> PortRange {
    PortRange::new(32768, 49151).expect("not backwards")
}

/// The range of seed 000.
fn published_range() -> PortRange {
    PortRange::new(9024, 65535).expect("not backwards")
}

impl PortsFlags {
    fn settings(&self, found: LocalPortRange) -> Ports {
        let mut strategies = self.strategy.clone();
        if self.windows {
            for strategy in &mut strategies {
                if let Strategy::RandomWindow { width, .. } = *strategy {
                    *strategy = ports::as_published(width);
                }
            }
            let given = strategies.clone();
            let published = ports::PUBLISHED_WIDTHS.map(|width| {
                ports::as_published(NonZeroU16::new(width).expect("no window is zero ports wide"))
            });
            strategies.extend(published.iter().filter(|window| !given.contains(window)));
        } else if strategies.is_empty() {
            strategies = all_strategies(found);
        }
        Ports {
            range: self.range.unwrap_or_else(if self.windows { published_range } else { short_range }),
            strategies,
            windows: self.windows,
            fill: self.fill,
            transport: match self.protocol {
                Protocol::Tcp => Transport::Tcp,
                Protocol::Udp => Transport::Udp,
            },
            family: self.family,
            sources: self.sources,
            repeats: self.repeats,
            seed: self.output.seed,
        }
    }
}

/// Every strategy that this kernel can do.
fn all_strategies(found: LocalPortRange) -> Vec<Strategy> {
    let mut all = vec![Strategy::KernelDefault, Strategy::SELECT_TEST_REPEAT];
    if found != LocalPortRange::Absent {
        all.extend([Strategy::RANDOM_WINDOW, Strategy::FullRange]);
    }
    all.push(Strategy::Auto);
    all
}

impl Lab {
    /// Whether a run gives one number, for `compare`, and whether it has times of connect(); else which flag is to be given.
    pub(crate) fn comparable(&self) -> Result<bool, String> {
        let several = |command, flag| Err(several(command, flag));
        match &self.experiment {
            Some(Experiment::Ports(flags)) if flags.windows => {
                Err("'--windows' measures several strategies; give '--strategy' with one name instead"
                    .to_owned())
            }
            Some(Experiment::Ports(flags)) if flags.strategy.len() != 1 => several("lab ports", "--strategy"),
            Some(Experiment::Ports(flags)) if flags.repeats != 1 => {
                Err("'--repeats' is what compare does: leave it out, and say --trials".to_owned())
            }
            Some(Experiment::Ports(_)) => Ok(true),
            Some(Experiment::TimeWait(flags)) if flags.remedy.len() != 1 => {
                several("lab time-wait", "--remedy")
            }
            Some(Experiment::TimeWait(_)) => Ok(false),
            Some(Experiment::Accept(_) | Experiment::Keepalive(_)) => {
                Err("lab accept and lab keepalive compare by themselves: give '--policy' several names, and '--repeats'"
                    .to_owned())
            }
            Some(Experiment::Locks(_)) => Err(
                "lab locks compares by itself, before against after; '--change' says what, '--repeats' how often".to_owned(),
            ),
            Some(Experiment::Planes(_)) => Err(
                "lab planes compares by itself: give '--plane', '--planes' or '--spread' several names, and '--repeats'"
                    .to_owned(),
            ),
            None => Err("a bare lab gives many numbers; lab ports and lab time-wait are compared".to_owned()),
        }
    }

    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        match self.experiment {
            Some(Experiment::Ports(flags)) => run_ports(&flags),
            Some(Experiment::TimeWait(flags)) => run_time_wait(&flags),
            Some(Experiment::Accept(flags)) => flags.run(),
            Some(Experiment::Keepalive(flags)) => flags.run(),
            Some(Experiment::Locks(flags)) => flags.run(),
            Some(Experiment::Planes(flags)) => flags.run(),
            None => run_all(self.output),
        }
    }
}

fn run_ports(flags: &PortsFlags) -> anyhow::Result<Exit> {
    // Before anything is begun: what can be refused needs no kernel.
    flags.settings(LocalPortRange::Unproven).check()?;
    let started = OffsetDateTime::now_utc();
    let (result, host) = with_watch(&flags.output, |watch, found| {
        let settings = flags.settings(found);
        Ok((settings.run(watch)?, settings.settings()))
    })?;
    let ((results, validity), settings) = result;
    let record = output::record("lab ports", started, host, settings, validity, results);
    flags.output.finish(&Saved::Ports(record))
}

fn run_time_wait(flags: &TimeWaitFlags) -> anyhow::Result<Exit> {
    let settings = TimeWait {
        range: flags.range,
        remedies: if flags.remedy.is_empty() { Remedy::ALL.to_vec() } else { flags.remedy.clone() },
        patience: flags.patience,
    };
    settings.check()?;
    let started = OffsetDateTime::now_utc();
    let (result, host) = with_watch(&flags.output, |watch, _| settings.run(watch))?;
    let (results, validity) = result;
    let record = output::record("lab time-wait", started, host, settings.settings(), validity, results);
    flags.output.finish(&Saved::TimeWait(record))
}

/// The ladder, and what takes it away.
fn short_accept(seed: u64) -> Accept {
    Accept {
        selection: Selection {
            policies: vec![Policy::Exclusive, Policy::ROTATE],
            policies_named: true,
            families: vec![listen::Family::Unix],
            families_named: true,
        },
        loads: vec![Load::Light],
        workers: 8,
        connections: 48,
        clients: 1,
        work: Duration::from_micros(50),
        spend: Spend::Sleep,
        slow: Duration::from_millis(5),
        length: Duration::from_millis(100),
        repeats: 1,
        seed,
    }
}

/// Runs it as the last of several: what they found is worth keeping whatever becomes of it.
fn run_last(accept: &Accept, watch: &Watch<'_>) -> (Option<AcceptResults>, Vec<Remark>) {
    match accept.run(watch) {
        Ok((results, remarks)) => (Some(results), remarks),
        Err(LabError::Interrupted) => {
            (None, vec![Remark::new("interrupted", "interrupted before lab accept: it is missing")])
        }
        Err(error) => (None, vec![Remark::new("failed", format!("lab accept failed: {error}"))]),
    }
}

/// All but `lab keepalive`, `lab locks` and `lab planes`, short: the stall is shown where it begins, and its 60 s are not sat out.
fn run_all(mut output: Output) -> anyhow::Result<Exit> {
    let time_wait = TimeWait {
        range: PortRange::new(49152, 65535).expect("not backwards"),
        remedies: Remedy::ALL.to_vec(),
        patience: Duration::from_millis(1500),
    };
    let started = OffsetDateTime::now_utc();
    let (result, host) = with_watch(&output, |watch, found| {
        let ports = Ports {
            range: PortRange::KERNEL_DEFAULT,
            strategies: all_strategies(found),
            windows: false,
            fill: 1.0,
            transport: Transport::Tcp,
            family: Family::V4,
            sources: 1,
            repeats: 1,
            seed: output.seed,
        };
        let accept = short_accept(output.seed);
        let settings = LabSettings {
            ports: ports.settings(),
            time_wait: time_wait.settings(),
            accept: Some(accept.settings()),
        };
        let (ports, mut remarks) = ports.run(watch)?;
        let (time_wait, more) = time_wait.run(watch)?;
        remarks.extend(more);
        let (accept, more) = run_last(&accept, watch);
        remarks.extend(more);
        // One Ctrl-C ends them all.
        remarks.dedup_by(|later, first| later.id == "interrupted" && first.id == later.id);
        Ok((settings, LabResults { ports, time_wait, accept }, remarks))
    })?;
    let (settings, results, validity) = result;
    let record = output::record("lab", started, host, settings, validity, results);
    output.html.get_or_insert_with(|| "report.html".into());
    output.finish(&Saved::Lab(record))
}

/// Prepares the process, runs an experiment under the eyes of Ctrl-C and a progress bar, and describes the host.
fn with_watch<R>(
    output: &Output,
    experiment: impl FnOnce(&Watch<'_>, LocalPortRange) -> Result<R, LabError>,
) -> anyhow::Result<(R, Host)> {
    // Before anything that might start a thread.
    fourtuple_lab::prepare_process()?;
    let stop = stop::flag()?;
    let bars = Bars::new(output.quiet);
    // In a namespace of its own, so that even the probe leaves the host alone.
    let found = Namespace::run(|_| Ok(capabilities::probe()))?.map_err(fourtuple::dial::BuildError::from)?;
    let result = experiment(&Watch { stop: &stop, progress: &bars }, found.local_port_range)?;
    drop(bars);
    let host = output::host(
        &["net.ipv4.ip_local_port_range", "net.ipv4.tcp_tw_reuse", "net.core.somaxconn"],
        &[("ip_local_port_range", found.local_port_range.name())],
    );
    Ok((result, host))
}
