//! Results of a trace of connect(), from the counters of the kernel.

use std::cmp::Reverse;
use std::net::SocketAddr;
use std::time::Duration;

use fourtuple_bpf::connect_search::{Event, Totals, Tuple};
use fourtuple_bpf::tracing::COARSE_BITS;
use fourtuple_record::measure::LogLinear;
use fourtuple_record::snapshot::Part;
use fourtuple_record::{ByParity, TraceConnectResults, TraceHeat, TraceSample, TraceStep, TraceTuple};

use crate::trace::connect::Protocol;
use crate::trace::ended::{self, is_alive};
use crate::trace::fill::{self, Answers, Fill, Question};
use crate::trace::times::{distribution, times};

/// Maximum number of pairs of process and destination whose ports in use are counted. Each takes a dump of all sockets of
/// a network namespace.
const FILLS: usize = 8;

/// Returns the histogram of all searches that found a port.
pub(crate) fn all_searches(totals: &Totals) -> LogLinear {
    let mut all = times(&totals.even);
    all.merge(&times(&totals.odd));
    all
}

/// The connects of a process to a destination, or of many processes of one name that have ended.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) tuple: Tuple,
    pub(crate) processes: u32,
}

/// Makes one row of many processes that have ended. Returns the rows, and the row of each tuple.
pub(crate) fn rows(tuples: &[Tuple], is_alive: impl Fn(u32) -> bool) -> (Vec<Row>, Vec<usize>) {
    let kind = |tuple: &Tuple| {
        (tuple.key.port != 0).then(|| (tuple.name(), tuple.key.address(), tuple.key.port, tuple.namespace))
    };
    let mut row_of = vec![usize::MAX; tuples.len()];
    let rows = ended::rows(tuples, kind, |tuple| tuple.key.process, is_alive);
    let rows = rows.into_iter().enumerate().map(|(at, ended::Row { items, processes })| {
        items.iter().for_each(|&index| row_of[index] = at);
        let sum = items[1..].iter().fold(tuples[items[0]], |sum, &other| sum.plus(&tuples[other]));
        Row { tuple: sum, processes }
    });
    (rows.collect(), row_of)
}

/// Builds the results, without tier, losses, heat map and flame graph. Returns also why the number of ports in use is
/// unknown, if it is.
pub(crate) fn results(
    protocol: Protocol,
    totals: &Totals,
    tuples: Vec<Tuple>,
    mut events: Vec<Event>,
    elapsed: Duration,
) -> (TraceConnectResults, Option<String>) {
    let (rows, row_of) = rows(&tuples, is_alive);
    let mut order: Vec<usize> = (0..rows.len()).filter(|&index| rows[index].tuple.key.port != 0).collect();
    // Process and destination break ties, so that equal counters give the same order in every run.
    order.sort_by_cached_key(|&index| {
        let tuple = &rows[index].tuple;
        let weight = tuple.searches().iter().sum::<u64>() + tuple.failed + tuple.given_port;
        (Reverse(weight), tuple.key.process, tuple.key.address(), tuple.key.port)
    });
    let mut rank = vec![None; rows.len()];
    order.iter().zip(0_u32..).for_each(|(&index, sorted)| rank[index] = Some(sorted));
    events.sort_by_key(|event| event.at_ns);
    let samples = events.iter().map(|event| TraceSample {
        at_ns: event.at_ns,
        search_ns: event.search_ns,
        source_port: (event.source_port != 0).then_some(event.source_port),
        tuple: row_of.get(event.tuple as usize).and_then(|&row| rank[row]),
    });
    let (even, odd, all) = (times(&totals.even), times(&totals.odd), all_searches(totals));
    let searches = all.count();
    // A UDP port is in use for all destinations, so a number for one destination would say little.
    let fills = if protocol == Protocol::Tcp { FILLS } else { 0 };
    let questions: Vec<Question> =
        order.iter().take(fills).map(|&index| question(&rows[index].tuple)).collect();
    let Answers { mut fills, error } = fill::count(&questions);
    fills.resize(order.len(), None);
    let results = TraceConnectResults {
        tier: String::new(),
        tier_reason: None,
        elapsed_ns: elapsed.as_nanos() as u64,
        searches,
        searches_per_s: searches as f64 / elapsed.as_secs_f64().max(1e-9),
        failed: totals.failures().collect(),
        given_port: totals.given_port,
        established: totals.established,
        untimed: totals.untimed,
        lost: 0,
        notes: Vec::new(),
        switched: totals.switched,
        search_ns: ByParity { all: distribution(&all), even: distribution(&even), odd: distribution(&odd) },
        failed_search_ns: distribution(&times(&totals.failed)),
        handshake_ns: distribution(&times(&totals.handshake)),
        histogram: histogram(&even, &odd),
        heat: TraceHeat::default(),
        flame: None,
        samples: samples.collect(),
        calls: Part::default(),
        symptoms: Part::default(),
        tuples: order.iter().zip(fills).map(|(&index, fill)| tuple_result(&rows[index], fill)).collect(),
    };
    (results, error)
}

/// Merges the histograms of even and odd ports, without empty steps.
fn histogram(even: &LogLinear, odd: &LogLinear) -> Vec<TraceStep> {
    let mut steps: Vec<TraceStep> = even
        .steps()
        .map(|(from_ns, even)| TraceStep { from_ns, even, odd: 0 })
        .chain(odd.steps().map(|(from_ns, odd)| TraceStep { from_ns, even: 0, odd }))
        .collect();
    steps.sort_by_key(|step| step.from_ns);
    steps.dedup_by(|next, step| {
        let same = next.from_ns == step.from_ns;
        if same {
            (step.even, step.odd) = (step.even + next.even, step.odd + next.odd);
        }
        same
    });
    steps
}

fn question(tuple: &Tuple) -> Question {
    Question {
        namespace: tuple.namespace,
        process: tuple.key.process,
        destination: SocketAddr::new(tuple.key.address(), tuple.key.port),
    }
}

/// Returns the times of the searches that found an even and an odd port.
pub(crate) fn by_parity(tuple: &Tuple) -> (LogLinear, LogLinear) {
    let of = |odd: usize| {
        let counts = tuple.buckets[odd].iter().map(|&number| u64::from(number)).collect();
        // The kernel keeps no maximum for a pair; u64::MAX leaves the end of the last bucket as the bound.
        LogLinear::new(COARSE_BITS, counts, tuple.search_ns[odd], u64::MAX)
    };
    (of(0), of(1))
}

pub(crate) fn tuple_result(row: &Row, fill: Option<Fill>) -> TraceTuple {
    let tuple = &row.tuple;
    let (even, odd) = by_parity(tuple);
    let mut all = even.clone();
    all.merge(&odd);
    let median = |times: &LogLinear| (times.count() > 0).then(|| times.quantile(0.5));
    let ([evens, odds], key) = (tuple.searches(), &tuple.key);
    let searches = evens + odds;
    TraceTuple {
        process: key.process,
        processes: row.processes,
        name: tuple.name(),
        destination: SocketAddr::new(key.address(), key.port).to_string(),
        namespace: tuple.namespace,
        searches,
        even: evens,
        odd: odds,
        mean_ns: (tuple.search_ns[0] + tuple.search_ns[1]) / searches.max(1),
        p99_ns: all.quantile(0.99),
        even_p50_ns: median(&even),
        odd_p50_ns: median(&odd),
        failed: tuple.failed,
        no_port: tuple.no_port,
        given_port: tuple.given_port,
        established: tuple.established,
        retries: tuple.retries,
        syn_retries: tuple.syn_retries,
        closed_first: tuple.closed_first,
        closed_by_peer: tuple.closed_by_peer,
        in_use: fill.map(|fill| fill.in_use),
        range: fill.map(|fill| fill.range),
        fill: fill.map(|fill| f64::from(fill.in_use) / f64::from(fill.range.max(1))),
    }
}
