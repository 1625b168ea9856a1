use std::io::{self, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fourtuple_record::{Saved, TraceAcceptSettings};
use fourtuple_trace::{Accept, AcceptNews};
use indicatif::HumanCount;
use time::OffsetDateTime;

use super::filter::{address, cgroup_id, name};
use super::line::Line;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::{stop, units};

/// How long TCP connections wait until accept() has them, and with which worker they are then
///
/// By listener and by thread: the wait in the queue and its depth, threads woken for nothing, overflows, who has how many
/// connections, who closes first. Seen through stable tracepoints (tier tp_btf), which needs CAP_BPF, CAP_PERFMON, a kernel
/// with BTF and Linux 6.3. It ends with Ctrl-C, SIGTERM or --for, and nothing stays attached.
#[derive(Debug, Args)]
pub(super) struct AcceptFlags {
    /// Accepts of this process only, as numbered where fourtuple runs
    #[arg(long, value_name = "N", value_parser = units::up_to::<{ i32::MAX as u32 }>, allow_hyphen_values = true)]
    pid: Option<u32>,
    /// Of threads of this name only (comm): 15 bytes at most
    #[arg(long, value_name = "NAME", value_parser = name)]
    comm: Option<String>,
    /// Of listeners at this port only
    #[arg(long, value_name = "N", value_parser = units::up_to::<65_535>, allow_hyphen_values = true)]
    port: Option<u32>,
    /// Of listeners at this address only: 192.0.2.1, 0.0.0.0 or ::
    #[arg(long, value_name = "ADDR", value_parser = address, allow_hyphen_values = true)]
    listen: Option<IpAddr>,
    /// Of processes in this cgroup (version 2) and those below it: /sys/fs/cgroup/system.slice
    #[arg(long, value_name = "PATH")]
    cgroup: Option<PathBuf>,
    /// End after this time
    #[arg(long = "for", value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    time: Option<Duration>,
    #[command(flatten)]
    output: Output,
}

impl AcceptFlags {
    pub(super) fn run(self) -> anyhow::Result<Exit> {
        let accept = Accept {
            process: self.pid,
            name: self.comm.clone(),
            address: self.listen,
            port: self.port.map(|port| port as u16),
            cgroup: self.cgroup.as_deref().map(cgroup_id).transpose()?,
            time: self.time,
        };
        let stop = stop::flag()?;
        let started = OffsetDateTime::now_utc();
        let line = Line::new(self.output.quiet);
        let attached = || {
            if !self.output.quiet {
                // Not for a terminal alone: whoever starts it from a script waits for this line.
                let _ = writeln!(io::stderr(), "tracing accept()");
            }
        };
        let outcome = accept.run(&stop, attached, |news| line.tell(&words(news)))?;
        line.finish();
        let host = output::host(
            &["net.core.somaxconn", "net.ipv4.tcp_max_syn_backlog", "net.ipv4.tcp_abort_on_overflow"],
            &[],
        );
        let record =
            output::record("trace accept", started, host, self.settings(), outcome.validity, outcome.results);
        self.output.finish(&Saved::TraceAccept(record))
    }

    fn settings(&self) -> TraceAcceptSettings {
        TraceAcceptSettings {
            process: self.pid,
            name: self.comm.clone(),
            listen: self.listen.map(|address| address.to_string()),
            port: self.port.map(|port| port as u16),
            cgroup: self.cgroup.as_ref().map(|path| path.display().to_string()),
            for_ns: self.time.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
        }
    }
}

/// How it goes, for the line.
fn words(news: &AcceptNews) -> Vec<String> {
    let time = |ns: u64| format!("{:.1} us", ns as f64 / 1000.0);
    let mut words = vec![
        format!("{:.1} s", news.elapsed.as_secs_f64()),
        format!("{:.0} accepts/s", news.accepts_per_s),
        format!("wait p50 {} p99 {}", time(news.p50_ns), time(news.p99_ns)),
        format!("depth {}", HumanCount(news.depth_max.into())),
        format!("{} accepts", HumanCount(news.accepts)),
    ];
    for (number, what) in
        [(news.woken, "woken for nothing"), (news.overflows, "overflows"), (news.lost, "lost")]
    {
        if number > 0 {
            words.push(format!("{} {what}", HumanCount(number)));
        }
    }
    words
}
