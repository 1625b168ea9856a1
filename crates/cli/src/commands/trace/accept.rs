use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fourtuple_observe::trace::{Accept, AcceptProgress};
use fourtuple_record::measure::words::counted;
use fourtuple_record::{Saved, TraceAcceptSettings};
use fourtuple_report::duration;
use indicatif::HumanCount;

use crate::commands::trace::{
    Before, Description, NetworkFlags, address, cgroup_id, comm, process, run_instrument,
};
use crate::exit::Exit;
use crate::line::Line;
use crate::output::Output;
use crate::units::{self, nanoseconds};

/// Trace accept(): the wait in the accept queue, and the worker
///
/// How long TCP connections wait, and which worker accepts them. Reports, by listener and by thread, the wait in the accept queue, the depth of the queue, spurious wakeups, overflows,
/// open connections and active closes. Uses stable tracepoints (tier tp_btf); needs CAP_BPF, CAP_PERFMON, a kernel with BTF
/// and Linux 6.3. Ends with Ctrl-C, SIGTERM or --for; nothing stays attached.
#[derive(Debug, Args)]
pub(super) struct AcceptFlags {
    /// Accepts of this process only
    ///
    /// As numbered where fourtuple runs.
    #[arg(long, value_name = "PID", value_parser = units::up_to::<{ i32::MAX as u32 }>, allow_hyphen_values = true)]
    pid: Option<u32>,
    /// Processes or threads with this name only (comm)
    ///
    /// At most 15 bytes, as in /proc/PID/comm.
    #[arg(long, value_name = "NAME", value_parser = comm)]
    comm: Option<String>,
    /// Listeners on this port only
    #[arg(long, value_name = "N", value_parser = units::up_to::<65_535>, allow_hyphen_values = true)]
    port: Option<u32>,
    /// Listeners on this address only, also 0.0.0.0 or ::
    #[arg(long, value_name = "ADDR", value_parser = address, allow_hyphen_values = true)]
    listen: Option<IpAddr>,
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
    #[command(flatten)]
    output: Output,
}

impl AcceptFlags {
    pub(super) fn run(mut self) -> anyhow::Result<Exit> {
        self.network.or_own(self.pid, self.cgroup.as_deref());
        let accept = Accept {
            process: self.pid.map(process).transpose()?,
            name: self.comm.clone(),
            address: self.listen,
            port: self.port.map(|port| port as u16),
            cgroup: self.cgroup.as_deref().map(cgroup_id).transpose()?,
            network: None,
            time: self.time,
        };
        let description = Description {
            command: "trace accept",
            target: "accept()",
            sysctls: &[
                "net.core.somaxconn",
                "net.ipv4.tcp_max_syn_backlog",
                "net.ipv4.tcp_abort_on_overflow",
            ],
        };
        let show = |line: &Line, progress: &AcceptProgress| line.set(&words(progress));
        let record = self.network.within(|network| {
            let before = Before::read();
            let accept = Accept { network, ..accept };
            let (mut record, _) = run_instrument(&description, &accept, self.settings(), &self.output, show)?;
            record.results.symptoms = before.explain(&mut record.results.calls);
            Ok(record)
        })?;
        self.output.finish(&Saved::TraceAccept(record))
    }

    fn settings(&self) -> TraceAcceptSettings {
        TraceAcceptSettings {
            process: self.pid,
            name: self.comm.clone(),
            listen: self.listen.map(|address| address.to_string()),
            port: self.port.map(|port| port as u16),
            netns: self.network.path(),
            cgroup: self.cgroup.as_ref().map(|path| path.display().to_string()),
            for_ns: self.time.map(nanoseconds),
        }
    }
}

/// Returns the parts of the live line.
fn words(progress: &AcceptProgress) -> Vec<String> {
    let mut words = vec![
        duration(nanoseconds(progress.elapsed)),
        format!("{:.0} accepts/s", progress.accepts_per_s),
        format!("wait p50 {} p99 {}", duration(progress.p50_ns), duration(progress.p99_ns)),
        format!("depth {}", HumanCount(progress.depth_max.into())),
        counted(progress.accepts, "accept"),
    ];
    for (number, meaning) in
        [(progress.woken, "spurious wakeups"), (progress.overflows, "overflows"), (progress.lost, "lost")]
    {
        if number > 0 {
            words.push(format!("{} {meaning}", HumanCount(number)));
        }
    }
    words
}
