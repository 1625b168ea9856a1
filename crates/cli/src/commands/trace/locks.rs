use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fourtuple_record::{Saved, TraceLocksSettings};
use fourtuple_report::flame::{COLOURS, Caption};
use fourtuple_trace::{LockNews, Locks};
use indicatif::HumanCount;
use time::OffsetDateTime;

use super::filter::{cgroup_id, name};
use super::flame;
use super::line::Line;
use crate::exit::Exit;
use crate::output::{self, Output};
use crate::{stop, units};

/// Which locks connections wait for: by class, by path through the kernel, by port, and what removes it
///
/// Spinlocks of TCP that somebody had to wait for, and tasks that slept until a socket had no owner, with the number and the
/// time of waits for each connection. Seen through stable tracepoints (tier tp_btf; Linux 5.19 and later), which needs
/// CAP_BPF, CAP_PERFMON and a kernel with BTF. It ends with Ctrl-C, SIGTERM or --for, and nothing stays attached.
#[derive(Debug, Args)]
pub(super) struct LocksFlags {
    /// Waits of this process only, as numbered where fourtuple runs
    #[arg(long, value_name = "N", value_parser = units::up_to::<{ i32::MAX as u32 }>, allow_hyphen_values = true)]
    pid: Option<u32>,
    /// Waits of threads of this name only (comm): 15 bytes at most
    #[arg(long, value_name = "NAME", value_parser = name)]
    comm: Option<String>,
    /// Waits of processes in this cgroup (version 2) and those below it: /sys/fs/cgroup/system.slice
    #[arg(long, value_name = "PATH")]
    cgroup: Option<PathBuf>,
    /// End after this time
    #[arg(long = "for", value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    time: Option<Duration>,
    /// Draw where in the kernel the time of waiting went, as a flame graph (SVG)
    #[arg(long, value_name = "FILE")]
    flame: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

impl LocksFlags {
    pub(super) fn run(self) -> anyhow::Result<Exit> {
        let locks = Locks {
            process: self.pid,
            name: self.comm.clone(),
            cgroup: self.cgroup.as_deref().map(cgroup_id).transpose()?,
            time: self.time,
        };
        let stop = stop::flag()?;
        let started = OffsetDateTime::now_utc();
        let line = Line::new(self.output.quiet);
        let attached = || {
            if !self.output.quiet {
                // Not for a terminal alone: whoever starts it from a script waits for this line.
                let _ = writeln!(io::stderr(), "tracing locks");
            }
        };
        let outcome = locks.run(&stop, attached, |news| line.tell(&words(news)))?;
        line.finish();
        let host = output::host(&["net.ipv4.ip_local_port_range", "net.ipv4.tcp_tw_reuse"], &[]);
        let record =
            output::record("trace locks", started, host, self.settings(), outcome.validity, outcome.results);
        let kernel = record.host.kernel.clone();
        let exit = self.output.finish(&Saved::TraceLocks(record))?;
        if let Some(path) = &self.flame {
            let subtitle = format!("kernel {kernel} · nanoseconds of waiting by path · {COLOURS}");
            let title = "fourtuple trace locks: time spent waiting";
            let caption = Caption { title, subtitle: &subtitle, unit: "ns" };
            flame::write(path, &outcome.folded, &caption, &self.output)?;
        }
        Ok(exit)
    }

    fn settings(&self) -> TraceLocksSettings {
        TraceLocksSettings {
            process: self.pid,
            name: self.comm.clone(),
            cgroup: self.cgroup.as_ref().map(|path| path.display().to_string()),
            for_ns: self.time.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
        }
    }
}

/// How it goes, for the line.
fn words(news: &LockNews) -> Vec<String> {
    let mut words = vec![
        format!("{:.1} s", news.elapsed.as_secs_f64()),
        format!("{} connections", HumanCount(news.connections)),
        format!("{} waits", HumanCount(news.waits)),
        format!("{:.1} ms", news.wait_ns as f64 / 1e6),
    ];
    words.extend(news.worst.map(|class| format!("most for {class}")));
    if news.lost > 0 {
        words.push(format!("{} lost", HumanCount(news.lost)));
    }
    words
}
