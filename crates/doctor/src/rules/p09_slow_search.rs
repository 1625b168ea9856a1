use fourtuple_record::Severity;
use fourtuple_record::snapshot::Snapshot;

use crate::draft::{Draft, Remedy};
use crate::remedies::shorter_searches;
use crate::rule::{Checked, Rule, Threshold};
use crate::words::{counted, percent, process};

pub(super) const RULE: Rule = Rule {
    id: "P09",
    title: "the search for a port is slow",
    source: "tracepoints around the port search of connect() (`fourtuple trace connect`)",
    threshold: Some(Threshold { default: 500.0, unit: "us, the 99th percentile of the search" }),
    explanation: &[
        "connect() looks for a source port before it sends the SYN (__inet_hash_connect). With free ports this takes 5 to 20 us. If many ports are in \
         use, it takes milliseconds of CPU time: up to half of the range is looked at in vain (P02), or ports that bind() holds (P06), or ports in \
         TIME_WAIT, each of which takes a lock and costs about three times as much as an established connection.",
        "Connections of doctor to itself cannot replace the trace: a port that connections to another destination use is free for them, so \
         that they are fast while connect() to a destination without free ports is slow. Without a trace P02 computes the length of the search \
         from the ports in use.",
        "The rule needs a trace, with at least 100 searches. It also wants a mean of a tenth of the threshold, because a thread that loses its processor \
         during a search gives a high percentile on a busy host.",
        "What helps: `fourtuple fix ports` for running programs, `fourtuple run`, IP_LOCAL_PORT_RANGE in the program (Linux 6.8), fewer ports in use. \
         Where no port is free, only ports that become free help (P01). \
         Linux 6.15 searches under RCU, which removes the contention of processors, not the length.",
        "What does not help: more processors, non-blocking connect(), a faster network: the search comes before the handshake.",
    ],
    check,
};

/// Fewer searches have no 99th percentile.
const MIN_SEARCHES: u64 = 100;

fn check(snapshot: &Snapshot, limit: f64) -> Checked {
    let traced = snapshot.traced.seen().map_err(|reason| {
        format!(
            "{reason}; `fourtuple trace connect --for 10s` measures the search; P02 and P06 compute its length from the ports in use"
        )
    })?;
    let Some(p99_ns) = traced.search_p99_ns else { return Ok(Vec::new()) };
    let Some(mean_ns) = traced.search_ns.checked_div(traced.searches) else { return Ok(Vec::new()) };
    let limit_ns = limit * 1e3;
    if traced.searches < MIN_SEARCHES || (p99_ns as f64) < limit_ns || (mean_ns as f64) < limit_ns / 10.0 {
        return Ok(Vec::new());
    }
    let verdict = format!(
        "connect() searches {:.1} ms for a port (99th percentile of {}, mean {:.2} ms)",
        p99_ns as f64 / 1e6,
        counted(traced.searches, "search"),
        mean_ns as f64 / 1e6
    );
    let of_one_cpu = percent(traced.search_ns, snapshot.interval_ns);
    let mut draft = Draft::new(Severity::Warning, "connect()", verdict)
        .because(format!("the searches take {of_one_cpu} of one processor"));
    for connects in traced.connects.iter().filter(|connects| connects.searches > 0).take(3) {
        draft = draft.because(format!(
            "{} → {}: mean {:.2} ms of {}",
            process(&connects.owner),
            connects.destination,
            connects.search_mean_ns as f64 / 1e6,
            counted(connects.searches, "search")
        ));
    }
    Ok(vec![shorter_searches(draft, snapshot, traced).proper(Remedy::advice(
        "in the program: IP_LOCAL_PORT_RANGE (51) with 0xFFFF0000 before connect(), or a start with `fourtuple run -- PROGRAM`",
        "the search goes port by port (Linux 6.8 and later)",
    ))])
}
