use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fourtuple_observe::trace::{Connect, ConnectProgress, Protocol, Tier};
use fourtuple_record::measure::words::counted;
use fourtuple_record::{Saved, TraceConnectSettings, TraceFlame};
use fourtuple_report::duration;
use fourtuple_report::flame::{COLOURS, Caption};
use indicatif::HumanCount;

use crate::commands::trace::{
    Before, Description, LiveHeat, NetworkFlags, TierChoice, address, cgroup_id, comm, process, protocol,
    run_instrument, tier, write_flame,
};
use crate::exit::{Exit, UsageError};
use crate::line::Line;
use crate::output::{Output, Random};
use crate::save;
use crate::units::{self, nanoseconds};

/// Trace connect(): how long TCP or UDP searches for a source port
///
/// Apart from the handshake. Reports searches by process and destination and by parity of the port, and failed connects with their errno. Uses stable
/// tracepoints (tier tp_btf) or the kernel's search function (tier fexit); needs CAP_BPF, CAP_PERFMON and a kernel with BTF.
/// Ends with Ctrl-C, SIGTERM or --for; nothing stays attached.
#[derive(Debug, Args)]
pub(super) struct ConnectFlags {
    /// Protocol
    ///
    /// udp needs CAP_NET_ADMIN and a mounted cgroup2 file system.
    #[arg(long, value_name = "tcp|udp", value_parser = protocol, default_value = "tcp")]
    protocol: Protocol,
    /// Connects of this process only
    ///
    /// As numbered where fourtuple runs.
    #[arg(long, value_name = "PID", value_parser = units::up_to::<{ i32::MAX as u32 }>, allow_hyphen_values = true)]
    pid: Option<u32>,
    /// Processes or threads with this name only (comm)
    ///
    /// At most 15 bytes, as in /proc/PID/comm.
    #[arg(long, value_name = "NAME", value_parser = comm)]
    comm: Option<String>,
    /// Connects to this address only
    #[arg(long, value_name = "ADDR", value_parser = address, allow_hyphen_values = true)]
    dst: Option<IpAddr>,
    /// Connects to this port only
    #[arg(long, value_name = "N", value_parser = units::up_to::<65_535>, allow_hyphen_values = true)]
    port: Option<u32>,
    #[command(flatten)]
    network: NetworkFlags,
    /// Processes in this cgroup (version 2) and below it
    ///
    /// Such as /sys/fs/cgroup/system.slice.
    #[arg(long, value_name = "PATH")]
    cgroup: Option<PathBuf>,
    /// End after this time [default: at Ctrl-C]
    #[arg(long = "for", value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    time: Option<Duration>,
    /// How connects are traced
    ///
    /// tp_btf (stable tracepoints), fexit (the kernel's search function), or auto, the first that attaches.
    #[arg(long, value_name = "auto|tp_btf|fexit", value_parser = tier, default_value = "auto")]
    tier: TierChoice,
    #[command(flatten)]
    random: Random,
    /// Sample stacks, and write a flame graph (SVG)
    #[arg(long, value_name = "FILE", value_parser = save::new_file)]
    flame: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

impl ConnectFlags {
    pub(super) fn run(mut self) -> anyhow::Result<Exit> {
        self.network.or_own(self.pid, self.cgroup.as_deref());
        if let (Protocol::Udp, Some(tier)) = (self.protocol, self.tier.0) {
            return Err(UsageError(format!(
                "invalid value '{}' for '--tier': --protocol udp has one tier; expected auto",
                tier.name()
            ))
            .into());
        }
        let connect = Connect {
            protocol: self.protocol,
            process: self.pid.map(process).transpose()?,
            name: self.comm.clone(),
            address: self.dst,
            port: self.port.map(|port| port as u16),
            cgroup: self.cgroup.as_deref().map(cgroup_id).transpose()?,
            network: None,
            time: self.time,
            seed: self.random.seed,
            tier: self.tier.0,
            flame: self.flame.is_some(),
        };
        let description = Description {
            command: "trace connect",
            target: "connect()",
            sysctls: &["net.ipv4.ip_local_port_range", "net.ipv4.tcp_tw_reuse"],
        };
        let mut live = LiveHeat::default();
        let show = |line: &Line, progress: &ConnectProgress| {
            line.set_picture(&live.next(&progress.steps));
            line.set(&words(progress));
        };
        let (record, folded) = self.network.within(|network| {
            let before = Before::read();
            let connect = Connect { network, ..connect };
            let (mut record, folded) =
                run_instrument(&description, &connect, self.settings(), &self.output, show)?;
            record.results.symptoms = before.explain(&mut record.results.calls);
            Ok((record, folded))
        })?;
        let caption =
            record.results.flame.map(|flame| (title(&flame), subtitle(&record.host.kernel, &flame)));
        let exit = self.output.finish(&Saved::TraceConnect(record))?;
        if let (Some(path), Some((title, subtitle))) = (&self.flame, &caption) {
            let caption = Caption { title, subtitle, unit: "samples" };
            write_flame(path, &folded, &caption, &self.output)?;
        }
        Ok(exit)
    }

    fn settings(&self) -> TraceConnectSettings {
        TraceConnectSettings {
            protocol: self.protocol.name().to_owned(),
            process: self.pid,
            name: self.comm.clone(),
            destination: self.dst.map(|address| address.to_string()),
            port: self.port.map(|port| port as u16),
            netns: self.network.path(),
            cgroup: self.cgroup.as_ref().map(|path| path.display().to_string()),
            for_ns: self.time.map(nanoseconds),
            seed: self.random.seed,
            tier: self.tier.0.map_or("auto", Tier::name).to_owned(),
        }
    }
}

/// Returns the subtitle of the flame graph: kernel, number of samples and colours.
fn subtitle(kernel: &str, flame: &TraceFlame) -> String {
    let TraceFlame { samples, samples_per_s: _, in_connect: _, in_search: _, lost } = flame;
    format!("kernel {kernel} · {}, {} lost · {COLOURS}", counted(*samples, "sample"), HumanCount(*lost))
}

/// Returns the title of the flame graph.
fn title(flame: &TraceFlame) -> String {
    let percent = |share: f64| format!("{:.1}%", share * 100.0);
    format!(
        "fourtuple trace connect: {} in connect(), {} in the search",
        percent(flame.in_connect),
        percent(flame.in_search)
    )
}

/// Returns the parts of the live line.
fn words(progress: &ConnectProgress) -> Vec<String> {
    let mut words = vec![
        duration(nanoseconds(progress.elapsed)),
        format!("{:.0} searches/s", progress.searches_per_s),
        format!("p50 {} p99 {}", duration(progress.p50_ns), duration(progress.p99_ns)),
        counted(progress.searches, "search"),
        format!("{} failed", HumanCount(progress.failed)),
    ];
    if progress.lost > 0 {
        words.push(format!("{} lost", HumanCount(progress.lost)));
    }
    words
}
