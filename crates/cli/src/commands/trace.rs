use std::fs;
use std::io::{self, IsTerminal, Write};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use fourtuple_record::{Saved, TraceConnectSettings};
use fourtuple_trace::{Connect, News};
use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};
use time::OffsetDateTime;

use crate::exit::{Exit, UsageError};
use crate::output::{self, Output};
use crate::{stop, units};

/// Where the programs of this host spend their time in the kernel, without a change to them
#[derive(Debug, Args)]
pub(crate) struct Trace {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Connect(ConnectFlags),
}

/// How long connect() of TCP looks for a source port, apart from the handshake
///
/// By process and destination and by the parity of the port, with the connects that failed and their errno. Seen through
/// stable tracepoints (tier tp_btf), which needs CAP_BPF, CAP_PERFMON and a kernel with BTF. It ends with Ctrl-C, SIGTERM or
/// --for, and nothing stays attached.
#[derive(Debug, Args)]
struct ConnectFlags {
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
    #[command(flatten)]
    output: Output,
}

fn name(text: &str) -> Result<String, String> {
    match text.len() {
        1..=15 => Ok(text.to_owned()),
        _ => {
            Err(format!("{text:?} is not the name of a thread: expected 1 to 15 bytes, as in /proc/PID/comm"))
        }
    }
}

fn address(text: &str) -> Result<IpAddr, String> {
    text.parse()
        .map_err(|_| format!("{text:?} is not an address: expected one such as 192.0.2.1 or 2001:db8::1"))
}

/// The id of a cgroup is the inode of its directory.
fn cgroup_id(path: &Path) -> Result<u64, UsageError> {
    let refuse = |why: &str| {
        UsageError(format!(
            "invalid value '{}' for '--cgroup': {why}; expected a directory of a cgroup2 file system, such as \
             /sys/fs/cgroup/system.slice",
            path.display()
        ))
    };
    let directory = fs::metadata(path).map_err(|error| refuse(&error.to_string()))?;
    // Version 1 has none of these.
    if !path.join("cgroup.controllers").exists() {
        return Err(refuse("no cgroup of version 2"));
    }
    Ok(directory.ino())
}

impl Trace {
    pub(crate) fn run(self) -> anyhow::Result<Exit> {
        let What::Connect(flags) = self.what;
        flags.run()
    }
}

impl ConnectFlags {
    fn run(self) -> anyhow::Result<Exit> {
        let connect = Connect {
            process: self.pid,
            name: self.comm.clone(),
            address: self.dst,
            port: self.port.map(|port| port as u16),
            cgroup: self.cgroup.as_deref().map(cgroup_id).transpose()?,
            time: self.time,
            seed: self.output.seed,
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
        let outcome = connect.run(&stop, attached, |news| line.tell(news))?;
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
        self.output.finish(&Saved::TraceConnect(record))
    }

    fn settings(&self) -> TraceConnectSettings {
        TraceConnectSettings {
            process: self.pid,
            name: self.comm.clone(),
            destination: self.dst.map(|address| address.to_string()),
            port: self.port.map(|port| port as u16),
            cgroup: self.cgroup.as_ref().map(|path| path.display().to_string()),
            for_ns: self.time.map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
            seed: self.output.seed,
        }
    }
}

/// One line on stderr that says how it goes, if that is a terminal.
struct Line(Option<ProgressBar>);

impl Line {
    fn new(quiet: bool) -> Self {
        if quiet || !io::stderr().is_terminal() {
            return Line(None);
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5));
        bar.set_style(
            ProgressStyle::with_template("{spinner} {wide_msg}")
                .expect("the template names fields that there are"),
        );
        Line(Some(bar))
    }

    fn tell(&self, news: &News) {
        let Some(bar) = &self.0 else { return };
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
        bar.set_message(words.join("  "));
        bar.tick();
    }

    fn finish(self) {
        if let Some(bar) = self.0 {
            bar.finish_and_clear();
        }
    }
}
