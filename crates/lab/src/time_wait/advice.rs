use fourtuple_measure::words::{counted, grouped};
use fourtuple_record::{TimeWaitResults, TimeWaitRun, format_duration};

use crate::time_wait::Remedy;

/// Returns advice from the runs: the findings, and the settings that help here.
pub fn advice(results: &TimeWaitResults) -> Vec<String> {
    let find = |name: &str| results.runs.iter().find(|run| run.remedy == name);
    let mut lines = vec![format!(
        "A source address that closes first has {} to one destination, and each stays in TIME_WAIT for 60.0s: it cannot \
         sustain more than {:.0} connections per second.",
        counted(results.ports, "port"),
        results.ceiling_per_s
    )];
    if let Some(run) = find("none-over")
        && let Some(at) = run.stalled_at
    {
        lines.push(format!(
            "Transaction {} found no port (EADDRNOTAVAIL) {}. The {} transactions before it took {}.",
            grouped(at),
            if run.cut {
                format!(
                    "and would have waited for one for {}; the run ended earlier",
                    format_duration(run.predicted_stall_ns)
                )
            } else {
                format!(
                    "and waited for one for {} (predicted: {})",
                    format_duration(run.stall_ns),
                    format_duration(run.predicted_stall_ns)
                )
            },
            grouped(at - 1),
            format_duration(((at - 1) as f64 / run.rate_per_s.max(1e-9) * 1e9) as u64),
        ));
    }
    let helped: Vec<&str> = results.runs.iter().filter(|run| helps(run)).map(description).collect();
    if !helped.is_empty() {
        lines.push(format!(
            "The same transactions did not stall with each of these changes: {}.",
            helped.join("; ")
        ));
    }
    if let Some(run) = find("tcp-tw-reuse")
        && run.stall_ns > 0
        && !run.cut
    {
        lines.push(format!(
            "tcp_tw_reuse=1 shortened the stall to {}: connect() may reuse a port after one second in TIME_WAIT (before Linux 6.14, \
             after up to one second).",
            format_duration(run.stall_ns)
        ));
    }
    lines
}

fn helps(run: &TimeWaitRun) -> bool {
    !run.remedy.starts_with("none") && run.stalled_at.is_none() && run.completed == run.transactions
}

fn description(run: &TimeWaitRun) -> &str {
    run.remedy.parse().map_or(&run.remedy, |remedy: Remedy| remedy.description)
}
