use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fourtuple_observe::trace::{Locks, LocksProgress};
use fourtuple_record::measure::words::counted;
use fourtuple_record::snapshot::Part;
use fourtuple_record::{Saved, TraceLocksSettings};
use fourtuple_report::duration;
use fourtuple_report::flame::{COLOURS, Caption};
use indicatif::HumanCount;

use crate::commands::trace::{
    Before, Description, NetworkFlags, cgroup_id, comm, process, run_instrument, write_flame,
};
use crate::exit::Exit;
use crate::line::Line;
use crate::output::Output;
use crate::save;
use crate::units::{self, nanoseconds};

/// Trace waits for TCP's locks, by class, kernel path and port
///
/// Reports waits for spinlocks of TCP and sleeps until a socket has no owner, with number and time per connection. Uses stable
/// tracepoints (tier tp_btf; Linux 5.19 and later); needs CAP_BPF, CAP_PERFMON and a kernel with BTF. Ends with Ctrl-C,
/// SIGTERM or --for; nothing stays attached.
#[derive(Debug, Args)]
pub(super) struct LocksFlags {
    /// Waits of this process only
    ///
    /// As numbered where fourtuple runs.
    #[arg(long, value_name = "PID", value_parser = units::up_to::<{ i32::MAX as u32 }>, allow_hyphen_values = true)]
    pid: Option<u32>,
    /// Processes or threads with this name only (comm)
    ///
    /// At most 15 bytes, as in /proc/PID/comm.
    #[arg(long, value_name = "NAME", value_parser = comm)]
    comm: Option<String>,
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
    /// Write a flame graph (SVG) of the waits by kernel path
    #[arg(long, value_name = "FILE", value_parser = save::new_file)]
    flame: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

impl LocksFlags {
    pub(super) fn run(mut self) -> anyhow::Result<Exit> {
        self.network.or_own(self.pid, self.cgroup.as_deref());
        let locks = Locks {
            process: self.pid.map(process).transpose()?,
            name: self.comm.clone(),
            cgroup: self.cgroup.as_deref().map(cgroup_id).transpose()?,
            network: None,
            time: self.time,
        };
        let description = Description {
            command: "trace locks",
            target: "locks",
            sysctls: &["net.ipv4.ip_local_port_range", "net.ipv4.tcp_tw_reuse"],
        };
        let show = |line: &Line, progress: &LocksProgress| line.set(&words(progress));
        let (record, folded) = self.network.within(|network| {
            let before = Before::read();
            let locks = Locks { network, ..locks };
            let (mut record, folded) =
                run_instrument(&description, &locks, self.settings(), &self.output, show)?;
            record.results.symptoms = before.explain(&mut Part::default());
            Ok((record, folded))
        })?;
        let kernel = record.host.kernel.clone();
        let exit = self.output.finish(&Saved::TraceLocks(record))?;
        if let Some(path) = &self.flame {
            let subtitle = format!("kernel {kernel} · nanoseconds of waiting by path · {COLOURS}");
            let title = "fourtuple trace locks: time spent waiting";
            let caption = Caption { title, subtitle: &subtitle, unit: "ns" };
            write_flame(path, &folded, &caption, &self.output)?;
        }
        Ok(exit)
    }

    fn settings(&self) -> TraceLocksSettings {
        TraceLocksSettings {
            process: self.pid,
            name: self.comm.clone(),
            netns: self.network.path(),
            cgroup: self.cgroup.as_ref().map(|path| path.display().to_string()),
            for_ns: self.time.map(nanoseconds),
        }
    }
}

/// Returns the parts of the live line.
fn words(progress: &LocksProgress) -> Vec<String> {
    let mut words = vec![
        duration(nanoseconds(progress.elapsed)),
        counted(progress.connections, "connection"),
        counted(progress.waits, "wait"),
        format!("waited {}", duration(progress.wait_ns)),
    ];
    words.extend(progress.worst.map(|class| format!("most for {class}")));
    if progress.lost > 0 {
        words.push(format!("{} lost", HumanCount(progress.lost)));
    }
    words
}
