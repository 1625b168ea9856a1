use std::io::{self, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fourtuple_record::{Saved, TraceConnectSettings, TraceFlame};
use fourtuple_report::flame::{COLOURS, Caption};
use fourtuple_trace::{Connect, News, Protocol, Tier};
use indicatif::HumanCount;
use time::OffsetDateTime;

use super::filter::{AskedTier, address, cgroup_id, name, protocol, tier};
use super::flame;
use super::line::Line;
use super::live::Live;
use crate::exit::{Exit, UsageError};
use crate::output::{self, Output};
use crate::{stop, units};

/// How long connect() of TCP or UDP looks for a source port, apart from the handshake
///
/// By process and destination and by the parity of the port, with the connects that failed and their errno. Seen through
/// stable tracepoints (tier tp_btf) or the function itself (tier fexit), which needs CAP_BPF, CAP_PERFMON and a kernel with BTF. It ends with Ctrl-C, SIGTERM or
/// --for, and nothing stays attached.
#[derive(Debug, Args)]
pub(super) struct ConnectFlags {
    /// Of this protocol: tcp, or udp, whose searches are seen from the root of the cgroups (cgroup2 must be mounted)
    #[arg(long, value_name = "PROTOCOL", value_parser = protocol, default_value = "tcp")]
    protocol: Protocol,
    /// Of this process only, as numbered where fourtuple runs
    #[arg(long, value_name = "N", value_parser = units::up_to::<{ i32::MAX as u32 }>, allow_hyphen_values = true)]
    pid: Option<u32>,
    /// Of threads of this name only (comm): 15 bytes at most
    #[arg(long, value_name = "NAME", value_parser = name)]
    comm: Option<String>,
    /// To this address only: 192.0.2.1 or 2001:db8::1
    #[arg(long, value_name = "ADDR", value_parser = address, allow_hyphen_values = true)]
    dst: Option<IpAddr>,
    /// To this port only
    #[arg(long, value_name = "N", value_parser = units::up_to::<65_535>, allow_hyphen_values = true)]
    port: Option<u32>,
    /// Of processes in this cgroup (version 2) and those below it: /sys/fs/cgroup/system.slice
    #[arg(long, value_name = "PATH")]
    cgroup: Option<PathBuf>,
    /// End after this time
    #[arg(long = "for", value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    time: Option<Duration>,
    /// Instrument: auto, tp_btf (stable tracepoints) or fexit (the kernel's function itself, not on every kernel)
    #[arg(long, value_name = "TIER", value_parser = tier, default_value = "auto")]
    tier: AskedTier,
    /// Sample what these programs do with the processors, and draw it as a flame graph (SVG)
    #[arg(long, value_name = "FILE")]
    flame: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

impl ConnectFlags {
    pub(super) fn run(self) -> anyhow::Result<Exit> {
        if let (Protocol::Udp, Some(tier)) = (self.protocol, self.tier.0) {
            return Err(UsageError(format!(
                "invalid value '{}' for '--tier': with --protocol udp expected auto, for it has but one",
                tier.name()
            ))
            .into());
        }
        let connect = Connect {
            protocol: self.protocol,
            process: self.pid,
            name: self.comm.clone(),
            address: self.dst,
            port: self.port.map(|port| port as u16),
            cgroup: self.cgroup.as_deref().map(cgroup_id).transpose()?,
            time: self.time,
            seed: self.output.seed,
            tier: self.tier.0,
            flame: self.flame.is_some(),
        };
        let stop = stop::flag()?;
        let started = OffsetDateTime::now_utc();
        let line = Line::new(self.output.quiet);
        let attached = || {
            if !self.output.quiet {
                // Not for a terminal alone: whoever starts it from a script waits for this line.
                let _ = writeln!(io::stderr(), "tracing connect()");
            }
        };
        let mut live = Live::default();
        let outcome = connect.run(&stop, attached, |news| {
            if line.is_seen() {
                line.show(&live.next(&news.steps));
                line.tell(&words(news));
            }
        })?;
        line.finish();
        let host = output::host(&["net.ipv4.ip_local_port_range", "net.ipv4.tcp_tw_reuse"], &[]);
        let record = output::record(
            "trace connect",
            started,
            host,
            self.settings(),
            outcome.validity,
            outcome.results,
        );
        let caption =
            record.results.flame.map(|flame| (title(&flame), subtitle(&record.host.kernel, &flame)));
        let exit = self.output.finish(&Saved::TraceConnect(record))?;
        if let (Some(path), Some((title, subtitle))) = (&self.flame, &caption) {
            let caption = Caption { title, subtitle, unit: "samples" };
            flame::write(path, &outcome.folded, &caption, &self.output)?;
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
            cgroup: self.cgroup.as_ref().map(|path| path.display().to_string()),
            for_ns: self.time.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
            seed: self.output.seed,
            tier: self.tier.0.map_or("auto", Tier::name).to_owned(),
        }
    }
}

/// Where and how the stacks of a flame graph were seen.
fn subtitle(kernel: &str, flame: &TraceFlame) -> String {
    let TraceFlame { samples, samples_per_s: _, in_connect: _, in_search: _, lost } = flame;
    format!("kernel {kernel} · {} samples, {} lost · {COLOURS}", HumanCount(*samples), HumanCount(*lost))
}

fn title(flame: &TraceFlame) -> String {
    let percent = |share: f64| format!("{:.1}%", share * 100.0);
    format!(
        "fourtuple trace connect: {} in connect(), {} in the search",
        percent(flame.in_connect),
        percent(flame.in_search)
    )
}

/// How it goes, for the line.
fn words(news: &News) -> Vec<String> {
    let time = |ns: u64| format!("{:.1} us", ns as f64 / 1000.0);
    let mut words = vec![
        format!("{:.1} s", news.elapsed.as_secs_f64()),
        format!("{:.0} searches/s", news.searches_per_s),
        format!("p50 {} p99 {}", time(news.p50_ns), time(news.p99_ns)),
        format!("{} searches", HumanCount(news.searches)),
        format!("{} failed", HumanCount(news.failed)),
    ];
    if news.lost > 0 {
        words.push(format!("{} lost", HumanCount(news.lost)));
    }
    words
}
