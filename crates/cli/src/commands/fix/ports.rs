use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use fourtuple_fix::{
    DestinationFilter, Estimate, FixError, Pace, Ports, PortsProgress, Programs, Target, parse_destination,
};
use fourtuple_record::measure::words::counted;
use fourtuple_record::{FixPortsSettings, Saved};
use fourtuple_report::duration;
use indicatif::HumanCount;
use ipnet::IpNet;
use time::OffsetDateTime;

use crate::commands::fix::announce;
use crate::exit::Exit;
use crate::line::Line;
use crate::output::{self, Output};
use crate::stop;
use crate::units::{self, nanoseconds};

/// Give connect() of running programs a free source port
///
/// Once a destination uses much of the port range. Attaches BPF programs to a cgroup (version 2). TCP over IPv4 and IPv6; sockets that a program has bound, or that have options
/// of their own, and UDP are left alone and counted. Needs CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_ADMIN for other network
/// namespaces, a kernel with BTF and Linux 5.17. Ends with Ctrl-C, SIGTERM or --for; nothing stays attached.
#[derive(Debug, Args)]
#[command(override_usage = "fourtuple fix ports <--cgroup|--unit|--pid|--container> [OPTIONS]")]
pub(super) struct PortsFlags {
    #[command(flatten)]
    target: TargetFlags,
    /// Act on connects to this destination only
    ///
    /// IPv6 is [2001:db8::/32]:443.
    #[arg(long, value_name = "CIDR:PORT", value_parser = destination)]
    to: Option<Destination>,
    /// Use this host's addresses within this prefix too
    ///
    /// As further source addresses, at most 64.
    #[arg(long, value_name = "CIDR", value_parser = source)]
    source: Option<IpNet>,
    /// Act once more of the port range is in use
    ///
    /// For a source and a destination.
    #[arg(long, value_name = "PERCENT", value_parser = units::percent, default_value = "25%", allow_hyphen_values = true)]
    past: f64,
    /// End after this time [default: at Ctrl-C]
    #[arg(long = "for", value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    time: Option<Duration>,
    /// Change nothing, count what would be changed
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    output: Output,
}

/// The programs to fix.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct TargetFlags {
    /// Programs in this cgroup (version 2) and below it
    ///
    /// Such as /sys/fs/cgroup/system.slice.
    #[arg(long, value_name = "PATH")]
    cgroup: Option<PathBuf>,
    /// Programs of this systemd unit: nginx.service, nginx
    #[arg(long, value_name = "NAME")]
    unit: Option<String>,
    /// Programs in the cgroup of this process
    ///
    /// If that is the root cgroup, its service, which gets a cgroup meanwhile.
    #[arg(long, value_name = "PID", value_parser = units::up_to::<{ i32::MAX as u32 }>, allow_hyphen_values = true)]
    pid: Option<u32>,
    /// Programs of this container, by its ID
    ///
    /// At least 6 digits of the ID.
    #[arg(long, value_name = "ID")]
    container: Option<String>,
}

/// A value of `--to`, as typed and as understood.
#[derive(Clone, Debug)]
struct Destination {
    text: String,
    filter: DestinationFilter,
}

fn destination(text: &str) -> Result<Destination, String> {
    let filter = parse_destination(text).map_err(|error| error.to_string())?;
    Ok(Destination { text: text.to_owned(), filter })
}

pub(crate) fn source(text: &str) -> Result<IpNet, String> {
    let address = || text.parse::<IpAddr>().ok().map(IpNet::from);
    text.parse().ok().or_else(address).ok_or_else(|| {
        format!("{text:?} is not a prefix: expected one such as 192.0.2.0/28 or 2001:db8::/124")
    })
}

impl PortsFlags {
    pub(super) fn run(self) -> anyhow::Result<Exit> {
        let programs = self.target.resolve(!self.dry_run)?;
        let cgroup = programs.directory();
        let ports = Ports {
            spares: false,
            cgroup: cgroup.to_owned(),
            past: self.past,
            source: self.source,
            destination: self.to.as_ref().map(|to| to.filter),
            time: self.time,
            dry_run: self.dry_run,
            estimate: Estimate::Before,
            pace: Pace::LIVE,
        };
        let stop = stop::flag()?;
        let started = OffsetDateTime::now_utc();
        let line = Line::new(self.output.quiet);
        let attached = || {
            announce(&self.output, self.dry_run, format_args!("connect() of {}", cgroup.display()));
        };
        let outcome = ports.run(&stop, attached, |progress| {
            if line.is_visible() {
                line.set(&words(progress));
            }
        })?;
        line.finish();
        let host = output::host(&["net.ipv4.ip_local_port_range", "net.ipv4.tcp_tw_reuse"], &[]);
        let settings = FixPortsSettings {
            cgroup: cgroup.display().to_string(),
            source: self.source.map(|source| source.to_string()),
            to: self.to.map(|to| to.text),
            past: self.past,
            for_ns: self.time.map(nanoseconds),
            dry_run: self.dry_run,
        };
        let record = output::record("fix ports", started, host, settings, outcome.validity, outcome.results);
        self.output.finish(&Saved::FixPorts(record))
    }
}

impl TargetFlags {
    fn resolve(&self, may_move: bool) -> Result<Programs, FixError> {
        let target = match (&self.cgroup, &self.unit, self.pid, &self.container) {
            (Some(path), ..) => Target::Cgroup(path.clone()),
            (_, Some(unit), ..) => Target::Unit(unit.clone()),
            (_, _, Some(process), _) => Target::Process(process),
            // clap requires one of the four.
            (.., container) => Target::Container(container.clone().unwrap_or_default()),
        };
        Ok(target.resolve(Path::new("/"), may_move)?)
    }
}

/// Returns the parts of the live line.
fn words(progress: &PortsProgress) -> Vec<String> {
    let mut words = vec![
        duration(nanoseconds(progress.elapsed)),
        format!("{:.0} connects/s", progress.connects_per_s),
        counted(progress.connects, "connect"),
        format!("{} drawn", HumanCount(progress.drawn)),
        counted(progress.probes, "probe"),
    ];
    for (number, meaning) in [
        (progress.would_draw, "would be drawn"),
        (progress.spread, "spread"),
        (progress.fallbacks, "fallbacks"),
    ] {
        if number > 0 {
            words.push(format!("{} {meaning}", HumanCount(number)));
        }
    }
    words.extend(
        progress.saved_ns.filter(|saved| *saved > 0).map(|saved| format!("about {} saved", duration(saved))),
    );
    words
}
