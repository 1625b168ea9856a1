use fourtuple_record::{TimeWaitResults, TimeWaitRun, format_duration};

use crate::time_wait::Remedy;

/// Returns advice from the runs: the findings, and the settings that help here.
pub fn advice(results: &TimeWaitResults) -> Vec<String> {
    let find = |name: &str| results.runs.iter().find(|run| run.remedy == name);
    let mut lines = vec![format!(
        "One source that closes first has {} ports to one destination, each waits 60.0s: more than {:.0} connections per \
         second cannot last.",
        results.ports, results.ceiling_per_s
    )];
    if let Some(run) = find("none-over")
        && let Some(at) = run.stalled_at
    {
        lines.push(format!(
            "Transaction {at} found no port (EADDRNOTAVAIL) and {}; the {} before it took {}.",
            if run.cut {
                format!(
                    "was not waited for: {} would have been left of its 60.0s",
                    format_duration(run.predicted_stall_ns)
                )
            } else {
                format!(
                    "waited {} ({} were predicted)",
                    format_duration(run.stall_ns),
                    format_duration(run.predicted_stall_ns)
                )
            },
            at - 1,
            format_duration(((at - 1) as f64 / run.rate_per_s.max(1e-9) * 1e9) as u64),
        ));
    }
    let helped: Vec<&str> = results.runs.iter().filter(|run| helps(run)).map(description).collect();
    if !helped.is_empty() {
        lines.push(format!("The same transactions did not stall with: {}.", helped.join("; ")));
    }
    if let Some(run) = find("tcp-tw-reuse")
        && run.stall_ns > 0
        && !run.cut
    {
        lines.push(format!(
            "tcp_tw_reuse=1 shortened the stall to {}: a port is taken over once it has waited for a second (before Linux 6.14: up to a second).",
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
