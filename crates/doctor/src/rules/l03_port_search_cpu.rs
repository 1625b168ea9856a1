use fourtuple_record::Severity;
use fourtuple_record::snapshot::Snapshot;

use crate::accepting::time;
use crate::draft::{Draft, Remedy};
use crate::remedies::shorter_searches;
use crate::rule::{Checked, Rule, Threshold};
use crate::words::counted;

pub(super) const RULE: Rule = Rule {
    id: "L03",
    title: "connect() spends CPU time in the port search",
    source: "the tracer of `fourtuple trace connect`",
    threshold: Some(Threshold { default: 5.0, unit: "% of the CPU time of all processors" }),
    explanation: &[
        "connect() looks for a local port whose 4-tuple is free (__inet_hash_connect), on the CPU, with softirqs disabled while it looks \
         at a port. While few ports are in use a search takes a few microseconds; once half of the range towards a destination is in use, \
         the search passes over half of the range first, which takes milliseconds (P02).",
        "The rule compares the time of all searches with the time of all processors during the interval.",
        "What helps: `fourtuple fix ports`, for programs that run; IP_LOCAL_PORT_RANGE on Linux 6.8 or later, which makes the search \
         linear; more source addresses or destinations; kept-alive connections. What does not help: more processors, because searches \
         towards one destination look at the same ports.",
    ],
    check,
};

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let traced = snapshot
        .traced
        .seen()
        .map_err(|reason| format!("{reason}; `fourtuple trace connect --for 10s` shows the searches"))?;
    let available = snapshot.interval_ns as f64 * f64::from(snapshot.processors.max(1));
    let share = traced.search_ns as f64 * 100.0 / available.max(1.0);
    if share < limit {
        return Ok(Vec::new());
    }
    let mean = traced.search_ns.checked_div(traced.searches).unwrap_or(0);
    let verdict = format!(
        "{share:.0}% of the CPU time is the port search of connect(): {}, {} each",
        counted(traced.searches, "search"),
        time(mean)
    );
    let mut draft = Draft::new(Severity::Warning, "port search", verdict);
    if let Some(p99) = traced.search_p99_ns {
        draft = draft.because(format!("1% of the searches took {} or longer", time(p99)));
    }
    let draft = shorter_searches(draft, snapshot, traced);
    Ok(vec![draft.now(Remedy::own("trace connect --for 10s", "shows the searches by process and destination")).proper(
        Remedy::advice(
            "kept-alive connections, more source addresses, or IP_LOCAL_PORT_RANGE; `fourtuple fix --print` prints the setting of a program",
            "the search ends after a few ports",
        ),
    )])
}
